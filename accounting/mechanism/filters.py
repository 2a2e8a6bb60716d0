"""Filters: a limit on what the steps of a run may cost each example, whatever the run does.

Before every step a filter fixes a bound c_t in [0, 1] on an example's contribution over the sensitivity, from earlier
outputs and from the example itself. It adds the largest cost of a step with that bound. It chooses the bounds so that
the sum never exceeds the budget. Then every example is protected as if that sum had been fixed before the run, although
each bound was chosen during it (docs/accounting-proofs.md, "Filters").

- `RenyiFilter`: the sum of Renyi divergences of one fixed order is at most the budget (Feldman and Zrnic 2021).
- `GaussianFilter`: the sum of (c_t / sigma_t)^2 is at most the budget mu^2, for full batches; the run is mu-GDP for the
  example (Koskela, Tobaben and Honkela 2022; Smith and Thakurta 2022).

Adjacency: adding, removing or blanking one example of a Poisson-sampled run.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, final

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import log_expit, ndtri_exp

from dpsweep.accounting.errors import InvalidInput, keep_finite, keep_whole
from dpsweep.accounting.numerics.gaussian import gaussian_epsilon
from dpsweep.accounting.numerics.renyi import pure_rdp, sampled_gaussian_rdp_at
from dpsweep.accounting.numerics.rounding import ROUND_UP

Array = NDArray[np.float64]

_RATIO: Final = 1.0 + 1.0 / 512.0
"""Ratio of neighbouring nodes, in contribution over noise multiplier."""
_LOWEST: Final = -3600
"""The exponent of the lowest node, at about 1/1000; below it costs are interpolated linearly from 0."""
_TABLE: Final = 256
"""The exponents of highest nodes are multiples of this, so that noise levels share tables."""


@dataclass(frozen=True)
class StepPrices:
    """Cost of a step for an example, by the bound on its contribution. budget: limit on the summed cost of all steps.

    The cost is interpolated linearly in u = (contribution / sigma)^2 from ``costs`` [nodes] at u = ``nodes`` [nodes].
    It is not below the true cost, which is convex in u.
    """

    budget: float
    noise_multiplier: float
    nodes: Array
    costs: Array

    def cost(self, contributions: ArrayLike) -> Array:
        """Return an upper bound on the cost of a step, for contributions in [0, 1] of any shape."""
        precisions = np.square(np.asarray(contributions, np.float64) / self.noise_multiplier)
        return np.asarray(np.interp(precisions, self.nodes, self.costs) * ROUND_UP)

    def affordable(self, left: ArrayLike) -> Array:
        """Return the largest contribution in [0, 1] with a cost of at most ``left``, up to rounding; 0 if nothing is
        left.
        """
        precisions = np.interp(np.maximum(left, 0.0) / ROUND_UP, self.costs, self.nodes)
        return np.asarray(np.minimum(self.noise_multiplier * np.sqrt(precisions), 1.0))


@dataclass(frozen=True)
class IndividualFilter(ABC):
    """A limit on the summed cost of the steps for each example; ``budget`` is in the unit of the kind."""

    stored_name: ClassVar[str]
    budget: float

    def __post_init__(self) -> None:
        keep_finite(self, "budget", "budget of a filter", above=0.0)

    @abstractmethod
    def prices(self, sample_rate: float, noise_multiplier: float) -> StepPrices:
        """Return the costs of one step of the Poisson-sampled Gaussian mechanism."""

    @abstractmethod
    def epsilon(self, delta: float, precision: float = 0.0, pure: Sequence[float] = ()) -> float:
        """Return the epsilon at ``delta`` of every example, including releases besides the steps.

        precision: summed inverse squares of the noise multipliers of Gaussian releases; pure: epsilons of pure ones.
        """

    @abstractmethod
    def require_covers(self, sample_rate: float) -> None:
        """Raise `InvalidInput` for a sample rate that the theorem does not cover."""


@final
@dataclass(frozen=True)
class RenyiFilter(IndividualFilter):
    """``budget`` limits the Renyi divergence of the whole order ``order`` >= 2, in both directions.

    At whole orders the divergence is a finite sum, computed to full relative precision however little a step costs.
    """

    stored_name: ClassVar[str] = "renyi"
    order: int

    def __post_init__(self) -> None:
        super().__post_init__()
        keep_whole(self, "order", "order of a Renyi filter", at_least=2, at_most=2**12)

    def prices(self, sample_rate: float, noise_multiplier: float) -> StepPrices:
        highest = math.ceil(math.log(1.0 / noise_multiplier) / math.log(_RATIO)) + 1
        highest = max(_TABLE * math.ceil(highest / _TABLE), _LOWEST + _TABLE)  # so that noise levels share tables
        nodes, costs = _sampled_costs(self.order, sample_rate, highest)
        return StepPrices(self.budget, noise_multiplier, nodes, costs)

    def epsilon(self, delta: float, precision: float = 0.0, pure: Sequence[float] = ()) -> float:
        """Return the improved conversion at this order (Canonne, Kamath and Steinke 2020, Proposition 12)."""
        steps = self.budget + 0.5 * self.order * precision
        released = sum(float(pure_rdp(epsilon, np.array([float(self.order)]))[0]) for epsilon in pure)
        return min(
            self._converted(steps + released, delta),
            self._converted(steps, delta) + math.fsum(pure) * ROUND_UP,
        )

    def require_covers(self, sample_rate: float) -> None:
        """Accept any rate."""

    def _converted(self, divergence: float, delta: float) -> float:
        return max(divergence * ROUND_UP + conversion(self.order, delta), 0.0)


@final
@dataclass(frozen=True)
class GaussianFilter(IndividualFilter):
    """``budget`` limits mu^2, the summed squares of contribution over noise multiplier, of full batches."""

    stored_name: ClassVar[str] = "gaussian"

    def prices(self, sample_rate: float, noise_multiplier: float) -> StepPrices:
        self.require_covers(sample_rate)
        both = np.array([0.0, noise_multiplier**-2])
        return StepPrices(self.budget, noise_multiplier, both, both)

    def epsilon(self, delta: float, precision: float = 0.0, pure: Sequence[float] = ()) -> float:
        """Return the exact conversion; a pure release enters as the Gaussian that dominates it
        (`dpsweep.accounting.accountants.one_run`).
        """
        squares = self.budget + precision
        released = sum((2.0 * float(ndtri_exp(log_expit(-epsilon)))) ** 2 for epsilon in pure)
        added = _of_gaussian(squares, delta) + math.fsum(pure) * ROUND_UP
        return min(_of_gaussian(squares + released, delta), added)

    def require_covers(self, sample_rate: float) -> None:
        if sample_rate != 1.0:
            raise InvalidInput(
                f"a Gaussian filter needs full batches, but the sample rate is {sample_rate:.6g}; use a Renyi filter"
            )


FILTERS: Final[Mapping[str, type[RenyiFilter | GaussianFilter]]] = {
    kind.stored_name: kind for kind in (RenyiFilter, GaussianFilter)
}


def conversion(order: int, delta: float) -> float:
    """Return the epsilon at ``delta`` minus the Renyi divergence of that order, rounded up (see
    `RenyiFilter.epsilon`).
    """
    added = math.log1p(-1.0 / order) - math.log(delta * order) / (order - 1.0)
    return added + 1e-12 * (1.0 + abs(added))


def _of_gaussian(squares: float, delta: float) -> float:
    return gaussian_epsilon(math.sqrt(squares * ROUND_UP), delta)[0]


@functools.lru_cache(maxsize=64)
def _sampled_costs(order: int, sample_rate: float, highest: int) -> tuple[Array, Array]:
    """Precisions u [nodes] from 0 to _RATIO^(2 highest), and the Renyi divergence of a step at each, from above.

    Nodes are powers of one ratio, so that every table agrees with every other where both have nodes.
    """
    roots = [_RATIO**power for power in range(_LOWEST, highest + 1)]
    costs = [sampled_gaussian_rdp_at(order, sample_rate, 1.0 / root) for root in roots]
    nodes, table = np.square([0.0, *roots]), np.array([0.0, *costs])
    nodes.setflags(write=False)
    table.setflags(write=False)
    return nodes, table
