"""Models that people bring: the plan accepts those that a run trains, and refuses the others by cause and cure."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from dpsweep.orchestration.sweeps.plan import plan_sweep
from dpsweep.orchestration.sweeps.planned import Plan
from dpsweep.orchestration.sweeps.schema import parse_sweep
from dpsweep.orchestration.sweeps.user_code import permitted
from dpsweep.workers.imports import UserCode
from dpsweep.workers.trial import run_trial
from tests.orchestration.sample_grids import small

PIXELS = 64
MODULE = Path(__file__).stem


def through(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), *layers)


class Calls(nn.Module):
    """A model of one function of its layers and the flattened input."""

    def __init__(self, run: Callable[[Any, Tensor], object], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self._run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> object:
        return self._run(self, x.flatten(1))


def _routed(model: Any, x: Tensor) -> Any:
    gate = model.gate(x).softmax(1)
    outputs = torch.stack([expert(x) for expert in model.experts], 1)
    best = gate.argmax(1)
    rows = torch.arange(len(x))
    return outputs[rows, best] * gate[rows, best, None]


def _filtered(model: Any, x: Tensor) -> Any:
    kernel = torch.view_as_complex(model.kernel)
    return model.out(torch.fft.irfft(torch.fft.rfft(x) * kernel, n=PIXELS))


class Doubled(torch.autograd.Function):
    """A function with a backward pass of its own."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return 2.0 * x

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return 2.0 * gradient


def _linear() -> nn.Linear:
    return nn.Linear(PIXELS, 10)


TRAINS: dict[str, Callable[[], nn.Module]] = {
    "lazy layers": lambda: through(nn.LazyLinear(16), nn.Tanh(), nn.LazyLinear(10)),
    "lazy convolution": lambda: nn.Sequential(nn.LazyConv2d(4, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10)),
    "double precision inside": lambda: Calls(lambda m, x: m.out(x.double()).float(), out=_linear().double()),
    "experts routed by example": lambda: Calls(
        _routed, gate=nn.Linear(PIXELS, 3), experts=nn.ModuleList([_linear() for _ in range(3)])
    ),
    "complex filter of real parameters": lambda: Calls(
        _filtered, kernel=nn.Parameter(torch.randn(PIXELS // 2 + 1, 2)), out=_linear()
    ),
    "squeeze of a named axis": lambda: Calls(
        lambda m, x: m.conv(x[:, None]).squeeze(-1), conv=nn.Conv1d(1, 10, PIXELS)
    ),
    "weight normalised": lambda: through(parametrizations.weight_norm(_linear())),
    "dropout": lambda: through(nn.Dropout(0.3), _linear()),
    "residual with group norm": lambda: Calls(
        lambda m, x: m.out(x + m.norm(m.inner(x))),
        inner=nn.Linear(PIXELS, PIXELS),
        norm=nn.GroupNorm(4, PIXELS),
        out=_linear(),
    ),
    "recurrent": lambda: Calls(
        lambda m, x: m.out(m.gru(x.reshape(len(x), 8, 8))[0][:, -1]),
        gru=nn.GRU(8, 8, batch_first=True),
        out=nn.Linear(8, 10),
    ),
    "attention": lambda: Calls(
        lambda m, x: m.out(m.attend(*[x.reshape(len(x), 8, 8)] * 3)[0].mean(1)),
        attend=nn.MultiheadAttention(8, 2, batch_first=True),
        out=nn.Linear(8, 10),
    ),
    "own parameter in einsum": lambda: Calls(
        lambda m, x: torch.einsum("bi,io->bo", x, m.weight), weight=nn.Parameter(torch.zeros(PIXELS, 10))
    ),
    "graph layer of a fixed adjacency": lambda: Calls(
        lambda m, x: m.out(torch.relu(m.inner((torch.ones(8, 8) / 8) @ x.reshape(len(x), 8, 8))).flatten(1)),
        inner=nn.Linear(8, 8),
        out=_linear(),
    ),
    "own backward pass": lambda: Calls(lambda m, x: Doubled.apply(m.out(x)), out=_linear()),
    "checkpointed": lambda: Calls(
        lambda m, x: m.out(checkpoint(m.inner, x, use_reentrant=False)), inner=nn.Linear(PIXELS, PIXELS), out=_linear()
    ),
    "in-place activation": lambda: through(nn.Linear(PIXELS, 16), nn.ReLU(inplace=True), nn.Linear(16, 10)),
    "prelu and a learnt temperature": lambda: Calls(
        lambda m, x: m.act(m.out(x)) * m.temperature,
        act=nn.PReLU(),
        out=_linear(),
        temperature=nn.Parameter(torch.ones(1)),
    ),
    "frozen trunk": lambda: through(nn.Linear(PIXELS, 16).requires_grad_(False), nn.Tanh(), nn.Linear(16, 10)),
    "transposed convolution": lambda: Calls(
        lambda m, x: m.out(m.up(x.reshape(len(x), 1, 8, 8)).flatten(1)),
        up=nn.ConvTranspose2d(1, 2, 2, 2),
        out=nn.Linear(512, 10),
    ),
}
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "bfloat16": (lambda: through(_linear()).bfloat16(), r"torch\.bfloat16\).*train in float32, under autocast"),
    "complex": (
        lambda: Calls(
            lambda m, x: m.out((x * m.w).abs()), w=nn.Parameter(torch.ones(1, dtype=torch.complex64)), out=_linear()
        ),
        "real parameters .*view_as_complex",
    ),
    "two precisions": (
        lambda: Calls(lambda m, x: m.a(x) + m.b(x.double()).float(), a=_linear(), b=_linear().double()),
        r"one precision: return the model in \.float\(\), or in \.double\(\)",
    ),
    "squeeze of every axis": (
        lambda: Calls(lambda m, x: m.conv(x[:, None]).squeeze(), conv=nn.Conv1d(1, 10, PIXELS)),
        r"for 1 row it returns the shape \(10,\).*takes off the batch axis",
    ),
    "second head without a loss for it": (lambda: through(nn.Linear(PIXELS, 12)), "need a loss of your own"),
    "batch normalised": (lambda: through(_linear(), nn.BatchNorm1d(10)), "GroupNorm"),
    "spectral norm": (lambda: through(parametrizations.spectral_norm(_linear())), "weight_norm"),
    "mean of the batch": (
        lambda: Calls(lambda m, x: m.out(x - x.mean(0)), out=_linear()),
        "depend on others of their batch",
    ),
    "trimmed to the batch": (
        lambda: Calls(lambda m, x: m.out(x) * (x > 0).any(0).sum(), out=_linear()),
        "depend on others of their batch",
    ),
    "a weight read outside its module": (
        lambda: Calls(lambda m, x: m.out(x @ m.inner.weight), inner=nn.Linear(PIXELS, PIXELS), out=_linear()),
        "call that module instead|read only in the forward",
    ),
    "a tuple": (lambda: Calls(lambda m, x: (m.out(x), x), out=_linear()), "returns a tuple"),
    "detached": (
        lambda: Calls(lambda m, x: m.out(x).detach(), out=_linear()),
        "do not depend on a trainable parameter",
    ),
    "nothing to train": (lambda: through(_linear()).requires_grad_(False), "nothing to train|trainable parameter"),
}


def brought(feature_shape: tuple[int, ...], num_classes: int, which: str) -> nn.Module:
    """The factory that a sweep file names."""
    return TRAINS[which]() if which in TRAINS else REFUSED[which][0]()


def two_heads() -> Callable[[Tensor, Tensor], Tensor]:
    """A loss over ten classes and over whether the digit is odd."""

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        digit = functional.cross_entropy(outputs[:, :10], labels, reduction="none")
        return digit + functional.cross_entropy(outputs[:, 10:], labels % 2, reduction="none")

    return loss


def planned(name: str, **changes: object) -> tuple[Plan, UserCode]:
    model = {"name": f"{MODULE}:brought", "which": name}
    common = {"clipping": "flat", "noise": "constant", "seeds": 0, "epochs": 1}
    sampling = {"method": "poisson", "batch_size": 480}
    privacy = {"noise_multiplier": 1.0, "delta": 1e-5, "accountant": "rdp"}
    sweep = parse_sweep(small(model=model, sampling=sampling, privacy=privacy, **common, **changes))
    code = permitted(sweep, Path(__file__).parent)
    return plan_sweep(sweep, code), code


def trains(name: str, root: Path, **changes: object) -> None:
    """The plan accepts the model, and three steps of training take it."""
    plan, code = planned(name, **changes)
    assert plan.refusals == ()
    assert run_trial(plan.trials[0].spec, str(root), code=code).steps == 3


@pytest.mark.thinned(7)
@pytest.mark.parametrize("name", TRAINS)
def test_what_is_planned_trains(name: str, tmp_path: Path) -> None:
    trains(name, tmp_path)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_train_is_refused_with_its_cure(name: str) -> None:
    plan, _ = planned(name)
    (reason,) = plan.reasons()
    assert re.search(REFUSED[name][1], reason)


def test_a_second_head_trains_with_a_loss_of_its_own_and_is_left_out_of_predictions(tmp_path: Path) -> None:
    trains("second head without a loss for it", tmp_path, loss=f"{MODULE}:two_heads")
