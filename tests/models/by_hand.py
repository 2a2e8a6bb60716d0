"""Models that people write by hand in torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune

from tests.models.brought import Brought
from tests.models.layers import (
    WIDTH,
    Bags,
    Calls,
    Capsules,
    Cells,
    Counting,
    Dispatched,
    Doubled,
    Drawing,
    Message,
    Own,
    Quantised,
    Remembering,
    Tied,
    linear,
    through,
)


def _apart(m: Any, x: Tensor) -> Any:
    return m.out((m.inner(x[:, :32]) - m.inner(x[:, 32:])).abs())


def _steps(x: Tensor) -> Tensor:
    return x.reshape(len(x), 8, 8)


def _filtered(m: Any, x: Tensor) -> Any:
    return m.out(torch.fft.irfft(torch.fft.rfft(x) * torch.view_as_complex(m.kernel), n=WIDTH))


def _hyper(m: Any, x: Tensor) -> Any:
    return torch.bmm(m.weights(x[:, :32]).reshape(len(x), 4, 32), x[:, 32:, None])[:, :, 0]


def _pruned(*after: Callable[[nn.Module, str], object]) -> nn.Module:
    layer = nn.Linear(WIDTH, 16)
    prune.l1_unstructured(layer, "weight", amount=0.5)
    for change in after:
        change(layer, "weight")
    return through(layer, nn.ReLU(), linear(16))


VECTORS: Mapping[str, Brought] = {
    "logistic regression": Brought(lambda: through(linear()), "vectors"),
    "residual, layer norm, GELU": Brought(
        lambda: Calls(
            lambda m, x: m.out(x + functional.gelu(m.inner(m.norm(x)))),
            norm=nn.LayerNorm(WIDTH),
            inner=nn.Linear(WIDTH, WIDTH),
            out=linear(),
        ),
        "vectors",
    ),
    "lazy layers": Brought(lambda: through(nn.LazyLinear(16), nn.Tanh(), nn.LazyLinear(4)), "vectors"),
    "single precision, one part in double": Brought(
        lambda: Calls(lambda m, x: m.out(x.double()).float(), out=linear().double()), "vectors"
    ),
    "double precision, given single": Brought(
        lambda: linear().double(),
        "vectors",
        "refused",
        r"torch\.float64, and its features torch\.float32: return it in \.float\(\), or begin its forward with x\.doub",
        "double precision",
    ),
    "rows on the second axis": Brought(
        lambda: Calls(lambda m, x: m.out(x).T, out=linear()), "vectors", "refused", "its first axis must be the rows"
    ),
    "double precision": Brought(
        lambda: Calls(
            lambda m, x: m.out(torch.tanh(m.inner(x.double()))), inner=nn.Linear(WIDTH, 16), out=linear(16)
        ).double(),
        "vectors",
    ),
    "two precisions": Brought(
        lambda: Calls(lambda m, x: m.a(x) + m.b(x.double()).float(), a=linear(), b=linear().double()),
        "vectors",
        "refused",
        r"one precision: return the model in \.float\(\), or in \.double\(\)",
        "logistic regression",
    ),
    "bfloat16": Brought(
        lambda: through(linear()).bfloat16(),
        "vectors",
        "refused",
        r"torch\.bfloat16\).*train in float32, under autocast",
        "float32 under autocast",
    ),
    "float32 under autocast": Brought(lambda: through(linear()), "vectors", settings={"execution": {"autocast": True}}),
    "frozen trunk in bfloat16": Brought(
        lambda: through(nn.Linear(WIDTH, 16).requires_grad_(False).bfloat16(), nn.Tanh(), linear(16)),
        "vectors",
        "refused",
        "set execution.autocast: true",
        "frozen trunk in bfloat16 under autocast",
    ),
    "frozen trunk in bfloat16 under autocast": Brought(
        lambda: through(nn.Linear(WIDTH, 16).requires_grad_(False).bfloat16(), nn.Tanh(), linear(16)),
        "vectors",
        settings={"execution": {"autocast": True}},
    ),
    "complex parameter": Brought(
        lambda: Calls(
            lambda m, x: m.out((x * m.w).abs()), w=nn.Parameter(torch.ones(1, dtype=torch.complex64)), out=linear()
        ),
        "vectors",
        "refused",
        "real parameters .*view_as_complex",
        "complex filter of real parameters",
    ),
    "complex filter of real parameters": Brought(
        lambda: Calls(_filtered, kernel=nn.Parameter(torch.randn(WIDTH // 2 + 1, 2)), out=linear()), "vectors"
    ),
    "experts, each on its rows": Brought(Dispatched, "vectors", "generic path", "other rows than those of the batch"),
    "squeeze of a named axis": Brought(
        lambda: Calls(lambda m, x: m.conv(x[:, None]).squeeze(-1), conv=nn.Conv1d(1, 4, WIDTH)), "vectors"
    ),
    "squeeze of every axis": Brought(
        lambda: Calls(lambda m, x: m.conv(x[:, None]).squeeze(), conv=nn.Conv1d(1, 4, WIDTH)),
        "vectors",
        "refused",
        r"for 1 row it returns the shape \(4,\).*takes off the batch axis",
        "squeeze of a named axis",
    ),
    "the first rows alone": Brought(
        lambda: Calls(lambda m, x: m.out(x[:4]), out=linear()),
        "vectors",
        "refused",
        r"for 65 rows it returns the shape \(4, 4\)",
        "logistic regression",
    ),
    "a pair in evaluation mode": Brought(
        lambda: Calls(lambda m, x: m.out(x) if m.training else (m.out(x), x), out=linear()),
        "vectors",
        "refused",
        "in evaluation mode its forward returns a tuple, but must return a tensor",
        "logistic regression",
    ),
    "one class too few": Brought(
        lambda: through(linear(WIDTH, 3)), "vectors", "refused", r"must return \(3, 4\)", "logistic regression"
    ),
    "two heads, own loss": Brought(
        lambda: through(nn.Linear(WIDTH, 16), nn.Tanh(), linear(16, 6)),
        "vectors",
        settings={"loss": "made:two_heads"},
    ),
    "two heads, built-in loss": Brought(
        lambda: through(linear(WIDTH, 6)), "vectors", "refused", "need a loss of your own", "two heads, own loss"
    ),
    "all frozen": Brought(
        lambda: through(linear()).requires_grad_(False),
        "vectors",
        "refused",
        "nothing to train|trainable parameter",
        "logistic regression",
    ),
    "a part that is not used": Brought(
        lambda: Calls(lambda m, x: m.out(x), out=linear(), spare=linear()),
        "vectors",
        "refused",
        r"spare\.weight, spare\.bias do not change the loss.*requires_grad_\(False\)",
        "a part that is not used, frozen",
    ),
    "a part that is not used, frozen": Brought(
        lambda: Calls(lambda m, x: m.out(x), out=linear(), spare=linear().requires_grad_(False)), "vectors"
    ),
    "noise in the forward pass": Brought(
        lambda: Calls(lambda m, x: m.out(x + 0.1 * torch.randn_like(x)), out=linear()), "vectors"
    ),
    "noise of its own generator": Brought(
        Drawing, "vectors", "refused", r"draw from a torch\.Generator of their own", "noise in the forward pass"
    ),
    "batch norm": Brought(
        lambda: through(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.ReLU(), linear(16)),
        "vectors",
        "refused",
        r"torch\.nn\.GroupNorm",
        "group norm",
    ),
    "group norm": Brought(lambda: through(nn.Linear(WIDTH, 16), nn.GroupNorm(4, 16), nn.ReLU(), linear(16)), "vectors"),
    "weight norm": Brought(lambda: through(parametrizations.weight_norm(linear())), "vectors", "generic path"),
    "spectral norm": Brought(
        lambda: through(parametrizations.spectral_norm(linear())), "vectors", "refused", "weight_norm", "weight norm"
    ),
    "orthogonal": Brought(
        lambda: through(parametrizations.orthogonal(nn.Linear(WIDTH, 8)), linear(8)), "vectors", "generic path"
    ),
    "pruned": Brought(_pruned, "vectors", "refused", r"prune\.remove", "pruned for good"),
    "pruned for good": Brought(lambda: _pruned(prune.remove), "vectors"),
    "scripted": Brought(
        lambda: torch.jit.script(through(linear())),
        "vectors",
        "refused",
        "use the module it was made from",
        "logistic regression",
    ),
    "LSTM in both directions": Brought(
        lambda: Calls(
            lambda m, x: m.out(m.lstm(_steps(x))[0].mean(1)),
            lstm=nn.LSTM(8, 8, batch_first=True, bidirectional=True),
            out=linear(16),
        ),
        "vectors",
    ),
    "LSTM with time first": Brought(
        lambda: Calls(lambda m, x: m.out(m.lstm(_steps(x).movedim(1, 0))[0][-1]), lstm=nn.LSTM(8, 8), out=linear(8)),
        "vectors",
        "refused",
        "batch_first=True",
        "LSTM in both directions",
    ),
    "loop with LSTMCell": Brought(lambda: Cells(nn.LSTMCell(8, 8)), "vectors", "generic path"),
    "loop with GRUCell": Brought(lambda: Cells(nn.GRUCell(8, 8)), "vectors"),
    "attention": Brought(
        lambda: Calls(
            lambda m, x: m.out(m.attend(*[_steps(x)] * 3)[0].mean(1)),
            attend=nn.MultiheadAttention(8, 2, batch_first=True),
            out=linear(8),
        ),
        "vectors",
    ),
    "bilinear": Brought(lambda: Calls(lambda m, x: m.out(x[:, :32], x[:, 32:]), out=nn.Bilinear(32, 32, 4)), "vectors"),
    "siamese": Brought(lambda: Calls(_apart, inner=nn.Linear(32, 8, bias=False), out=linear(8)), "vectors"),
    "siamese with a bias that cancels": Brought(
        lambda: Calls(_apart, inner=nn.Linear(32, 8), out=linear(8)),
        "vectors",
        "refused",
        r"inner\.bias do not change the loss.*requires_grad_\(False\)",
        "siamese",
    ),
    "a weight read outside its module": Brought(
        Tied,
        "vectors",
        "refused",
        "call that module instead|read only in the forward",
        "a weight read twice by its owner",
    ),
    "a weight read twice by its owner": Brought(Own, "vectors"),
    "own backward pass": Brought(lambda: Calls(lambda m, x: Doubled.apply(m.out(x)), out=linear()), "vectors"),
    "vector quantiser": Brought(Quantised, "vectors"),
    "capsules": Brought(Capsules, "vectors"),
    "hypernetwork": Brought(lambda: Calls(_hyper, weights=nn.Linear(32, 128)), "vectors"),
    "distance to prototypes": Brought(
        lambda: Calls(
            lambda m, x: -torch.cdist(m.inner(x), m.centres),
            inner=nn.Linear(WIDTH, 8),
            centres=nn.Parameter(torch.randn(4, 8)),
        ),
        "vectors",
    ),
    "graph messages along edges": Brought(Message, "vectors"),
    "running mean in a buffer": Brought(Counting, "vectors", "refused", "buffers mean change with the examples"),
    "last batch in an attribute": Brought(Remembering, "vectors", "refused", "last"),
    "mean of the batch": Brought(
        lambda: Calls(lambda m, x: m.out(x - x.mean(0)), out=linear()),
        "vectors",
        "refused",
        "depend on others of their batch",
        "residual, layer norm, GELU",
    ),
    "trimmed to the batch": Brought(
        lambda: Calls(lambda m, x: m.out(x) * (x > 0).any(0).sum(), out=linear()),
        "vectors",
        "refused",
        "depend on others of their batch",
        "logistic regression",
    ),
}

OTHERS: Mapping[str, Brought] = {
    "instance norm": Brought(
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3, 4), nn.InstanceNorm2d(4, affine=True), nn.ReLU(), nn.Flatten(), nn.Linear(256, 4)
        ),
        "pictures",
    ),
    "convolution of clips": Brought(
        lambda: nn.Sequential(nn.Conv3d(3, 4, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 4)), "clips"
    ),
    "mean of embeddings": Brought(
        lambda: Calls(lambda m, x: m.out(m.table(x).mean(1)), table=nn.Embedding(50, 16), out=linear(16)), "tokens"
    ),
    "bag of embeddings": Brought(Bags, "tokens"),
    "embedding scaled by frequency": Brought(
        lambda: Calls(
            lambda m, x: m.out(m.table(x).mean(1)),
            table=nn.Embedding(50, 16, scale_grad_by_freq=True),
            out=linear(16),
        ),
        "tokens",
        "refused",
        "scale_grad_by_freq=False",
        "mean of embeddings",
    ),
}
