"""Empirical audits: can training with one example be told from training without it better than the claim allows?

The adversary sees all that a step makes public: the noisy answer about the batch, and the noisy sum of gradients. Every
example has a feature and a group of its own, so that each step is a trial of each of them; half of them are left out of
all batches. The share of trials in which the likelihood ratio exceeds e^epsilon bounds delta at that epsilon from
below: Pr[S] with the example less e^epsilon Pr[S] without it, by Clopper-Pearson (Jagielski et al. 2020; Steinke,
Nasr and Jagielski 2023 for many examples at once). That must stay below what the accountant claims, and comes close
enough for noise a fifth too small, or a query that nobody accounted for, to be noticed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy.stats import beta
from torch import Tensor, nn

from dpsweep.accounting.mechanism.trace import Trace
from dpsweep.accounting.numerics.gaussian import gaussian_epsilon
from dpsweep.accounting.pld import delta_pld
from dpsweep.workers.data.base import Dataset, make_split
from dpsweep.workers.noise.gaussian_sources import SeededNoise
from dpsweep.workers.sampling.samplers import PoissonSampler, RowNumbers, SeededRows
from dpsweep.workers.spec import Component, DataSpec, ExecutionSpec, NoiseSpec, NormSpec, SamplingSpec, TrialSpec
from dpsweep.workers.training.trainer import Trainer
from tests.workers.devices import DEVICE, NAME
from tests.workers.trial_runs import made_trainer
from tests.workers.trial_specs import planned_mechanism

EPSILON = 0.5
ROWS, STEPS = 400, 100
TRIALS = ROWS // 2 * STEPS
SIGMA, COUNT_SIGMA = 1.0, 1.5

DPSGD_F = Component("dpsgd_f", {"count_noise_multiplier": COUNT_SIGMA, "max_ratio": 0.01})
AUDITED = [
    (Component("flat"), ROWS),
    (Component("flat"), ROWS // 2),
    (Component("quantile"), ROWS),
    (DPSGD_F, ROWS),
    (DPSGD_F, ROWS // 2),
]


def linear(feature_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(feature_shape[0], num_classes, bias=False))


def everyone_apart(length: float) -> Dataset:
    """Examples along axes of their own, all of class 0 and each in a group by itself."""
    features = length * np.eye(ROWS, dtype=np.float32)
    split = make_split(features, np.zeros(ROWS, np.int64), np.arange(ROWS))
    return Dataset("audit", split, split, None, tuple(map(str, range(ROWS))), ("a", "b"))


class EvenRows(PoissonSampler):
    """The batches of a data set that lacks every odd row, in a run that is otherwise the same."""

    def next_batch(self) -> RowNumbers:
        rows = super().next_batch()
        even: RowNumbers = rows[rows % 2 == 0]
        return even


class WeakNoise(SeededNoise):
    """What a trainer with a bug would draw."""

    def normal(self, shape: tuple[int, ...], std: float) -> Tensor:
        return 0.8 * super().normal(shape, std)


@dataclass(frozen=True)
class Audit:
    """contribution: norm of every example's clipped gradient over its bound, when norms were last taken.

    afforded: the share of it that the clipping lets it add.
    """

    clipping: Component
    batch_size: int = ROWS
    contribution: float = 1.0
    afforded: float = 1.0

    def spec(self) -> TrialSpec:
        return TrialSpec(
            key="audit",
            data=DataSpec("audit"),
            model=Component(f"{__file__}:linear"),
            sampling=SamplingSpec("poisson", self.batch_size),
            clipping=self.clipping,
            noise=NoiseSpec(SIGMA),
            epochs=2,
            delta=1e-5,
            seed=0,
            optimizer=Component("sgd", {"learning_rate": 1.0}),
            norms=NormSpec(refreshes_per_epoch=0.01),
            execution=ExecutionSpec(device=NAME),
        )

    def trace(self) -> Trace:
        """One step, as the trainer states it."""
        return planned_mechanism(self.spec(), ROWS).trace(1).until(1)

    def delta(self, root: Path, noise: Callable[[int, torch.device], SeededNoise] = SeededNoise) -> float:
        """Lower bound on delta at `EPSILON`: each of its two halves is wrong with probability 1e-3."""
        ratios = self.batch_size / ROWS * np.expm1(self._log_ratios(root, noise))
        exceeds = ratios > math.expm1(EPSILON)  # of (1 - q + q e^ratio), less 1
        inside, outside = int(exceeds[:, ::2].sum()), int(exceeds[:, 1::2].sum())
        return _at_least(inside) - math.exp(EPSILON) * (1.0 - _at_least(TRIALS - outside))

    def _log_ratios(self, root: Path, noise: Callable[[int, torch.device], SeededNoise]) -> npt.NDArray[np.float64]:
        """[STEPS, ROWS]: log likelihood ratio of each example in the batch against out of it."""
        spec = self.spec()
        dataset = everyone_apart(20.0 if self.contribution == 1.0 else self.contribution * math.sqrt(2.0))
        trainer = made_trainer(spec, root, dataset, noise(1, torch.device("cpu")))  # the same draws on every device
        weight = trainer._parameters["0.weight"]
        weight.data.zero_()
        trainer.begin()
        fresh = trainer._run.clipping
        trainer.step()  # takes everyone's norm
        fresh = replace(fresh, thresholds=trainer._run.clipping.thresholds)
        trainer._sampler = EvenRows(ROWS, self.batch_size, SeededRows(2))
        # Losses and gradients have grown since then.
        start = torch.tensor([[0.0], [50.0]], device=DEVICE).expand(2, ROWS)
        ratios = []
        for _ in range(STEPS):
            weight.data.copy_(start)
            trainer._run.clipping, trainer._run.step_count = fresh, 1
            trainer.step()
            moved = self.batch_size * (start - weight.detach())
            ratios.append(self._log_ratio(trainer, (moved[1] - moved[0]) / math.sqrt(2.0)))
        stacked: npt.NDArray[np.float64] = torch.stack(ratios).double().cpu().numpy()
        return stacked

    def _log_ratio(self, trainer: Trainer, along: Tensor) -> Tensor:
        """along [ROWS]: the noisy sum of gradients in the direction of each example's."""
        rule, counts = trainer._rule, trainer._run.clipping.counts
        bounds = torch.tensor([rule.bounds.get(str(row), rule.sensitivity) for row in range(ROWS)], device=DEVICE)
        shift = self.afforded * self.contribution * bounds
        ratio = shift * (along - 0.5 * shift) / (SIGMA * rule.sensitivity) ** 2
        return ratio if counts is None else ratio + (counts[:ROWS].to(DEVICE) - 0.5) / COUNT_SIGMA**2


def _at_least(successes: int) -> float:
    """Clopper-Pearson lower bound on a probability, from `TRIALS` trials."""
    return float(beta.ppf(1e-3, successes, TRIALS - successes + 1)) if successes else 0.0


def claimed(trace: Trace) -> float:
    return delta_pld(trace, EPSILON).upper


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("clipping", "batch_size"), AUDITED, ids=lambda value: getattr(value, "name", str(value)))
def test_no_step_gives_away_more_than_its_trace_claims(clipping: Component, batch_size: int, tmp_path: Path) -> None:
    audit = Audit(clipping, batch_size)
    found, claim = audit.delta(tmp_path), claimed(audit.trace())
    assert 0.75 * claim < found <= claim


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("clipping", "batch_size"), AUDITED, ids=lambda value: getattr(value, "name", str(value)))
def test_the_audit_notices_noise_that_is_too_small(clipping: Component, batch_size: int, tmp_path: Path) -> None:
    audit = Audit(clipping, batch_size)
    assert audit.delta(tmp_path, WeakNoise) > claimed(audit.trace())


def test_the_audit_notices_a_query_that_is_not_accounted_for(tmp_path: Path) -> None:
    audit = Audit(DPSGD_F)
    (segment,) = audit.trace().segments
    assert audit.delta(tmp_path) > claimed(replace(audit.trace(), segments=(replace(segment, side_queries=()),)))


def test_individual_clipping_gives_away_no_more_than_each_example_was_told(tmp_path: Path) -> None:
    """Gradients have more than doubled since their norms were taken, but are clipped at those."""
    audit = Audit(Component("individual"), contribution=0.6)
    (segment,) = audit.trace().segments
    told = claimed(replace(audit.trace(), segments=(replace(segment, noise_multiplier=SIGMA / 0.6),)))
    assert 0.6 * told < audit.delta(tmp_path) <= told


def test_a_filter_gives_away_no_more_than_is_left_of_the_budget(tmp_path: Path) -> None:
    """The budget pays for three quarters of what each example would add to its step."""
    epsilon = gaussian_epsilon(0.45 / SIGMA, 1e-5)[0]
    audit = Audit(Component("filter", {"epsilon": epsilon}), contribution=0.6, afforded=0.75)
    (segment,) = audit.trace().segments
    told = claimed(replace(audit.trace(), segments=(replace(segment, noise_multiplier=SIGMA / 0.45),)))
    assert 0.6 * told < audit.delta(tmp_path) <= told
