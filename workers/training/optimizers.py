"""Optimisers over noisy gradients, learning-rate schedules and parameter averaging.

Everything here is post-processing of noisy gradients and does not change the privacy of a run.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Protocol

import torch
from torch import Tensor, nn
from torch.optim.adam import adam as adam_step
from torch.optim.sgd import sgd as sgd_step

from dpsweep.accounting.errors import InvalidInput, require_finite
from dpsweep.accounting.registry import build
from dpsweep.workers.spec import Component

Parameters = Mapping[str, nn.Parameter]


class Optimizer(Protocol):
    """Updates parameters in place from noisy gradients.

    Each entry of a parameter moves by its own gradients alone, so that ranks may divide a parameter. The state
    has numbers, and mappings of parameter names to tensors with the shape of the parameter.

    `gradients`: by parameter name, already divided by the batch size. factor: value of the learning-rate schedule at
    this step. noise_std: standard deviation of the noise in each coordinate of ``gradients``.
    """

    def step(self, gradients: Mapping[str, Tensor], factor: float, noise_std: float) -> None:
        """Update all parameters by one step."""
        ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class InTurn(Protocol):
    """Updates parameters that ranks have divided, at rank 0."""

    def step(self, gradients: Iterator[tuple[str, Tensor]], factor: float, noise_std: float) -> None:
        """As `Optimizer.step`, from flat gradients that are made one after the other; takes all of them."""
        ...


# The optimizers below call the functional forms of torch.optim. Its classes import the compiler (torch._dynamo) when
# they are made and at every step, which would double the start-up time of a trial.
@dataclass
class Sgd:
    """The update of torch.optim.SGD. Raises: InvalidInput for values out of range."""

    parameters: Parameters
    learning_rate: float
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    buffers: dict[str, Tensor] = field(init=False, default_factory=dict)
    """Momentum buffers by parameter name; empty before the first step and without momentum."""

    def __post_init__(self) -> None:
        require_finite("learning_rate", self.learning_rate, above=0.0)
        require_finite("momentum", self.momentum, at_least=0.0, below=1.0)
        require_finite("weight_decay", self.weight_decay, at_least=0.0)
        if not isinstance(self.nesterov, bool):
            raise InvalidInput(f"nesterov is {self.nesterov!r}, but must be true or false")
        if self.nesterov and self.momentum == 0.0:
            raise InvalidInput("nesterov is true, but momentum is 0; give a momentum above 0")
        self.foreach = _foreach(self.parameters)

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], factor: float, noise_std: float) -> None:
        buffers = [self.buffers.get(name) for name in gradients]
        sgd_step(
            [self.parameters[name] for name in gradients],
            list(gradients.values()),
            buffers,
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            lr=self.learning_rate * factor,
            dampening=0.0,
            nesterov=self.nesterov,
            maximize=False,
            foreach=self.foreach,
        )
        self.buffers = {name: buffer for name, buffer in zip(gradients, buffers, strict=True) if buffer is not None}

    def state(self) -> dict[str, Any]:
        return {"buffers": self.buffers}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.buffers = {name: saved.to(self.parameters[name].device) for name, saved in state["buffers"].items()}


@dataclass
class Adam:
    """The update of torch.optim.Adam. Raises: InvalidInput for values out of range."""

    parameters: Parameters
    learning_rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    decoupled_weight_decay: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _require_moments(self)
        require_finite("epsilon", self.epsilon, at_least=0.0)
        self.steps, self.moments, self.foreach = torch.tensor(0.0), _moments(self), _foreach(self.parameters)

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], factor: float, noise_std: float) -> None:
        first, second = zip(*(self.moments[name] for name in gradients), strict=True)
        steps = [self.steps.clone() for _ in gradients]
        adam_step(
            [self.parameters[name] for name in gradients],
            list(gradients.values()),
            list(first),
            list(second),
            [],
            steps,
            decoupled_weight_decay=self.decoupled_weight_decay,
            amsgrad=False,
            beta1=self.beta1,
            beta2=self.beta2,
            lr=self.learning_rate * factor,
            weight_decay=self.weight_decay,
            eps=self.epsilon,
            maximize=False,
            foreach=self.foreach,
        )
        self.steps += 1.0

    def state(self) -> dict[str, Any]:
        return {"steps": self.steps, "moments": self.moments}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"].clone()
        _restore_moments(self.moments, state["moments"])


@dataclass
class AdamW(Adam):
    """The update of torch.optim.AdamW."""

    weight_decay: float = 0.01
    decoupled_weight_decay: ClassVar[bool] = True


def _foreach(parameters: Parameters) -> bool | None:
    """Return whether torch updates all parameters in one call: not on a CPU, elsewhere as torch decides (None)."""
    return False if all(each.device.type == "cpu" for each in parameters.values()) else None


MovingMoments = Mapping[str, tuple[Tensor, Tensor]]
"""Moving averages of the gradients and of their squares, by parameter name."""


def _moments(optimizer: Adam | BiasCorrectedAdam) -> MovingMoments:
    return {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in optimizer.parameters.items()}


def _require_moments(optimizer: Adam | BiasCorrectedAdam) -> None:
    """Check the parameters that all Adam variants share; with beta = 1 a moving average would ignore all gradients."""
    require_finite("learning_rate", optimizer.learning_rate, above=0.0)
    require_finite("beta1", optimizer.beta1, at_least=0.0, below=1.0)
    require_finite("beta2", optimizer.beta2, at_least=0.0, below=1.0)
    require_finite("weight_decay", optimizer.weight_decay, at_least=0.0)


def _restore_moments(moments: MovingMoments, saved: MovingMoments) -> None:
    for name, values in saved.items():
        for moment, value in zip(moments[name], values, strict=True):
            moment.copy_(value)


@dataclass
class BiasCorrectedAdam:
    """AdamW that subtracts the noise variance from the second moment (DP-AdamBC, Tang et al., 2024, Algorithm 1).

    E[g~^2] = g^2 + noise_std^2 for the noisy gradient g~, so the moving average of noise_std^2 is subtracted from the
    second moment. The average tracks noise and bounds that change between steps. The result is at least ``floor``^2.

    Raises: InvalidInput for values out of range.
    """

    parameters: Parameters
    learning_rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    floor: float = 1e-3
    weight_decay: float = 0.0
    steps: int = field(init=False, default=0)
    noise_moment: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        _require_moments(self)
        require_finite("floor", self.floor, above=0.0)
        self.moments = _moments(self)

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], factor: float, noise_std: float) -> None:
        beta1, beta2 = self.beta1, self.beta2
        self.steps += 1
        self.noise_moment = beta2 * self.noise_moment + (1.0 - beta2) * noise_std**2
        debias1, debias2 = 1.0 - beta1**self.steps, 1.0 - beta2**self.steps
        rate = self.learning_rate * factor
        new, parameters = list(gradients.values()), list[Tensor](self.parameters[name] for name in gradients)
        first, second = (list(each) for each in zip(*(self.moments[name] for name in gradients), strict=True))
        torch._foreach_lerp_(first, new, 1.0 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, new, new, value=1.0 - beta2)
        signals = torch._foreach_sub(second, self.noise_moment)
        torch._foreach_div_(signals, debias2)
        torch._foreach_clamp_min_(signals, self.floor**2)
        torch._foreach_sqrt_(signals)
        torch._foreach_mul_(parameters, 1.0 - rate * self.weight_decay)
        torch._foreach_addcdiv_(parameters, first, signals, value=-rate / debias1)

    def state(self) -> dict[str, Any]:
        return {"steps": self.steps, "noise_moment": self.noise_moment, "moments": self.moments}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.steps, self.noise_moment = state["steps"], state["noise_moment"]
        _restore_moments(self.moments, state["moments"])


OPTIMIZERS: Final[Mapping[str, Callable[..., Optimizer]]] = {
    "sgd": Sgd,
    "adam": Adam,
    "adamw": AdamW,
    "adam_corrected": BiasCorrectedAdam,
}


def make_optimizer(component: Component, parameters: Parameters) -> Optimizer:
    """Return the optimiser that a trial names. Raises: InvalidInput for unknown names, keys and impossible values."""
    return build(OPTIMIZERS, component.name, component.params, "optimizer", parameters=parameters)


LearningRateSchedule = Callable[[int], float]
"""Step, counted from 0 -> factor by which the learning rate is multiplied."""


def _constant(total_steps: int, steps_per_epoch: int, warmup_epochs: float = 0.0) -> LearningRateSchedule:
    """Factor 1, after a linear warm-up."""
    require_finite("warmup_epochs", warmup_epochs, at_least=0.0)
    return lambda step: _warmup(step, warmup_epochs * steps_per_epoch)


def _cosine(
    total_steps: int, steps_per_epoch: int, warmup_epochs: float = 0.0, end: float = 0.0
) -> LearningRateSchedule:
    """Half a cosine from 1 to ``end`` over the run, after a linear warm-up."""
    require_finite("warmup_epochs", warmup_epochs, at_least=0.0)
    require_finite("end of the cosine", end, at_least=0.0, at_most=1.0)

    def factor(step: int) -> float:
        progress = min(step / total_steps, 1.0)
        return _warmup(step, warmup_epochs * steps_per_epoch) * (
            end + (1.0 - end) * 0.5 * (1.0 + math.cos(math.pi * progress))
        )

    return factor


def _linear(total_steps: int, steps_per_epoch: int, end: float, epochs: float) -> LearningRateSchedule:
    """Return a straight line from 1 to ``end`` over the first ``epochs`` epochs, then ``end`` (paper C, Figure 9)."""
    require_finite("end of the linear schedule", end, at_least=0.0)
    require_finite("epochs of the linear schedule", epochs, above=0.0)
    return lambda step: 1.0 + (end - 1.0) * min(step / (epochs * steps_per_epoch), 1.0)


def _step(total_steps: int, steps_per_epoch: int, factor: float, period_epochs: float) -> LearningRateSchedule:
    """Step decay: factor^floor(epoch / period_epochs)."""
    require_finite("period_epochs", period_epochs, above=0.0)
    require_finite("factor of the step schedule", factor, above=0.0, at_most=1.0)
    return lambda step: float(factor ** (step // (period_epochs * steps_per_epoch)))


def _inverse_sqrt_steps(total_steps: int, steps_per_epoch: int) -> LearningRateSchedule:
    """Constant factor 1 / sqrt(T), with T the planned number of steps (paper D)."""
    return lambda step: 1.0 / math.sqrt(total_steps)


def _warmup(step: int, warmup_steps: float) -> float:
    return min((step + 1) / warmup_steps, 1.0) if warmup_steps > 0.0 else 1.0


LEARNING_RATE_SCHEDULES: Final[Mapping[str, Callable[..., LearningRateSchedule]]] = {
    "constant": _constant,
    "cosine": _cosine,
    "linear": _linear,
    "step": _step,
    "inverse_sqrt_steps": _inverse_sqrt_steps,
}


def make_learning_rate_schedule(component: Component, total_steps: int, steps_per_epoch: int) -> LearningRateSchedule:
    """Return the learning-rate schedule that a trial names.

    total_steps: the planned number of steps, even if the run ends early.

    >>> schedule = make_learning_rate_schedule(Component("cosine"), total_steps=100, steps_per_epoch=10)
    >>> schedule(0), schedule(50)
    (1.0, 0.5)
    """
    return build(
        LEARNING_RATE_SCHEDULES,
        component.name,
        component.params,
        "learning-rate schedule",
        total_steps=total_steps,
        steps_per_epoch=steps_per_epoch,
    )


class ExponentialAverage:
    """Exponential moving average of the parameters, with decay min(decay, (1 + t) / (10 + t)) at step t.

    De et al. (2022), Sec. 3.5.
    """

    def __init__(self, parameters: Parameters, decay: float = 0.999) -> None:
        self._decay = require_finite("decay of the parameter average", decay, at_least=0.0, below=1.0)
        self._steps = 0
        self.values = {name: parameter.detach().clone() for name, parameter in parameters.items()}

    @torch.no_grad()
    def update(self, parameters: Parameters) -> None:
        """Include the current values of ``parameters`` in the averages."""
        decay = min(self._decay, (1 + self._steps) / (10 + self._steps))
        self._steps += 1
        torch._foreach_lerp_(list(self.values.values()), [parameters[name] for name in self.values], 1.0 - decay)

    def averaged(self, model: nn.Module) -> nn.Module:
        """Return a copy of ``model`` with the averages as its parameters."""
        activations = [value for module in model.modules() for value in vars(module).values()]
        kept = {id(value): value.detach() for value in activations if isinstance(value, Tensor) and not value.is_leaf}
        copied = copy.deepcopy(model, kept)  # activations stored on a module cannot be deep-copied
        copied.load_state_dict({**copied.state_dict(), **self.values})
        return copied

    def state(self) -> dict[str, Any]:
        return {"steps": self._steps, "values": self.values}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._steps = state["steps"]
        for name, value in state["values"].items():
            self.values[name].copy_(value)


AVERAGES: Final[Mapping[str, Callable[..., ExponentialAverage]]] = {"ema": ExponentialAverage}


def make_average(component: Component, parameters: Parameters) -> ExponentialAverage:
    """Return the parameter average that a trial names."""
    return build(AVERAGES, component.name, component.params, "parameter average", parameters=parameters)
