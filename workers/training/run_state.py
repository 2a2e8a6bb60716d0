"""The mutable state of a training run. Each component saves and restores its own part of the checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Protocol

import torch
from pydantic import ConfigDict, TypeAdapter
from torch import nn

from dpsweep.accounting.errors import START_ANEW, InvalidInput
from dpsweep.accounting.mechanism.estimates import Claim
from dpsweep.workers.clipping import ClippingState
from dpsweep.workers.gradients.divided import set_values, whole_values
from dpsweep.workers.training.counters import COUNTERS, Counters
from dpsweep.workers.training.history import EpochRecord


class Stateful(Protocol):
    """A component that changes from step to step.

    Guarantee: a new component of the same trial that restores this state continues bit-identically. The state consists
    of tensors, numbers, text, bytes and containers of them; it is private.
    """

    def state(self) -> Any:
        """Return the current state, for `restore`."""
        ...

    def restore(self, state: Any) -> None:
        """Continue from a `state`."""
        ...


@dataclass
class RunState:
    """Progress of a run. The checkpoint holds each field under its name.

    `clipping`: the state of the clipping method.
    `contributions`: whether recorded contributions are guarantees or estimates, see `Trace`.
    `initial_bound`: the first clipping bound, None without clipping.
    `history`: one record per completed epoch.
    """

    contributions: Claim
    clipping: ClippingState = field(default_factory=lambda: ClippingState(bound=1.0))
    step_count: int = 0
    initial_bound: float | None = None
    counters: Counters = field(default_factory=Counters)
    history: tuple[EpochRecord, ...] = ()

    def state(self) -> dict[str, Any]:
        """Return the fields, those that grow with the epochs as JSON.

        It keeps every bit of a double, a hundred times faster than `torch.save`, which stores each number by itself.
        """
        return {
            **vars(self),
            "clipping": asdict(self.clipping),
            "counters": COUNTERS.dump_json(self.counters),
            "history": _HISTORY.dump_json(self.history),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        for each in fields(self):
            setattr(self, each.name, state[each.name])
        self.clipping = ClippingState(**state["clipping"])
        self.counters = COUNTERS.validate_json(state["counters"])
        self.history = _HISTORY.validate_json(state["history"])


_HISTORY: TypeAdapter[tuple[EpochRecord, ...]] = TypeAdapter(
    tuple[EpochRecord, ...], config=ConfigDict(ser_json_inf_nan="constants")
)


def digest_of_frozen(model: nn.Module) -> str:
    """Return a sha256 of the names, types and shapes of all parameters, and of the values of frozen ones."""
    digest = hashlib.sha256()
    for name, value in model.named_parameters():
        digest.update(repr((name, value.dtype, tuple(value.shape), value.requires_grad)).encode())
        if not value.requires_grad:
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


class ModelValues:
    """Parameters and buffers of a model, as stored in a checkpoint.

    A frozen parameter that still has its initial value is not stored, because the model is built with it again. The
    checkpoint holds a digest of these values instead, so the one of an adapter is as small as the adapter.
    Frozen parameters that the model changes in place are stored.

    digest: `digest_of_frozen`, taken while the model is whole: this process may keep only a part of it.
    """

    def __init__(self, model: nn.Module, digest: str) -> None:
        self._model, self._digest = model, digest
        self._built = {id(value): value._version for value in model.parameters() if not value.requires_grad}

    def state(self) -> dict[str, Any]:
        stored = self._model.state_dict(keep_vars=True)
        kept = {name: value for name, value in stored.items() if not self._is_unchanged_frozen(value)}
        return {"values": whole_values(kept), "built": self._digest}

    def _is_unchanged_frozen(self, value: Any) -> bool:
        """Return whether ``value`` is a frozen parameter that was never changed in place."""
        return id(value) in self._built and value._version == self._built[id(value)]

    def restore(self, state: Mapping[str, Any]) -> None:
        """Set the values of a `state`. Raises: InvalidInput if the model was built with other parameters."""
        if state["built"] != self._digest:
            raise InvalidInput(
                "the model is built with other names, shapes or frozen values of parameters than when the trial began; "
                f"build it from the same weights, or {START_ANEW}"
            )
        set_values(self._model, state["values"])


@dataclass(frozen=True)
class StateOf:
    """A component by the functions that read its state and set it."""

    state: Callable[[], Any]
    set: Callable[[Any], object]

    def restore(self, state: Any) -> None:
        self.set(state)
