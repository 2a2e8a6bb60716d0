"""Models and losses that let one example move the gradients of others, or that keep something of examples.

Each adversarial one does something that a comparison of gradients to two digits, or derivatives alone, would not find.
`HARMLESS` are models that look alike, whose rows are independent, by the same bits when all others are replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from dpsweep.workers.gradients.verified_model import PerExampleLoss
from tests.workers.brute_force import per_example_loss
from tests.workers.devices import DEVICE

Step = Callable[["Between", Tensor], Tensor]

SEEN: dict[str, Any] = {}
MEAN: Tensor | None = None


class Box:
    """An object without a dictionary of its attributes."""

    __slots__ = ("mean",)
    mean: Tensor


class Between(nn.Module):
    """A step between two layers; ``step`` gets this module and the activation [b, 7]."""

    kept: Any = None

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step
        self.noted: Any = None
        self.list: list[Any] = []
        self.dict: dict[str, Any] = {}
        self.array = np.zeros(7, np.float32)
        self.box = Box()
        self.register_buffer("mean", torch.zeros(7))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, h: Tensor) -> Tensor:
        return self.step(self, h)


def model(step: Step | nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    between = step if isinstance(step, nn.Module) else Between(step)
    return nn.Sequential(nn.Linear(5, 7), between, nn.Tanh(), nn.Linear(7, 3))


def batch(rows: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(1)
    return torch.randn(rows, 5, generator=generator), torch.arange(rows) % 3


class Coupled(torch.autograd.Function):
    """The identity, whose gradient is mixed with those of other rows by ``how``."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, how: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(h)
        ctx.how = how
        return h.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.how(grads[0], ctx.saved_tensors[0]), None


class Hidden(torch.autograd.Function):
    """Adds 1e-4 of the mean of all rows, and says that it has no derivative."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h + 1e-4 * h.mean(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


def _hooked(m: Between, h: Tensor, how: Callable[[Tensor], Tensor]) -> Tensor:
    h = h * 1.0
    if h.requires_grad:
        h.register_hook(how)
    return h


def _in_data(m: Between, h: Tensor) -> Tensor:
    h = h.clone()
    h.data.add_(h.data.mean(0), alpha=1e-4)
    return h


def _first_mean(m: Between, h: Tensor) -> Tensor:
    if m.noted is None:
        m.noted = h.detach().mean(0)
    less: Tensor = h - m.noted
    return less


def _first_mean_never_used(m: Between, h: Tensor) -> Tensor:
    if m.noted is None:
        m.noted = h.detach().mean(0)
    return h


def _moving(m: Between, h: Tensor) -> Tensor:
    m.noted = 0.9 * (0.0 if m.noted is None else m.noted) + 0.1 * float(h.detach().mean())
    more: Tensor = h * (1.0 + m.noted)
    return more


def _last_mean(m: Between, h: Tensor) -> Tensor:
    before, m.noted = m.noted, h.detach().mean(0)
    less: Tensor = h if before is None else h - before
    return less


def _in_list(m: Between, h: Tensor) -> Tensor:
    m.list.append(h.detach().mean(0))
    return h


def _in_nested(m: Between, h: Tensor) -> Tensor:
    m.dict.setdefault("means", [{}])[0].setdefault("first", h.detach().mean(0))
    less: Tensor = h - m.dict["means"][0]["first"]
    return less


def _in_array(m: Between, h: Tensor) -> Tensor:
    m.array += h.detach().mean(0).cpu().numpy()
    return h


def _in_slots(m: Between, h: Tensor) -> Tensor:
    if not hasattr(m.box, "mean"):
        m.box.mean = h.detach().mean(0)
    less: Tensor = h - m.box.mean
    return less


def _under_names_with_one_beginning(m: Between, h: Tensor) -> Tensor:
    more: Tensor = h + m.dict.setdefault(100 * "a" + "1", h.detach().mean(0))
    m.dict.setdefault(100 * "a" + "2", 0.0)
    return more


def _in_class(m: Between, h: Tensor) -> Tensor:
    if type(m).kept is None:
        type(m).kept = h.detach().mean(0)
    less: Tensor = h - type(m).kept
    return less


def _in_global(m: Between, h: Tensor) -> Tensor:
    global MEAN
    if MEAN is None:
        MEAN = h.detach().mean(0)
    return h - MEAN


def _in_global_dict(m: Between, h: Tensor) -> Tensor:
    SEEN.setdefault("mean", float(h.detach().mean()))
    more: Tensor = h + SEEN["mean"]
    return more


def _in_closure() -> Step:
    kept: list[float] = []

    def step(m: Between, h: Tensor) -> Tensor:
        kept.append(float(h.detach().max()))
        return h * (1.0 + 0.01 * max(kept))

    return step


def _in_function_attribute(m: Between, h: Tensor) -> Tensor:
    vars(_in_function_attribute).setdefault("first", h.detach().mean(0))
    less: Tensor = h - vars(_in_function_attribute)["first"]
    return less


def _in_default(m: Between, h: Tensor, kept: dict[str, Tensor] = {}) -> Tensor:  # noqa: B006, it is to be kept
    return h - kept.setdefault("mean", h.detach().mean(0))


def _counted(m: Between, h: Tensor) -> Tensor:
    m.noted = (m.noted or 0) + int((h.detach() > 0).sum())
    return h


def _counted_rows(m: Between, h: Tensor) -> Tensor:
    before, m.noted = m.noted or 0, (m.noted or 0) + len(h)
    return h * (1.0 + 0.01 * before)


def _swapped(m: Between, h: Tensor) -> Tensor:
    order = torch.arange(len(h))
    order[0], order[-1] = len(h) - 1, 0
    return h + 0.01 * h[order]


def _last_into_first(m: Between, h: Tensor) -> Tensor:
    return torch.cat([h[:1] + 1e-3 * h[-1:], h[1:]])


def _attention(m: Between, h: Tensor) -> Tensor:
    weights = (h @ h.T / 7.0).softmax(1)
    return h + 1e-3 * weights @ h


def _cumulative(m: Between, h: Tensor) -> Tensor:
    return h + 1e-4 * h.cumsum(0)


def _convolved(m: Between, h: Tensor) -> Tensor:
    return h + 1e-4 * functional.avg_pool1d(h.T[None], 3, 1, 1)[0].T


def _flat_softmax(m: Between, h: Tensor) -> Tensor:
    return h + 0.1 * h.flatten().softmax(0).view_as(h)


MIXING: dict[str, Step] = {
    "adds 0.001 of the mean": lambda m, h: h + 0.001 * h.mean(0),
    "adds 1e-5 of the sum": lambda m, h: h + 1e-5 * h.sum(0),
    "adds 1e-9 of the sum": lambda m, h: h + 1e-9 * h.sum(0),
    "adds 1e-14 of the sum": lambda m, h: h + 1e-14 * h.sum(0),
    "subtracts a thousandth of the maximum": lambda m, h: h - 0.001 * h.amax(0),
    "divides by the spread of the batch": lambda m, h: h / (1.0 + 1e-4 * h.std(0)),
    "multiplies by the mean": lambda m, h: h * (1.0 + 1e-4 * h.mean()),
    "adds the mean, detached": lambda m, h: h + 1e-4 * h.detach().mean(0),
    "divides by the maximum, detached": lambda m, h: h / h.abs().max().detach(),
    "adds the mean as a number": lambda m, h: h + 1e-4 * h.mean().item(),
    "adds the mean by way of numpy": lambda m, h: h + 1e-4 * torch.from_numpy(h.detach().cpu().numpy().mean(0)).to(h),
    "adds the rounded mean": lambda m, h: h + 0.001 * (100.0 * h.mean(0)).round(),
    "adds the sign of the sum": lambda m, h: h + 0.01 * h.sum(0).sign(),
    "adds the number of positive entries": lambda m, h: h + 1e-4 * (h > 0).sum(0),
    "counts positive entries as numbers": lambda m, h: h + 1e-4 * (h > 0).to(h).sum(0),
    "adds the place in order": lambda m, h: h + 1e-3 * h[:, :1].argsort(0).argsort(0),
    "adds the median": lambda m, h: h + 1e-3 * h.median(0).values,
    "adds where the largest is": lambda m, h: h + 1e-2 * h.argmax(0),
    "clamps at the mean": lambda m, h: torch.maximum(h, h.mean(0).detach() - 0.5),
    "adds the row before": lambda m, h: h + 0.001 * h.roll(1, 0),
    "adds the row before, detached": lambda m, h: h + 0.001 * h.roll(1, 0).detach(),
    "swaps the first and the last": _swapped,
    "adds the last to the first": _last_into_first,
    "reverses rows and back between layers": lambda m, h: h.flip(0),
    "sorts each column": lambda m, h: h.sort(0).values,
    "attends to other rows": _attention,
    "adds the running sum": _cumulative,
    "averages over neighbours": _convolved,
    "softmax over all entries": _flat_softmax,
    "softmax over rows": lambda m, h: h + 0.01 * h.softmax(0),
    "as batch norm": lambda m, h: (h - h.mean(0)) / (h.var(0, unbiased=False) + 1e-5).sqrt(),
    "layer norm over the whole batch": lambda m, h: h + 1e-3 * functional.layer_norm(h, tuple(h.shape)),
    "unit length over rows": lambda m, h: functional.normalize(h, dim=0),
    "matrix rank": lambda m, h: h + 1e-3 * (h.T @ h).diagonal(),
    "in a buffer of its own, changed in place": lambda m, h: h.clone().add_(h.mean(0), alpha=1e-4),
    "by data": _in_data,
    "in an autograd function without derivative": lambda m, h: Hidden.apply(h),
    "gradients less their mean": lambda m, h: Coupled.apply(h, lambda g, _: g - g.mean(0)),
    "gradients by their largest": lambda m, h: Coupled.apply(h, lambda g, _: g / (g.abs().max() + 1e-12)),
    "gradients by the mean of inputs": lambda m, h: Coupled.apply(h, lambda g, x: g * (1.0 + 1e-3 * x.mean())),
    "gradients by a hook": lambda m, h: _hooked(m, h, lambda g: g + 1e-4 * g.sum(0)),
    "gradients by the length of all": lambda m, h: _hooked(m, h, lambda g: g / (1.0 + g.norm())),
    "gradients of other rows": lambda m, h: Coupled.apply(h, lambda g, _: g + 1e-3 * g.flip(0)),
    "where gradients are disabled": lambda m, h: h + 1e-4 * _without_gradient(h),
    "a product with the mean of two": lambda m, h: h + 1e-3 * h[:2].mean(0) * h,
    "in batches of more than four": lambda m, h: h - 1e-3 * h.mean(0) if len(h) > 4 else h,
    "in training only": lambda m, h: h + 1e-4 * h.mean(0) if m.training else h,
    "where derivatives are asked for only": lambda m, h: h + 1e-4 * h.mean(0) if torch.is_grad_enabled() else h,
    "mixup with a random partner": lambda m, h: 0.999 * h + 0.001 * h[torch.randperm(len(h))],
    "noise of the size of the batch's spread": lambda m, h: h + 0.01 * torch.randn_like(h) * h.std().detach(),
    "by the mean of a view": lambda m, h: h + 1e-4 * h.view(1, -1, 7).mean(1),
    "in half precision": lambda m, h: h + (1e-2 * h.bfloat16().mean(0)).to(h),
    "by einsum": lambda m, h: h + 1e-4 * torch.einsum("bi,cj->bij", h, h).sum(2),
    "by complex numbers": lambda m, h: h + 1e-4 * torch.fft.fft(h, dim=0).real,
}


def _by_place(h: Tensor, weights: Callable[[Tensor], Tensor]) -> Tensor:
    return h * weights(torch.arange(len(h), device=h.device)).to(h)[:, None]


PLACED: dict[str, Step] = {
    "the sign of every second row, from the fifth on": lambda m, h: _by_place(
        h, lambda at: 1 - 2 * (at >= 4).long() * (at % 2)
    ),
    "a thousandth more for each row before": lambda m, h: _by_place(h, lambda at: 1.0 + 1e-3 * at),
    "gradients by the place": lambda m, h: Coupled.apply(h, lambda g, _: _by_place(g, lambda at: 1.0 + 1e-3 * at)),
}
"""Steps that treat a row by its place in the batch: one row fewer moves all rows after it."""

_UNSEEN_LATER = "in batches of more than four"  # later batches are compared by three examples, as the docs say
LATER: dict[str, Step] = {
    name: step
    for name, step in (PLACED | MIXING).items()
    if name != _UNSEEN_LATER and (name in MIXING or name.startswith("a thousandth"))
}
"""Steps that are found in later batches, of which three rows are compared: their losses at other places, too."""

KEEPING: dict[str, tuple[Step, str]] = {
    "subtracts the first mean": (_first_mean, r"1\.noted"),
    "notes the first mean": (_first_mean_never_used, r"1\.noted"),
    "a moving average as a number": (_moving, r"1\.noted"),
    "subtracts the last mean": (_last_mean, r"1\.noted"),
    "means in a list": (_in_list, r"1\.list"),
    "the first mean in a nested dict": (_in_nested, r"1\.dict\['means'\]\[0\]\['first'\]"),
    "a sum in an array": (_in_array, r"1\.array"),
    "the first mean in slots": (_in_slots, r"1\.box\.mean"),
    "under names with one beginning": (_under_names_with_one_beginning, r"1\.dict\['a{40}'\]"),
    "the first mean in the class": (_in_class, r"class Between\.kept"),
    "the first mean in a global": (_in_global, r"MEAN"),
    "the first mean in a global dict": (_in_global_dict, r"SEEN\['mean'\]"),
    "maxima in a closure": (_in_closure(), r"step"),
    "an attribute of a function": (_in_function_attribute, r"first"),
    "a default argument": (_in_default, r"__defaults__"),
    "a count of rows": (_counted_rows, r"1\.noted"),
    "a count of positive entries": (_counted, r"1\.noted"),
}


def _without_gradient(h: Tensor) -> Tensor:
    with torch.no_grad():
        return h.mean(0)


COUPLED: dict[str, PerExampleLoss] = {
    "by the frequency of labels": lambda output, y: per_example_loss(output, y) * (1.0 + 1e-4 * (y == y[0]).sum()),
    "less a share of the mean": lambda output, y: per_example_loss(output, y) * 1.0 - 1e-4 * output.mean(),
    "weights by rank": lambda output, y: (
        per_example_loss(output, y) * (1.0 + 1e-3 * per_example_loss(output, y).detach().argsort().argsort())
    ),
    "by the maximum, detached": lambda output, y: per_example_loss(output / output.detach().abs().max(), y),
    "the mean, for every row": lambda output, y: per_example_loss(output, y).mean().expand(len(y)),
    "the labels of the row before": lambda output, y: per_example_loss(output, y.roll(1)),
    "hard examples only": lambda output, y: (
        per_example_loss(output, y) * (per_example_loss(output, y) >= per_example_loss(output, y).median()).detach()
    ),
}


def _notes_its_output(m: Between, h: Tensor) -> Tensor:
    m.noted, m.dict["last"] = h, [h.detach()]
    return h


def _caches_positions(m: Between, h: Tensor) -> Tensor:
    if m.noted is None:
        m.noted = torch.arange(7, dtype=h.dtype, device=h.device)
    more: Tensor = h + 0.01 * m.noted
    return more


def _counts_passes(m: Between, h: Tensor) -> Tensor:
    m.noted = (m.noted or 0) + 1
    return h


def _keeps_masks_by_size(m: Between, h: Tensor) -> Tensor:
    mask: Tensor = m.dict.setdefault(str(len(h)), torch.ones(len(h), 1, dtype=h.dtype, device=h.device))
    return h * mask


def _sorted_and_back(m: Between, h: Tensor) -> Tensor:
    order = h.detach()[:, 0].argsort()
    return h[order].tanh()[order.argsort()]


class Parts(nn.Module):
    """A module that runs ``call`` with the parts that it is given."""

    def __init__(self, call: Callable[..., Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.call, self.parts = call, nn.ModuleDict(parts)

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.parts, x)


def _packed(parts: nn.ModuleDict, x: Tensor) -> Tensor:
    lengths = (x[:, :, 0] != 0).sum(1).clamp(min=1).cpu()
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    states, _ = pad_packed_sequence(parts["cell"](packed)[0], batch_first=True)
    out: Tensor = parts["head"](states[torch.arange(len(x)), lengths.to(x.device) - 1])
    return out


def _attending(parts: nn.ModuleDict, x: Tensor) -> Tensor:
    mask = x[:, :, 0] == 0
    out: Tensor = parts["head"](parts["attention"](x, x, x, key_padding_mask=mask & ~mask.all(1, True))[0].mean(1))
    return out


def _categories(parts: nn.ModuleDict, x: Tensor) -> Tensor:
    out: Tensor = parts["head"](torch.cat([parts["table"]((x[:, 0] > 0).long()), x], 1))
    return out


class ClassToken(nn.Module):
    """A token of its own before the others, positions, and a scale for each feature."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.positions = nn.Parameter(torch.randn(1, 1, 6)), nn.Parameter(torch.randn(1, 9, 6))
        self.layer = nn.TransformerEncoderLayer(6, 2, 8, 0.1, batch_first=True)
        self.scale, self.head = nn.Parameter(torch.zeros(6)), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        out: Tensor = self.head(self.layer(tokens)[:, 0] * (1.0 + self.scale))
        return out


def sequences() -> Tensor:
    """[6, 8, 6], 0 beyond different lengths."""
    x = torch.rand(6, 8, 6, generator=torch.Generator(DEVICE).manual_seed(3)) + 0.5
    return torch.where(torch.arange(8)[:, None] < torch.tensor([8, 3, 5, 8, 1, 6])[:, None, None], x, 0.0)


def pictures() -> Tensor:
    return torch.randn(6, 3, 8, 8, generator=torch.Generator(DEVICE).manual_seed(3))


HARMLESS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "notes its last output": lambda: (model(_notes_its_output), batch()[0]),
    "caches positions": lambda: (model(_caches_positions), batch()[0]),
    "keeps masks by the size of a batch": lambda: (model(_keeps_masks_by_size), batch()[0]),
    "counts passes": lambda: (model(_counts_passes), batch()[0]),
    "sorts rows and back without a layer between": lambda: (model(_sorted_and_back), batch()[0]),
    "a residual by the row's own mean": lambda: (model(lambda m, h: h - h.mean(1, keepdim=True)), batch()[0]),
    "attention within a row": lambda: (
        model(lambda m, h: (h[:, :, None] * h[:, None]).softmax(2) @ torch.ones(7, dtype=h.dtype)),
        batch()[0],
    ),
    "noise and dropout": lambda: (
        model(lambda m, h: functional.dropout(h + 0.1 * torch.randn_like(h), training=m.training)),
        batch()[0],
    ),
    "in place on a copy": lambda: (model(lambda m, h: h.clone().mul_(2.0)), batch()[0]),
    "rounded": lambda: (model(lambda m, h: h + (h.round() - h).detach()), batch()[0]),
    "by way of numpy": lambda: (
        model(lambda m, h: h + torch.from_numpy(np.sign(h.detach().cpu().numpy())).to(h)),
        batch()[0],
    ),
    "a flat view of rows": lambda: (model(lambda m, h: h.reshape(-1).sin().view_as(h)), batch()[0]),
    "a layer at 0": lambda: (_zeroed(model(lambda m, h: h)), batch()[0]),
    "categories in columns": lambda: (
        Parts(_categories, table=nn.Embedding(2, 3).requires_grad_(False), head=nn.Linear(8, 3)),
        batch()[0],
    ),
    "group norm": lambda: (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)),
        pictures(),
    ),
    "frozen batch norm": lambda: (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4).eval(), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)),
        pictures(),
    ),
    "instance norm and pooling": lambda: (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)),
        pictures(),
    ),
    "packed LSTM": lambda: (Parts(_packed, cell=nn.LSTM(6, 5, batch_first=True), head=nn.Linear(5, 3)), sequences()),
    "packed GRU": lambda: (Parts(_packed, cell=nn.GRU(6, 5, batch_first=True), head=nn.Linear(5, 3)), sequences()),
    "masked attention": lambda: (
        Parts(_attending, attention=nn.MultiheadAttention(6, 2, batch_first=True), head=nn.Linear(6, 3)),
        sequences(),
    ),
    "class token, positions and scale": lambda: (ClassToken(), sequences()),
    "token embedding": lambda: (
        nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(20, 3)),
        torch.arange(30).view(6, 5) % 9,
    ),
    "bag of whole numbers": lambda: (
        nn.Sequential(nn.Flatten(), Parts(lambda parts, x: parts["head"](x.float()), head=nn.Linear(5, 3))),
        torch.arange(30).view(6, 5) % 9,
    ),
}


def _zeroed(net: nn.Sequential) -> nn.Sequential:
    nn.init.zeros_(net.get_parameter("3.weight"))
    return net
