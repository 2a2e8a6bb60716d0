"""Parameters that gradient canaries have of their own, for audits of the last model.

Such an audit takes the canaries' directions away from the model. The clipped sum of the real examples is projected off
them before noise is added, which lengthens no contribution: the claim covers the run. The part of the noisy sum along
the directions moves parameters of the canaries, by the optimiser and the average of the trial. The rest trains the
model, which computes nothing from those parameters.

Threat model: the adversary knows the directions, and sees all parameters before the first step and after the last one.
It sees nothing between, no batch and no coin. The score of a canary is how far its parameter has moved against its
direction.

Scores are independent. Along a direction lies what one canary adds, and noise. Noise is isotropic and directions are
orthogonal, so the noise along each is independent of all other noise. Nothing else of the run depends on the canaries'
parameters: neither the model, nor bounds and noisy answers. Let all else be given, and which steps may be the turn of
each canary. Then a parameter depends on coin, batches and noise of its canary alone, because optimisers move every
coordinate by its own history. Parameters of canaries that take no part are noise of one distribution. Each score
follows from the noisy sums, and so shows no more of its coin than the claim allows. Rounding is left aside.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from dpsweep.workers.spec import TrialSpec
from dpsweep.workers.training.optimizers import make_average, make_optimizer

Array = NDArray[np.float64]

_NAME: Final = "canaries"


class OwnParameters:
    """One parameter for each canary, 0 before the first step."""

    def __init__(self, spec: TrialSpec, count: int) -> None:
        parameter = nn.Parameter(torch.zeros(count, dtype=torch.float64))
        self._parameters = {_NAME: parameter}
        self._optimizer = make_optimizer(spec.optimizer, self._parameters)
        self._average = make_average(spec.averaging, self._parameters) if spec.averaging else None

    def step(self, gradients: Array, factor: float, noise_std: float) -> None:
        """Take a step. `gradients`: [count], noisy and over the batch size. Others as of `Optimizer.step`."""
        self._optimizer.step({_NAME: torch.from_numpy(gradients)}, factor, noise_std)
        if self._average is not None:
            self._average.update(self._parameters)

    @property
    def total(self) -> Array:
        """Return how far each parameter has moved against its direction, [count]."""
        released = self._parameters if self._average is None else self._average.values
        moved: Array = -released[_NAME].detach().numpy()
        return moved

    def state(self) -> dict[str, Any]:
        average = None if self._average is None else self._average.state()
        values = self._parameters[_NAME].detach()
        return {"values": values, "optimizer": self._optimizer.state(), "average": average}

    def restore(self, state: Any) -> None:
        with torch.no_grad():
            self._parameters[_NAME].copy_(state["values"])
        self._optimizer.restore(state["optimizer"])
        if self._average is not None:
            self._average.restore(state["average"])
