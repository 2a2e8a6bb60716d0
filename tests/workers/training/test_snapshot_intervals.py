"""What the mean contribution of several steps is worth: a bound at whole orders, and otherwise an estimate."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dpsweep.accounting.accountants.methods import optimal_order
from dpsweep.accounting.individual import individual_epsilons
from dpsweep.accounting.mechanism.samplings import FixedBatchSampling, PoissonSampling, Sampling
from dpsweep.accounting.mechanism.trace import Segment, Trace
from dpsweep.accounting.numerics.renyi import ORDERS, sampled_gaussian_rdp
from dpsweep.workers.clipping import ClipRule, Examples
from dpsweep.workers.training.snapshot_intervals import Measurement, SnapshotInterval, generator_rate
from dpsweep.workers.training.trial_mechanism import LEAST_ORDER

DELTA, SIZE = 1e-5, 10_000
POISSON, FIXED = PoissonSampling(0.01), FixedBatchSampling(SIZE, 100)


@dataclass(frozen=True)
class Run:
    """Steps of one interval between two snapshots, with the noise and the contribution c / S of each."""

    sampling: Sampling
    noise: NDArray[np.float64]
    contributions: NDArray[np.float64]

    @property
    def trace(self) -> Trace:
        segments = (Segment(step, 1, self.sampling, sigma) for step, sigma in enumerate(self.noise.tolist()))
        return Trace(SIZE, tuple(segments))

    @property
    def order(self) -> float:
        return max(optimal_order(self.trace, DELTA), LEAST_ORDER)

    @property
    def mean(self) -> float:
        """The contribution that is stored for all of the steps."""
        one = torch.ones(1)
        known = Measurement(Examples(one, torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)), one)
        interval = SnapshotInterval.from_step(0, known, generator_rate(self.order, self.noise[0]))
        for contribution in self.contributions.tolist():
            interval.extend(_rule(contribution))
        return float(interval.ended().contributions[0])

    def epsilon(self, method: str, *, by_mean: bool) -> float:
        steps = [0] if by_mean else np.arange(len(self.noise))
        values = [[self.mean]] if by_mean else self.contributions[None]
        return float(individual_epsilons(steps, values, self.trace, DELTA, method).upper[0])


def _rule(contribution: float) -> ClipRule:
    return ClipRule(1.0, lambda examples: contribution * torch.ones_like(examples.norms))


def run(sampling: Sampling, noise: tuple[float, ...], contributions: tuple[float, ...], steps: int) -> Run:
    """``steps`` steps for each of the ``noise`` multipliers and ``contributions``."""
    return Run(sampling, np.repeat(noise, steps), np.repeat(contributions, steps))


@pytest.mark.parametrize("sigma", [0.6, 1.0, 3.0])
@pytest.mark.parametrize("contributions", [(0.0, 1.0), (0.3, 0.1), (0.9, 0.2)])
def test_up_to_its_order_the_mean_costs_no_less_renyi_privacy_than_the_steps(
    sigma: float, contributions: tuple[float, ...]
) -> None:
    taken = run(POISSON, (sigma, sigma), contributions, 25)

    def cost(contribution: float) -> NDArray[np.float64]:
        return sampled_gaussian_rdp(0.01, sigma / contribution) if contribution else np.zeros_like(ORDERS)

    covered = (np.floor(ORDERS) == ORDERS) & (taken.order >= ORDERS)
    steps, mean = np.sum([cost(each) for each in contributions], axis=0), 2.0 * cost(taken.mean)
    assert covered.sum() >= 3
    assert (mean[covered] >= steps[covered] * (1.0 - 1e-9)).all()


@pytest.mark.parametrize(
    ("taken", "method", "share"),
    [
        (run(POISSON, (0.6, 0.6), (0.3, 0.0), 25), "rdp", 0.72),
        (run(POISSON, (1.5, 0.7), (0.0, 1.0), 500), "pld", 0.68),
        (run(FIXED, (1.5,) * 10, (1.0, *[0.0] * 9), 5), "rdp", 0.82),
    ],
    ids=["higher order", "changing noise", "displaced examples"],
)
def test_elsewhere_its_epsilon_may_be_too_small_and_is_an_estimate(taken: Run, method: str, share: float) -> None:
    assert taken.trace.individual_kind == "estimate"
    assert taken.epsilon(method, by_mean=True) == pytest.approx(share * taken.epsilon(method, by_mean=False), rel=0.01)
