"""How much an audit can show of a planned run: as much as audits of the mechanism itself do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from dpsweep.accounting import Trace, account
from dpsweep.accounting.audits import random_scores, ranks_epsilon
from dpsweep.workers.noise.gaussian_sources import SeededNoise
from dpsweep.workers.noise.step_noise import make_step_noise
from dpsweep.workers.sampling.samplers import SeededRows
from dpsweep.workers.spec import AuditSpec, Component, NormSpec, TrialSpec
from dpsweep.workers.training.audit_prospects import (
    SIMULATED,
    _stated,
    _trained,
    noise_factor,
    prospect,
    simulated,
)
from dpsweep.workers.training.canary_evidence import CanaryBatches, make_evidence
from dpsweep.workers.training.gradient_canaries import canary_share, times_of
from dpsweep.workers.training.one_run_audit import RANKS, SHARES, audit_gradient_scores
from tests.known import known
from tests.workers.training.test_gradient_canaries import (
    AUDIT,
    FILTER,
    KINDS,
    LAST,
    RESUMED,
    ROWS,
    audited,
    canaries_of,
    poisson,
    scores_of_poisson,
    trainer_of,
    trial,
)
from tests.workers.trial_specs import planned_mechanism


def test_audits_of_the_mechanism_show_as_much_as_was_foreseen() -> None:
    run, audit = poisson(1.0, 20), AuditSpec(400, 0.95, "gradient", "iterates")
    claim = account(run.trace, 1e-5).epsilon
    found = prospect(trial(audit), audit, run.trace, claim, ROWS, 5000)
    generator, shown = np.random.default_rng(3), []
    for seed in range(SIMULATED):
        scores, included = scores_of_poisson(1.0, 0.2, 20, audit, generator)
        shown.append(audit_gradient_scores(scores, included, audit, run, seed).everyone.epsilon)
    assert np.mean(found.shown) == pytest.approx(np.mean(shown), abs=0.1 * claim)
    assert list(found.shown) == sorted(found.shown)
    assert known(found.enough) <= 2000
    assert found.most is None
    assert found.of_canary == pytest.approx(claim)


class EvenLuck:
    """Uniform numbers without luck: evenly spaced."""

    def random(self, size: int, /) -> np.ndarray:
        return (np.arange(size) + 0.5) / size


@pytest.mark.parametrize("sigma", [1.0, 2.0])
def test_pairs_of_simulated_audits_have_neither_good_nor_bad_luck(sigma: float) -> None:
    run, audit = poisson(sigma, 20), AuditSpec(1000, 0.95, "gradient", "iterates")
    claim, spec = account(run.trace, 1e-5).epsilon, trial(AUDIT)
    inside, outside = (
        random_scores(run, np.full(count, joined, np.bool_), EvenLuck())
        for count, joined in ((500, True), (4436, False))
    )
    typical = ranks_epsilon(inside, outside, run, 1.0 - SHARES[RANKS] * 0.05, 0)
    lucky, unlucky = np.array([*simulated(spec, audit, run.trace, 5000)(audit.canaries)]).reshape(-1, 2).T
    assert (lucky + unlucky) / 2.0 == pytest.approx(typical, abs=0.06 * claim)
    assert np.mean(prospect(spec, audit, run.trace, claim, ROWS, 5000).shown) == pytest.approx(
        typical, abs=0.02 * claim
    )


ITERATES = ("poisson", "fixed", "random allocation", "filter", "turns", "banded in turns", "rows of users")


def evidence_of(spec: TrialSpec, trace: Trace, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Evidence of the iterates of a run about canaries, half of which take part, and which ones do."""
    batches, included = CanaryBatches(spec, count, ROWS, SeededRows(seed)), np.arange(count) % 2 == 0
    noise = make_step_noise(trace.strategy, SeededNoise(seed, torch.device("cpu")))
    evidence, length = make_evidence(batches, trace.strategy), times_of(trace) * canary_share(trace)
    multipliers = [segment.noise_multiplier for segment in trace.segments for _ in range(segment.steps)]
    for multiplier in multipliers:
        drawn = batches.next()
        noisy, _ = noise.released({"canaries": torch.from_numpy(drawn * included * length)}, multiplier)
        evidence.see(noisy["canaries"].double().numpy(), drawn, length, multiplier)
    return evidence.total, included


@pytest.mark.parametrize("kind", ITERATES)
def test_iterates_show_as_much_as_was_foreseen(kind: str) -> None:
    """Of the same shares of canaries that take no part, as many that do are found."""
    spec = trial(**{**KINDS, "poisson": (0.0, {})}[kind][1])
    trace = planned_mechanism(spec, ROWS).trace(spec.epochs)
    scores, included = evidence_of(spec, trace, 40_000, 0)
    expected = random_scores(_stated(spec, trace), included, np.random.default_rng(0))
    for rate in (0.01, 0.1, 0.5, 0.9):
        found, foreseen = (
            np.mean(each[included] > np.quantile(each[~included], 1 - rate)) for each in (scores, expected)
        )
        assert found == pytest.approx(foreseen, abs=0.015)


LAST_MODELS: dict[str, dict[str, Any]] = {
    "poisson": {},
    "shuffle": {"method": "shuffle"},
    "banded in turns": {**RESUMED["turns"], "sigma": 1.0},
    "filter": {"clipping": Component("filter", FILTER), "norms": NormSpec(1.0), "sigma": 1.2},
    "adam": {"optimizer": Component("adam")},
}


@pytest.mark.parametrize("kind", LAST_MODELS)
def test_last_models_show_as_much_as_was_foreseen(kind: str, tmp_path: Path) -> None:
    """Simulated scores have the laws of those that a trained model gives."""
    spec = trial(LAST, **LAST_MODELS[kind])
    trainer, trace = trainer_of(spec, tmp_path), planned_mechanism(spec, ROWS).trace(spec.epochs)
    audited(trainer)
    canaries, draw = canaries_of(trainer), _trained(spec, trace)
    found = canaries.scores
    expected = draw(canaries.included, np.random.default_rng(0))
    for part in (canaries.included, ~canaries.included):
        ours, foreseen = found[part] / found.std(), expected[part] / expected.std()
        assert stats.ks_2samp(ours, foreseen).pvalue > 0.001


@pytest.mark.parametrize("method", ["poisson", "fixed"])
def test_canaries_move_the_sum_as_far_as_the_larger_noise_would(method: str, tmp_path: Path) -> None:
    """By the contributions of a real run."""
    spec = trial(method=method)
    trainer, trace = trainer_of(spec, tmp_path), planned_mechanism(spec, ROWS).trace(spec.epochs)
    trainer.begin()
    trainer.step()
    canaries = canaries_of(trainer)
    zeros = {name: torch.zeros_like(value) for name, value in trainer._parameters.items()}
    added = np.zeros(canaries.directions.count)
    for _ in range(trace.steps):
        added += canaries.directions.along(canaries.with_canaries(zeros, trainer._rule, 2))
    parameters = sum(value.numel() for value in zeros.values())
    noise = (2.0 * trainer._rule.sensitivity) ** 2 * trace.steps * parameters
    found = known(noise_factor(spec, AUDIT, trace, parameters))
    more = float((added**2).sum()) / noise
    assert 0.8 * more < found**2 - 1.0 < 1.1 * more, "batches at random add a little"


def test_rows_cost_examples_and_too_many_canaries_do_not_fit() -> None:
    run = poisson(1.0, 20)
    found = prospect(trial(AUDIT), AuditSpec(50), run.trace, 8.0, 250, None)
    assert (found.noise_factor, found.left_out, found.enough) == (1.0, 0.1, None)
    count, shown = known(found.most)
    assert count == 200
    assert np.mean(found.shown) <= shown < 0.3 * 8.0
    assert prospect(trial(AUDIT), AuditSpec(50), run.trace, 8.0, 60, None).most is None


def test_canaries_pay_less_than_a_filter_claims() -> None:
    spec = trial(**KINDS["filter"][1])
    trace = planned_mechanism(spec, ROWS).trace(spec.epochs)
    found = prospect(spec, replace(AUDIT, canaries=100), trace, 3.0, ROWS, None)
    assert 0.7 * 3.0 < found.of_canary == account(_stated(spec, trace).trace, spec.delta).epsilon < 0.9 * 3.0
