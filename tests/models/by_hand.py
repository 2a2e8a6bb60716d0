"""Models that people write by hand in torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

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
    Positive,
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


def _map(x: Tensor) -> Tensor:
    return x.reshape(len(x), 1, 8, 8)


def _routed(m: Any, x: Tensor) -> Any:
    gate = m.gate(x).softmax(1)
    rows, best = torch.arange(len(x)), gate.argmax(1)
    return torch.stack([expert(x) for expert in m.experts], 1)[rows, best] * gate[rows, best, None]


def _filtered(m: Any, x: Tensor) -> Any:
    return m.out(torch.fft.irfft(torch.fft.rfft(x) * torch.view_as_complex(m.kernel), n=WIDTH))


def _with_prelu(m: Any, x: Tensor) -> Any:
    return m.act(m.out(x)) * m.temperature


def _euler(m: Any, x: Tensor) -> Any:
    for _ in range(3):
        x = x + 0.3 * torch.tanh(m.inner(x))
    return m.out(x)


def _cosine(m: Any, x: Tensor) -> Any:
    return 5.0 * functional.linear(functional.normalize(x), functional.normalize(m.weight))


def _hyper(m: Any, x: Tensor) -> Any:
    return torch.bmm(m.weights(x[:, :32]).reshape(len(x), 4, 32), x[:, 32:, None])[:, :, 0]


def _attending(m: Any, x: Tensor) -> Any:
    nodes = _steps(x)
    weights = (m.query(nodes) @ m.key(nodes).mT / 8**0.5).softmax(-1)
    return m.out((weights @ m.value(nodes)).mean(1))


def _pooled(m: Any, x: Tensor) -> Any:
    steps = _steps(x)
    return m.out(((steps @ m.query).softmax(1)[..., None] * steps).sum(1))


def _temporal(m: Any, x: Tensor) -> Any:
    return m.out(torch.relu(m.conv(functional.pad(_steps(x), (4, 0)))).mean(2))


def _decoded(m: Any, x: Tensor) -> Any:
    return m.out(m.decoder(m.query.expand(len(x), -1, -1), _steps(x))[:, 0])


def _straight_through(m: Any, x: Tensor) -> Any:
    return functional.linear(x, m.weight + (m.weight.sign() - m.weight).detach())


def _low_rank(m: Any, x: Tensor) -> Any:
    return m.trunk(x) + m.up(m.down(x))


def _pruned(*after: Callable[[nn.Module, str], object]) -> nn.Module:
    layer = nn.Linear(WIDTH, 16)
    prune.l1_unstructured(layer, "weight", amount=0.5)
    for change in after:
        change(layer, "weight")
    return through(layer, nn.ReLU(), linear(16))


def _parametrized() -> nn.Module:
    layer = linear()
    parametrize.register_parametrization(layer, "weight", Positive())
    return through(layer)


def _same_parameter() -> nn.Module:
    first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    second.weight = first.weight
    return through(first, nn.Tanh(), second, nn.Tanh(), linear())


def _same_module() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    return through(layer, nn.Tanh(), layer, nn.Tanh(), linear())


def _normalised_in_eval() -> nn.Module:
    return through(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16).eval(), nn.ReLU(), linear(16))


VECTORS: Mapping[str, Brought] = {
    "logistic regression": Brought(lambda: through(linear()), "vectors"),
    "perceptron with tanh": Brought(lambda: through(nn.Linear(WIDTH, 16), nn.Tanh(), linear(16)), "vectors"),
    "in-place activation": Brought(lambda: through(nn.Linear(WIDTH, 16), nn.ReLU(inplace=True), linear(16)), "vectors"),
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
    "experts, all run on every row": Brought(
        lambda: Calls(_routed, gate=nn.Linear(WIDTH, 3), experts=nn.ModuleList([linear() for _ in range(3)])),
        "vectors",
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
    "a tuple of outputs": Brought(
        lambda: Calls(lambda m, x: (m.out(x), x), out=linear()),
        "vectors",
        "refused",
        "returns a tuple, but must return a tensor of logits",
        "logistic regression",
    ),
    "detached logits": Brought(
        lambda: Calls(lambda m, x: m.out(x).detach(), out=linear()),
        "vectors",
        "refused",
        "do not depend on a trainable parameter",
        "logistic regression",
    ),
    "all frozen": Brought(
        lambda: through(linear()).requires_grad_(False),
        "vectors",
        "refused",
        "nothing to train|trainable parameter",
        "logistic regression",
    ),
    "frozen trunk": Brought(
        lambda: through(nn.Linear(WIDTH, 16).requires_grad_(False), nn.Tanh(), linear(16)), "vectors"
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
    "dropout": Brought(lambda: through(nn.Dropout(0.3), linear()), "vectors"),
    "alpha dropout and SELU": Brought(
        lambda: through(nn.Linear(WIDTH, 16), nn.SELU(), nn.AlphaDropout(0.2), linear(16)), "vectors"
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
    "synchronised batch norm": Brought(
        lambda: through(nn.Linear(WIDTH, 16), nn.SyncBatchNorm(16), nn.ReLU(), linear(16)),
        "vectors",
        "refused",
        r"torch\.nn\.GroupNorm",
        "group norm",
    ),
    "batch norm in evaluation mode": Brought(_normalised_in_eval, "vectors"),
    "group norm": Brought(lambda: through(nn.Linear(WIDTH, 16), nn.GroupNorm(4, 16), nn.ReLU(), linear(16)), "vectors"),
    "RMS norm": Brought(lambda: through(nn.RMSNorm(WIDTH), linear()), "vectors"),
    "weight norm": Brought(lambda: through(parametrizations.weight_norm(linear())), "vectors", "generic path"),
    "spectral norm": Brought(
        lambda: through(parametrizations.spectral_norm(linear())), "vectors", "refused", "weight_norm", "weight norm"
    ),
    "orthogonal": Brought(
        lambda: through(parametrizations.orthogonal(nn.Linear(WIDTH, 8)), linear(8)), "vectors", "generic path"
    ),
    "parametrized by softplus": Brought(_parametrized, "vectors", "generic path"),
    "pruned": Brought(_pruned, "vectors", "refused", r"prune\.remove", "pruned for good"),
    "pruned for good": Brought(lambda: _pruned(prune.remove), "vectors"),
    "scripted": Brought(
        lambda: torch.jit.script(through(linear())),
        "vectors",
        "refused",
        "use the module it was made from",
        "logistic regression",
    ),
    "GRU": Brought(
        lambda: Calls(
            lambda m, x: m.out(m.gru(_steps(x))[0][:, -1]), gru=nn.GRU(8, 8, batch_first=True), out=linear(8)
        ),
        "vectors",
    ),
    "LSTM in both directions": Brought(
        lambda: Calls(
            lambda m, x: m.out(m.lstm(_steps(x))[0].mean(1)),
            lstm=nn.LSTM(8, 8, batch_first=True, bidirectional=True),
            out=linear(16),
        ),
        "vectors",
    ),
    "RNN of two layers": Brought(
        lambda: Calls(
            lambda m, x: m.out(m.rnn(_steps(x))[0][:, -1]), rnn=nn.RNN(8, 8, 2, batch_first=True), out=linear(8)
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
    "attention with time first": Brought(
        lambda: Calls(
            lambda m, x: m.out(m.attend(*[_steps(x).movedim(1, 0)] * 3)[0].mean(0)),
            attend=nn.MultiheadAttention(8, 2),
            out=linear(8),
        ),
        "vectors",
        "refused",
        "batch_first=True",
        "attention",
    ),
    "transformer encoder of torch": Brought(
        lambda: Calls(
            lambda m, x: m.out(m.encoder(_steps(x)).mean(1)),
            encoder=nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1),
            out=linear(8),
        ),
        "vectors",
    ),
    "transformer decoder of torch": Brought(
        lambda: Calls(
            _decoded,
            query=nn.Parameter(torch.randn(1, 2, 8)),
            decoder=nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, batch_first=True), 1),
            out=linear(8),
        ),
        "vectors",
        "generic path",
    ),
    "attention by hand": Brought(
        lambda: Calls(_attending, query=nn.Linear(8, 8), key=nn.Linear(8, 8), value=nn.Linear(8, 8), out=linear(8)),
        "vectors",
    ),
    "pooling by a learnt query": Brought(
        lambda: Calls(_pooled, query=nn.Parameter(torch.randn(8)), out=linear(8)), "vectors"
    ),
    "own parameter in einsum": Brought(
        lambda: Calls(
            lambda m, x: torch.einsum("bi,io->bo", x, m.weight), weight=nn.Parameter(0.1 * torch.randn(WIDTH, 4))
        ),
        "vectors",
    ),
    "list of parameters": Brought(
        lambda: Calls(
            lambda m, x: x @ m.weights[0] + m.weights[1],
            weights=nn.ParameterList([0.1 * torch.randn(WIDTH, 4), torch.zeros(4)]),
        ),
        "vectors",
    ),
    "bilinear": Brought(lambda: Calls(lambda m, x: m.out(x[:, :32], x[:, 32:]), out=nn.Bilinear(32, 32, 4)), "vectors"),
    "two towers of two inputs": Brought(
        lambda: Calls(
            lambda m, x: m.out(torch.cat((torch.relu(m.left(x[:, :32])), torch.relu(m.right(x[:, 32:]))), 1)),
            left=nn.Linear(32, 8),
            right=nn.Linear(32, 8),
            out=linear(16),
        ),
        "vectors",
    ),
    "siamese": Brought(lambda: Calls(_apart, inner=nn.Linear(32, 8, bias=False), out=linear(8)), "vectors"),
    "siamese with a bias that cancels": Brought(
        lambda: Calls(_apart, inner=nn.Linear(32, 8), out=linear(8)),
        "vectors",
        "refused",
        r"inner\.bias do not change the loss.*requires_grad_\(False\)",
        "siamese",
    ),
    "one module called twice": Brought(_same_module, "vectors"),
    "one parameter of two modules": Brought(_same_parameter, "vectors"),
    "a weight read outside its module": Brought(
        Tied,
        "vectors",
        "refused",
        "call that module instead|read only in the forward",
        "a weight read twice by its owner",
    ),
    "a weight read twice by its owner": Brought(Own, "vectors"),
    "PReLU and a learnt temperature": Brought(
        lambda: Calls(_with_prelu, act=nn.PReLU(), out=linear(), temperature=nn.Parameter(torch.ones(1))), "vectors"
    ),
    "own backward pass": Brought(lambda: Calls(lambda m, x: Doubled.apply(m.out(x)), out=linear()), "vectors"),
    "checkpointed": Brought(
        lambda: Calls(
            lambda m, x: m.out(checkpoint(m.inner, x, use_reentrant=False)), inner=nn.Linear(WIDTH, WIDTH), out=linear()
        ),
        "vectors",
    ),
    "binary weights, straight through": Brought(
        lambda: Calls(_straight_through, weight=nn.Parameter(0.1 * torch.randn(4, WIDTH))), "vectors"
    ),
    "vector quantiser": Brought(Quantised, "vectors"),
    "capsules": Brought(Capsules, "vectors"),
    "hypernetwork": Brought(lambda: Calls(_hyper, weights=nn.Linear(32, 128)), "vectors"),
    "cosine classifier": Brought(lambda: Calls(_cosine, weight=nn.Parameter(torch.randn(4, WIDTH))), "vectors"),
    "distance to prototypes": Brought(
        lambda: Calls(
            lambda m, x: -torch.cdist(m.inner(x), m.centres),
            inner=nn.Linear(WIDTH, 8),
            centres=nn.Parameter(torch.randn(4, 8)),
        ),
        "vectors",
    ),
    "low-rank update of a frozen layer": Brought(
        lambda: Calls(
            _low_rank, trunk=linear().requires_grad_(False), down=nn.Linear(WIDTH, 2, bias=False), up=nn.Linear(2, 4)
        ),
        "vectors",
    ),
    "neural ODE by Euler's steps": Brought(
        lambda: Calls(_euler, inner=nn.Linear(WIDTH, WIDTH), out=linear()), "vectors"
    ),
    "graph layer of a fixed adjacency": Brought(
        lambda: Calls(
            lambda m, x: m.out(torch.relu(m.inner(torch.full((8, 8), 0.125) @ _steps(x))).flatten(1)),
            inner=nn.Linear(8, 8),
            out=linear(),
        ),
        "vectors",
    ),
    "graph messages along edges": Brought(Message, "vectors"),
    "temporal convolution": Brought(
        lambda: Calls(_temporal, conv=nn.Conv1d(8, 8, 3, dilation=2), out=linear(8)), "vectors"
    ),
    "transposed convolution": Brought(
        lambda: Calls(lambda m, x: m.out(m.up(_map(x)).flatten(1)), up=nn.ConvTranspose2d(1, 2, 2, 2), out=linear(512)),
        "vectors",
    ),
    "running mean in a buffer": Brought(Counting, "vectors", "refused", "buffers mean change with the examples"),
    "last batch in an attribute": Brought(Remembering, "vectors", "refused", "last"),
    "mean of the batch": Brought(
        lambda: Calls(lambda m, x: m.out(x - x.mean(0)), out=linear()),
        "vectors",
        "refused",
        "depend on others of their batch",
        "residual, layer norm, GELU",
    ),
    "softmax over the batch": Brought(
        lambda: Calls(lambda m, x: m.out(x).softmax(0), out=linear()),
        "vectors",
        "refused",
        "depend on others of their batch",
        "logistic regression",
    ),
    "trimmed to the batch": Brought(
        lambda: Calls(lambda m, x: m.out(x) * (x > 0).any(0).sum(), out=linear()),
        "vectors",
        "refused",
        "depend on others of their batch",
        "logistic regression",
    ),
    "shuffled within the batch": Brought(
        lambda: Calls(lambda m, x: m.out(x.flip(0)), out=linear()),
        "vectors",
        "refused",
        "keep their order|depend on others",
        "logistic regression",
    ),
}

OTHERS: Mapping[str, Brought] = {
    "convolutions": Brought(
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.ReLU(), nn.Conv2d(4, 4, 3, 2), nn.Flatten(), nn.Linear(196, 4)),
        "pictures",
    ),
    "lazy convolution": Brought(
        lambda: nn.Sequential(nn.LazyConv2d(4, 3, 2), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4)), "pictures"
    ),
    "depthwise and pointwise convolution": Brought(
        lambda: nn.Sequential(
            nn.Conv2d(3, 6, 3, 2, groups=3), nn.Conv2d(6, 4, 1), nn.AdaptiveAvgPool2d(4), nn.Flatten(), linear()
        ),
        "pictures",
    ),
    "instance norm": Brought(
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3, 4), nn.InstanceNorm2d(4, affine=True), nn.ReLU(), nn.Flatten(), nn.Linear(256, 4)
        ),
        "pictures",
    ),
    "instance norm with running statistics": Brought(
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3, 4), nn.InstanceNorm2d(4, track_running_stats=True), nn.Flatten(), nn.Linear(256, 4)
        ),
        "pictures",
        "refused",
        "track_running_stats=False",
        "instance norm",
    ),
    "convolution of clips": Brought(
        lambda: nn.Sequential(nn.Conv3d(3, 4, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 4)), "clips"
    ),
    "mean of embeddings": Brought(
        lambda: Calls(lambda m, x: m.out(m.table(x).mean(1)), table=nn.Embedding(50, 16), out=linear(16)), "tokens"
    ),
    "bag of embeddings": Brought(Bags, "tokens"),
    "bag of sparse gradients": Brought(
        lambda: Bags(sparse=True), "tokens", "refused", "sparse=False", "bag of embeddings"
    ),
    "embedding with max_norm": Brought(
        lambda: Calls(lambda m, x: m.out(m.table(x).mean(1)), table=nn.Embedding(50, 16, max_norm=1.0), out=linear(16)),
        "tokens",
        "refused",
        "max_norm=None",
        "mean of embeddings",
    ),
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
    "text convolution": Brought(
        lambda: Calls(
            lambda m, x: m.out(torch.relu(m.conv(m.table(x).mT)).amax(2)),
            table=nn.Embedding(50, 16),
            conv=nn.Conv1d(16, 16, 3),
            out=linear(16),
        ),
        "tokens",
    ),
}
