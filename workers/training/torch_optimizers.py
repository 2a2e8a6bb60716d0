"""Optimizers of torch that update a model by noisy gradients alone."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.training.optimizers import Parameters

_STEPPING = weakref.WeakSet[torch.optim.Optimizer]()
"""Optimizers that are given noisy gradients right now."""


@dataclass(eq=False)
class TorchOptimizer:
    """An optimizer of torch that is given the noisy gradients of every step, and steps at no other time.

    Raises: InvalidInput unless it needs gradients of exactly these parameters alone.
    """

    parameters: Parameters
    optimizer: torch.optim.Optimizer

    def __post_init__(self) -> None:
        _require_parameters(self.optimizer, self.parameters)
        _require_gradients_alone(self.optimizer)
        for each in _with_wrapped(self.optimizer):
            with contextlib.suppress(AttributeError):  # a wrapper that is no whole optimizer has no hooks
                weakref.finalize(self, each.register_step_pre_hook(_require_noise).remove)

    def step(self, gradients: Mapping[str, Tensor], factor: float, noise_std: float) -> None:
        for name, gradient in gradients.items():
            self.parameters[name].grad = gradient
        with _stepping(self.optimizer):
            self.optimizer.step()
        for name in gradients:
            self.parameters[name].grad = None

    def state(self) -> dict[str, Any]:
        return dict(self.optimizer.state_dict())

    def restore(self, state: Mapping[str, Any]) -> None:
        self.optimizer.load_state_dict(dict(state))


@contextlib.contextmanager
def _stepping(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    found = set(_with_wrapped(optimizer)) - set(_STEPPING)
    _STEPPING.update(found)
    try:
        yield
    finally:
        _STEPPING.difference_update(found)


def _with_wrapped(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """Return the optimizer and, for a wrapper such as that of Accelerate, the one that it steps."""
    wrapped = getattr(optimizer, "optimizer", None)
    return (optimizer, wrapped) if isinstance(wrapped, torch.optim.Optimizer) else (optimizer,)


def _require_noise(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Raise InvalidInput when the optimizer steps outside the engine. Registered as a hook before its steps."""
    if optimizer not in _STEPPING:
        raise InvalidInput(
            f"{type(optimizer).__name__}.step() was called outside engine.step(batch), which alone adds the noise: "
            "leave out backward() and optimizer.step(), or make another optimizer for updates on public data"
        )


def _require_parameters(optimizer: torch.optim.Optimizer, parameters: Parameters) -> None:
    held = {id(each) for group in optimizer.param_groups for each in group["params"]}
    missing = [name for name, each in parameters.items() if id(each) not in held]
    if missing or len(held) > len(parameters):
        what = f"lacks {', '.join(missing[:5])}" if missing else "holds others or frozen ones too"
        raise InvalidInput(
            f"the optimizer must hold the trainable parameters of the model, but {what}; make it of "
            "model.parameters() after freezing"
        )


def _require_gradients_alone(optimizer: torch.optim.Optimizer) -> None:
    kind = type(optimizer).__name__
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise InvalidInput(
            f"{kind} asks for the loss of the batch again within a step, which no noise would cover; "
            "choose an optimizer that needs gradients alone, such as Adam"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise InvalidInput(f"{kind} needs sparse gradients, and noise leaves none; choose another one, such as Adam")
