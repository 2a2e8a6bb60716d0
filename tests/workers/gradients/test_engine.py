"""Every layer type against brute force: norms, norms by layer, weighted sums, micro-batches, multiplicity."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torchvision.ops import FrozenBatchNorm2d

from dpsweep.workers.gradients.engine import GradientEngine
from dpsweep.workers.models.extra_layers import WeightStandardizedConv2d
from tests.known import known
from tests.workers.brute_force import gradients_one_by_one, norms_of, per_example_loss
from tests.workers.devices import DEVICE

TOLERANCE = 1e-5


def as_tokens(x: Tensor) -> Tensor:
    return (x.abs() * 5).long().clamp(max=10)


class Scale(nn.Module):
    """Owns a parameter directly."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        return x * self.scale if shift is None else x * self.scale + shift


class Recurrent(nn.Module):
    """Reads what ``read`` returns of the outputs; the cell starts from a state that depends on the example."""

    def __init__(self, cell: nn.RNNBase, read: Callable[[Any], Tensor], width: int = 5) -> None:
        super().__init__()
        self.cell = cell
        self.read = read
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        directions = 2 if self.cell.bidirectional else 1
        state = x.mean((1, 2))[None, :, None].expand(directions * self.cell.num_layers, -1, 5).contiguous()
        outputs = self.cell(x, (state, state) if isinstance(self.cell, nn.LSTM) else state)
        out: Tensor = self.head(self.read(outputs))
        return out


class Lists(nn.Module):
    """Parameters in a list and a dictionary belong to the module that reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([torch.randn(5), torch.randn(5)])
        self.shifts = nn.ParameterDict({"last": torch.randn(5)})
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        for scale in self.scales:
            x = torch.tanh(x * scale)
        out: Tensor = self.head(x + self.shifts["last"])
        return out


class Shifted(nn.Module):
    """A layer in the fallback that is given a table of the sequence's length, which is no batch."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.scale = Scale(4)
        self.positions = torch.arange(4.0 * length).view(length, 4)
        self.head = nn.Linear(4 * length, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.scale(x, self.positions.to(x)))
        out: Tensor = self.head(hidden.flatten(1))
        return out


class Attending(nn.Module):
    """Self- or cross-attention, with or without masks."""

    def __init__(
        self, call: Callable[[nn.MultiheadAttention, Tensor], Tensor], width: int = 8, **options: bool
    ) -> None:
        super().__init__()
        self.call = call
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, **options)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.call(self.attention, x).mean(1))
        return out


class Translating(nn.Module):
    """Encoder and decoder layers, the latter with cross-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.both(x, x.flip(1)).mean(1))
        return out


class Tied(nn.Module):
    """One weight in two modules, one module called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.twice = nn.Linear(8, 8)
        self.decode = nn.Linear(8, 11, bias=False)
        self.decode.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.twice(torch.tanh(self.twice(self.embed(as_tokens(x)))))
        out: Tensor = self.decode(hidden.mean(1))
        return out


class Partial(nn.Module):
    """A parameter that is never used, and one behind a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(5, 2)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.head = nn.Linear(5, 3)
        self.head.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.frozen(x).relu())
        return out


def image_model(layer: nn.Module, channels: int = 6) -> nn.Module:
    return nn.Sequential(layer, nn.Tanh(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * channels, 3))


def public_statistics(layer: nn.BatchNorm1d | nn.BatchNorm2d) -> nn.Module:
    """In evaluation mode, with statistics as of other data."""
    known(layer.running_mean).uniform_(-1.0, 1.0)
    known(layer.running_var).uniform_(0.5, 2.0)
    return layer.eval()


def sequence_model(layer: nn.Module, width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), layer, nn.Tanh(), nn.Flatten(), nn.Linear(5 * width, 3))


def hooked() -> nn.Module:
    """Hooks that change what layers read and return run once, also around a layer in the fallback."""
    model = nn.Sequential(nn.Linear(5, 5), Scale(5), nn.Linear(5, 3))
    for layer in (model[0], model[1]):
        layer.register_forward_pre_hook(lambda module, args: (args[0] * 2.0,))
        layer.register_forward_hook(lambda module, args, output: output * 3.0)
    return model


def standardized() -> nn.Module:
    layer = WeightStandardizedConv2d(4, 6, 3, stride=2, padding=1)
    with torch.no_grad():
        layer.gain.copy_(torch.tensor([1.0, -2.0, 0.0, 0.5, 0.01, 3.0]))  # 0 and small ones cannot be divided by
        layer.weight[1] *= 1e-4  # so small that its variance is clamped
        known(layer.bias).normal_()
    return layer


def padding_mask(x: Tensor) -> Tensor:
    """Some positions, but never the first, which the causal mask lets everyone see."""
    return (x[:, :, 0] > 0.7) & (torch.arange(x.shape[1]) > 0)


CAUSAL = torch.ones(5, 5, dtype=torch.bool, device=DEVICE).triu(1)
IMAGE, SEQUENCE, TOKENS, ROWS = (4, 9, 8), (5, 4), (5,), (5,)


@dataclass(frozen=True)
class Case:
    model: Callable[[], nn.Module]
    shape: tuple[int, ...]

    def inputs(self, rows: int = 6) -> tuple[Tensor, Tensor]:
        generator = torch.Generator(DEVICE).manual_seed(1)
        x = torch.randn(rows, *self.shape, generator=generator)
        return x, torch.randint(0, 3, (rows,), generator=generator)


class Tokens(nn.Embedding):
    """An embedding and a head in one model; a subclass that keeps the computation keeps the rule."""


class Embedded(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed = Tokens(11, 8, **options)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.embed(as_tokens(x)).tanh().mean(1))
        return out


CASES: dict[str, Case] = {
    "linear": Case(lambda: nn.Sequential(nn.Linear(5, 4), nn.ReLU(inplace=True), nn.Linear(4, 3)), ROWS),
    "linear without bias": Case(lambda: nn.Linear(5, 3, bias=False), ROWS),
    "linear on sequences": Case(lambda: sequence_model(nn.Linear(8, 8)), SEQUENCE),
    "linear on many positions": Case(
        lambda: nn.Sequential(nn.Linear(8, 2), nn.Tanh(), nn.Linear(2, 2), nn.Flatten(), nn.Linear(72, 3)), IMAGE
    ),
    "conv1d": Case(lambda: nn.Sequential(nn.Conv1d(5, 6, 2), nn.Tanh(), nn.Flatten(), nn.Linear(18, 3)), SEQUENCE),
    "conv2d": Case(lambda: image_model(nn.Conv2d(4, 6, 3)), IMAGE),
    "conv2d padded": Case(lambda: image_model(nn.Conv2d(4, 6, (3, 2), padding=(2, 1))), IMAGE),
    "conv2d same": Case(lambda: image_model(nn.Conv2d(4, 6, (3, 4), padding="same", dilation=(2, 1))), IMAGE),
    "conv2d valid": Case(lambda: image_model(nn.Conv2d(4, 6, 3, padding="valid", bias=False)), IMAGE),
    "conv2d strided dilated": Case(lambda: image_model(nn.Conv2d(4, 6, 3, stride=2, padding=2, dilation=2)), IMAGE),
    "conv2d 1x1": Case(lambda: image_model(nn.Conv2d(4, 6, 1, stride=2)), IMAGE),
    "conv2d grouped": Case(lambda: image_model(nn.Conv2d(4, 6, 3, groups=2, padding=1)), IMAGE),
    "conv2d depthwise": Case(lambda: image_model(nn.Conv2d(4, 4, 3, groups=4), 4), IMAGE),
    "conv2d circular": Case(lambda: image_model(nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular")), IMAGE),
    "conv2d reflecting": Case(lambda: image_model(nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect")), IMAGE),
    "conv2d of 16 channels": Case(
        lambda: image_model(nn.Sequential(nn.Conv2d(4, 16, 3, padding=1), nn.Conv2d(16, 16, 5, padding=2)), 16), IMAGE
    ),
    "conv2d on few pixels": Case(
        lambda: nn.Sequential(
            nn.Conv2d(4, 16, 3, stride=4), nn.Tanh(), nn.Conv2d(16, 32, 2), nn.Flatten(), nn.Linear(32, 3)
        ),
        IMAGE,
    ),
    "conv3d": Case(
        lambda: nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Conv3d(2, 3, 2), nn.Flatten(), nn.Linear(168, 3)), IMAGE
    ),
    "weight-standardised conv2d": Case(lambda: image_model(standardized()), IMAGE),
    "weight-standardised conv2d, then in place": Case(
        lambda: nn.Sequential(
            WeightStandardizedConv2d(4, 6, 3),
            nn.ELU(inplace=True),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(24, 3),
        ),
        IMAGE,
    ),
    "transposed conv2d": Case(lambda: image_model(nn.ConvTranspose2d(4, 6, 3, stride=2)), IMAGE),
    "transposed conv2d grouped": Case(
        lambda: image_model(nn.ConvTranspose2d(4, 6, (3, 2), stride=2, padding=1, output_padding=1, groups=2)), IMAGE
    ),
    "transposed conv2d, longer than its reach": Case(
        lambda: image_model(nn.ConvTranspose2d(4, 6, 3, padding=2, dilation=3, output_padding=2, bias=False)), IMAGE
    ),
    "transposed conv3d": Case(
        lambda: nn.Sequential(
            nn.Unflatten(1, (2, 2)),
            nn.ConvTranspose3d(2, 3, 2),
            nn.AdaptiveAvgPool3d(2),
            nn.Flatten(),
            nn.Linear(24, 3),
        ),
        IMAGE,
    ),
    "embedding": Case(lambda: Embedded(), TOKENS),
    "embedding with padding": Case(lambda: Embedded(padding_idx=2), TOKENS),
    "batch norm of constant statistics": Case(lambda: image_model(public_statistics(nn.BatchNorm2d(4)), 4), IMAGE),
    "frozen batch norm": Case(
        lambda: image_model(public_statistics(nn.BatchNorm2d(4)).requires_grad_(False), 4), IMAGE
    ),
    "torchvision's frozen batch norm": Case(lambda: image_model(FrozenBatchNorm2d(4), 4), IMAGE),
    "batch norm of rows": Case(lambda: nn.Sequential(public_statistics(nn.BatchNorm1d(5)), nn.Linear(5, 3)), ROWS),
    "group norm": Case(lambda: image_model(nn.GroupNorm(2, 4), 4), IMAGE),
    "group norm of rows": Case(lambda: nn.Sequential(nn.GroupNorm(1, 5), nn.Linear(5, 3)), ROWS),
    "instance norm": Case(lambda: image_model(nn.InstanceNorm2d(4, affine=True), 4), IMAGE),
    "layer norm": Case(lambda: sequence_model(nn.LayerNorm(8)), SEQUENCE),
    "layer norm of two axes": Case(lambda: sequence_model(nn.LayerNorm([5, 8])), SEQUENCE),
    "rms norm": Case(lambda: sequence_model(nn.RMSNorm(8)), SEQUENCE),
    "self-attention": Case(lambda: Attending(lambda a, x: a(x, x, x)[0]), (5, 8)),
    "self-attention, flash": Case(
        lambda: Attending(lambda a, x: a(x, x, x, need_weights=False)[0], bias=False), (5, 8)
    ),
    "masked self-attention": Case(
        lambda: Attending(lambda a, x: a(x, x, x, key_padding_mask=padding_mask(x), attn_mask=CAUSAL)[0]), (5, 8)
    ),
    "cross-attention": Case(lambda: Attending(lambda a, x: a(x, x.flip(1), x * 2)[0]), (5, 8)),
    "attention with an extra key": Case(lambda: Attending(lambda a, x: a(x, x, x)[0], add_bias_kv=True), (5, 8)),
    "transformer layer": Case(
        lambda: nn.Sequential(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), nn.Flatten(), nn.Linear(40, 3)
        ),
        (5, 8),
    ),
    "cross-attention without weights": Case(
        lambda: Attending(lambda a, x: a(x, x.flip(1), x * 2, attn_mask=CAUSAL, need_weights=False)[0]), (5, 8)
    ),
    "attention weights alone": Case(
        lambda: Attending(lambda a, x: a(x, x * 2, x, average_attn_weights=False)[1].flatten(2), width=25), (5, 8)
    ),
    "transformer": Case(Translating, (5, 8)),
    "lstm": Case(
        lambda: Recurrent(nn.LSTM(4, 5, batch_first=True), lambda outputs: outputs[0][:, -1]),
        SEQUENCE,
    ),
    "state of an lstm": Case(
        lambda: Recurrent(nn.LSTM(4, 5, num_layers=2, batch_first=True), lambda outputs: outputs[1][1][-1]), SEQUENCE
    ),
    "states of a gru": Case(
        lambda: Recurrent(
            nn.GRU(4, 5, bidirectional=True, batch_first=True), lambda outputs: torch.cat([*outputs[1]], 1), 10
        ),
        SEQUENCE,
    ),
    "lists of parameters": Case(Lists, ROWS),
    "a table as long as the batch": Case(lambda: Shifted(6), (6, 4)),
    "a table as long as what is verified": Case(lambda: Shifted(3), (3, 4)),
    "hooks of the user": Case(hooked, ROWS),
    "sparse embedding": Case(lambda: Embedded(sparse=True), TOKENS),
    "own parameter": Case(lambda: nn.Sequential(nn.Linear(5, 5), Scale(5), nn.Linear(5, 3)), ROWS),
    "prelu": Case(lambda: nn.Sequential(nn.Linear(5, 5), nn.PReLU(5), nn.Linear(5, 3)), ROWS),
    "prelu of one slope": Case(lambda: nn.Sequential(nn.Linear(5, 5), nn.PReLU(), nn.Linear(5, 3)), ROWS),
    "prelu of images": Case(lambda: image_model(nn.PReLU(4), 4), IMAGE),
    "weight norm": Case(lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(5, 4)), nn.Linear(4, 3)), ROWS),
    "bilinear through a residual": Case(lambda: nn.Sequential(nn.Linear(5, 5), Scale(5), Scale(5)), ROWS),
    "shared": Case(Tied, TOKENS),
    "frozen and unused": Case(Partial, ROWS),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.mark.thinned(24)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("multiplicity", "micro_batch_size"), [(1, None), (2, None), (1, 4), (3, 1)])
def test_agrees_with_one_example_at_a_time(name: str, multiplicity: int, micro_batch_size: int | None) -> None:
    model = CASES[name].model()
    x, y = CASES[name].inputs()
    expected = gradients_one_by_one(model, x, y, multiplicity)
    examples = len(x) // multiplicity
    weights = torch.linspace(0.2, 1.0, examples, device=DEVICE)
    engine = GradientEngine(model, per_example_loss, multiplicity=multiplicity, micro_batch_size=micro_batch_size)
    total = norms_of(expected).norm()

    got = engine.weighted_sum(x, y, lambda norms: weights)
    rowwise = engine.weighted_sum_rowwise(x, y, lambda norms, rows: weights[rows])

    for norms in (got.norms, rowwise.norms, engine.norms(x, y)):
        torch.testing.assert_close(norms.norms, norms_of(expected), rtol=TOLERANCE, atol=0)
    for result in (got, rowwise):
        assert result.non_finite == 0
        assert list(result.gradients) == list(expected)
        for parameter, gradient in result.gradients.items():
            reference = torch.tensordot(weights, expected[parameter], 1)
            assert gradient.shape == reference.shape
            assert float((gradient - reference).norm()) <= TOLERANCE * float(total)


def test_layers_whose_examples_have_few_rows_are_measured_together() -> None:
    """Each has the norms of its own: 12 users of four rows, in three linear layers."""
    model = nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 20)).to(DEVICE)
    x, y = torch.randn(48, 30, device=DEVICE), torch.randint(3, (48,), device=DEVICE)
    expected = gradients_one_by_one(model, x, y, 4)
    engine = GradientEngine(model, per_example_loss, multiplicity=4, layerwise=True)
    found = engine.weighted_sum(x, y, lambda norms: torch.ones(12, device=DEVICE)).norms
    torch.testing.assert_close(found.norms, norms_of(expected), rtol=TOLERANCE, atol=0)
    assert found.layer_norms is not None
    for layer, name in enumerate(engine.layer_names):
        own = {key: each for key, each in expected.items() if _layer_of(key, engine.layer_names) == name}
        torch.testing.assert_close(found.layer_norms[:, layer], norms_of(own), rtol=TOLERANCE, atol=0, msg=name)


@pytest.mark.thinned(8)
@pytest.mark.parametrize("name", CASES)
def test_weights_and_norms_by_layer(name: str) -> None:
    model = CASES[name].model()
    x, y = CASES[name].inputs()
    expected = gradients_one_by_one(model, x, y)
    for micro_batch_size in (None, 4):
        engine = GradientEngine(model, per_example_loss, layerwise=True, micro_batch_size=micro_batch_size)
        layers = [_layer_of(parameter, engine.layer_names) for parameter in expected]
        weights = torch.rand(len(x), len(engine.layer_names))

        got = engine.weighted_sum(x, y, lambda norms, weights=weights: weights)  # type: ignore[misc]  # mypy infers no lambda with defaults

        assert got.norms.layer_norms is not None
        for index, layer in enumerate(engine.layer_names):
            members = {p: g for (p, g), owner in zip(expected.items(), layers, strict=True) if owner == layer}
            if members:  # the second module of a shared weight has none of its own
                torch.testing.assert_close(
                    got.norms.layer_norms[:, index], norms_of(members), rtol=TOLERANCE, atol=1e-6
                )
            for parameter, gradients in members.items():
                reference = torch.tensordot(weights[:, index], gradients, 1)
                torch.testing.assert_close(got.gradients[parameter], reference, rtol=1e-4, atol=1e-6)


def _layer_of(parameter: str, layers: tuple[str, ...]) -> str:
    owners = [layer for layer in layers if parameter.startswith(f"{layer}.")]
    return max(owners, key=len) if owners else "model"
