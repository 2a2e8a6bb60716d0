"""Finds the module in which the rows of a batch begin to depend on each other, for the text of a refusal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpsweep.workers.gradients.deterministic_passes import same


@dataclass(frozen=True)
class _Call:
    """One call of a module: the rows that were kept of its arguments and of its outputs."""

    name: str
    arguments: list[Tensor]
    outputs: list[Tensor]

    def differs(self, other: _Call) -> bool:
        """Return whether outputs differ though arguments do not."""
        return _equal(self.arguments, other.arguments) and not _equal(self.outputs, other.outputs)


def where_rows_mix(
    model: nn.Module,
    reset: Callable[[], object],
    passes: Sequence[Callable[[], object]],
    rows: int,
    kept: Tensor,
) -> str | None:
    """Return the innermost module whose outputs for the rows ``kept`` change between two passes, though its arguments
    do not.

    `reset`: called before each pass. `passes`: two, of a batch, and of the same one with all other rows replaced. None
    if there is no such module.
    """
    calls: list[list[_Call]] = []
    for run in passes:
        reset()
        with _noting(model, rows, kept) as noted:
            run()
        calls.append(noted)
    pairs = zip(*calls, strict=False)
    return next((one.name for one, other in pairs if one.name == other.name and one.differs(other)), None)


@contextmanager
def _noting(model: nn.Module, rows: int, kept: Tensor) -> Iterator[list[_Call]]:
    noted: list[_Call] = []

    def hook(name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            described = f"{name!r} ({type(module).__name__})" if name else f"the model ({type(module).__name__})"
            noted.append(_Call(described, _kept((args, kwargs), rows, kept), _kept(output, rows, kept)))

        return note

    handles = [module.register_forward_hook(hook(name), with_kwargs=True) for name, module in model.named_modules()]
    try:
        yield noted
    finally:
        for handle in handles:
            handle.remove()


def _kept(values: object, rows: int, kept: Tensor) -> list[Tensor]:
    """Copies of the rows ``kept`` of all tensors that have the batch on their first axis."""
    tensors = [each for each in pytree.tree_leaves(values) if type(each) is Tensor and each.shape[:1] == (rows,)]
    return [each.detach().index_select(0, kept).clone() for each in tensors]


def _equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(map(same, left, right))
