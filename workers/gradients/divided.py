"""Parameters that ranks have divided among them (`dpsweep.workers.trials.divided_model`).

Such a parameter stays the same object, with its type and shape. It has its values while its group is gathered; in
between each of its entries is NaN, in the memory of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

InPlaceChange = Callable[[Tensor], None]
"""Changes the values of a parameter in place, equally at each call."""


class Group(Protocol):
    """Parameters that are gathered together."""

    @property
    def is_gathered(self) -> bool: ...

    def gather(self) -> None:
        """Give the parameters their values. The other ranks lend meanwhile."""
        ...

    def free(self) -> None:
        """Free the memory of the gathered values."""
        ...


@dataclass
class Part:
    """A rank's part of a divided parameter: consecutive values of the flat parameter.

    `own`: these values [n], which an optimizer changes in place. `sizes`: of the parts of all ranks. `change`: applied
    by this rank alone to gathered values.
    """

    own: nn.Parameter
    rank: int
    sizes: Sequence[int]
    group: Group
    change: InPlaceChange | None = None

    def of(self, whole: Tensor) -> Tensor:
        """Return this part of values with the shape of the parameter, flat."""
        parts: tuple[Tensor, ...] = whole.flatten().split(list(self.sizes))
        return parts[self.rank]


_PARTS: Final[Any] = WeakIdKeyDictionary()
"""The `Part` of each divided parameter."""


def note_part(parameter: nn.Parameter, part: Part) -> None:
    """Let others know that a parameter is divided."""
    _PARTS[parameter] = part


def part_of(value: object) -> Part | None:
    """Return this rank's part of a parameter; None unless it is divided."""
    found: Part | None = _PARTS.get(value)
    return found


def any_divided() -> bool:
    """Return whether this process has only parts of some model's parameters."""
    return len(_PARTS) > 0


def is_divided(value: object) -> bool:
    """Return whether this process has only a part of a parameter."""
    return part_of(value) is not None


def is_away(value: object) -> bool:
    """Return whether the values of a parameter are not gathered now."""
    part = part_of(value)
    return part is not None and not part.group.is_gathered


def own_part(parameter: nn.Parameter) -> Tensor:
    """Return the values of a parameter that this process has: all, unless it is divided."""
    part = part_of(parameter)
    held: Tensor = parameter if part is None else part.own
    return held.detach()


def part_sizes(count: int, ranks: int) -> list[int]:
    """Return how many of ``count`` values each rank has.

    >>> part_sizes(7, 4)
    [2, 2, 2, 1]
    """
    most = -(-count // ranks)
    return [max(0, min(most, count - most * rank)) for rank in range(ranks)]


@contextmanager
def displaced(parameter: nn.Parameter, change: InPlaceChange) -> Iterator[None]:
    """Change the values of a parameter within this context; where it is divided, for passes of this process alone."""
    part = part_of(parameter)
    if part is not None:
        part.change = change
        try:
            yield
        finally:
            part.change = None
        return
    before = parameter.detach().clone()
    change(parameter)
    try:
        yield
    finally:
        parameter.copy_(before)


def whole_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values of a state dict that was taken with ``keep_vars``; of divided parameters, copies on the CPU.

    They are gathered group by group; the other ranks lend meanwhile.
    """
    found, group = dict[str, Any](), None
    try:
        for name, value in values.items():
            part = part_of(value)
            if part is None:
                found[name] = value.detach() if isinstance(value, Tensor) else value
                continue
            if group is not part.group:
                _free(group)
                group = part.group
                group.gather()
            found[name] = value.detach().to("cpu", copy=True)
    finally:
        _free(group)
    return found


def _free(group: Group | None) -> None:
    if group is not None:
        group.free()


@torch.no_grad()
def set_values(model: nn.Module, values: Mapping[str, Any]) -> None:
    """Set values of a state dict, as far as this process has them; names that ``values`` lack stay as they are."""
    present = model.state_dict(keep_vars=True)
    parts = {name: part for name in values if (part := part_of(present.get(name))) is not None}
    model.load_state_dict({name: value for name, value in values.items() if name not in parts}, strict=False)
    for name, part in parts.items():
        part.own.copy_(part.of(values[name]))
