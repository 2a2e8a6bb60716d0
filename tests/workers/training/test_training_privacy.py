"""What the trace of a run says, and where schedules and budgets end it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.accountants.methods import total_rho
from dpsweep.accounting.mechanism.samplings import PoissonSampling
from dpsweep.accounting.mechanism.schedules import make_schedule, planned_trace
from dpsweep.accounting.mechanism.trace import GaussianRelease
from dpsweep.accounting.records.files import read_bytes
from dpsweep.workers import clipping
from dpsweep.workers.sampling.samplers import planned_sampling
from dpsweep.workers.spec import BudgetSpec, Component, NoiseSpec, NormSpec, SamplingSpec
from dpsweep.workers.training.trial_mechanism import affordable_epochs
from tests.workers.trial_runs import TRAIN_SIZE, norms_of, train
from tests.workers.trial_specs import planned_mechanism, small_trial


@pytest.mark.thinned(3)
@pytest.mark.parametrize("method", ["poisson", "fixed", "shuffle"])
@pytest.mark.parametrize("clip", ["flat", "dpsgd_f", "quantile"])
def test_the_trace_is_the_planned_one(method: str, clip: str, tmp_path: Path) -> None:
    component = Component(clip, {"bound": {"median_multiple": 1.0}})
    schedule = Component("exponential", {"decay": 0.3})
    releases = (GaussianRelease("statistics", 9.0),)
    spec = small_trial(
        sampling=SamplingSpec(method, 24),
        clipping=component,
        noise=NoiseSpec(2.0, schedule),
    )
    _, trace, _ = train(spec, tmp_path, releases=releases)
    sampling = planned_sampling(spec.sampling, TRAIN_SIZE)
    assert trace == planned_trace(
        make_schedule("exponential", 2.0, decay=0.3),
        sampling,
        spec.epochs,
        sampling.steps_per_epoch,
        TRAIN_SIZE,
        clipping.make_clipping(component).side_queries,
        (*clipping.make_clipping(component).releases, *releases),
    )


def test_validation_schedule_reads_public_accuracy_only(tmp_path: Path) -> None:
    schedule = Component("validation", {"factor": 0.5, "period": 1, "threshold": 0.02})
    result, trace, _ = train(small_trial(epochs=6, noise=NoiseSpec(4.0, schedule)), tmp_path)
    public = [record.public.main for record in result.history if record.public is not None]
    expected = make_schedule("validation", 4.0, **schedule.params)
    sigmas = [expected.noise_multiplier(epoch, public[:epoch]) for epoch in range(6)]
    assert [record.noise_multiplier for record in result.history] == sigmas
    assert sigmas[-1] < sigmas[0]
    spent = [s.noise_multiplier for s in trace.segments for _ in range(s.steps // result.steps_per_epoch)]
    assert spent == sigmas


def test_median_bound_is_released_and_in_the_trace(tmp_path: Path) -> None:
    bound = {"median_multiple": 2.0, "noise_multiplier": 0.5}
    spec = small_trial(clipping=Component("flat", {"bound": bound}))
    result, trace, files = train(spec, tmp_path)
    assert trace.releases == (GaussianRelease("median norm at initialisation", 0.5),)
    median = float(np.median(norms_of(files).norms[:, 0]))
    assert result.initial_bound == pytest.approx(2.0 * median, rel=0.3)
    assert result.history[-1].bounds == {"all": result.initial_bound}


def test_a_validation_schedule_uses_up_what_it_did_not_have_to_spend(tmp_path: Path) -> None:
    """Before training its plan assumes the lowest noise; the budget is asked again with the accuracies seen."""
    schedule = Component("validation", {"factor": 0.5, "period": 2, "threshold": 0.0})
    budget = BudgetSpec(rho=0.5)
    spec = small_trial(epochs=40, sampling=SamplingSpec("shuffle", 25), noise=NoiseSpec(8.0, schedule), budget=budget)
    planned = affordable_epochs(spec, planned_mechanism(spec, TRAIN_SIZE), ())
    result, trace, _ = train(spec, tmp_path)
    assert result.stopped == "budget"
    assert result.epochs > planned > 0
    assert total_rho(trace) <= 0.5


def test_an_epsilon_budget_ends_training_before_it_is_passed(tmp_path: Path) -> None:
    spec = small_trial(epochs=30, noise=NoiseSpec(2.0), budget=BudgetSpec(epsilon=3.0))
    result, trace, _ = train(spec, tmp_path)
    assert result.stopped == "budget"
    assert account(trace, spec.delta).epsilon <= 3.0
    assert account(planned_mechanism(spec, TRAIN_SIZE).trace(result.epochs + 1), spec.delta).epsilon > 3.0


@pytest.mark.parametrize(("covers", "epochs"), [("everything", 3), ("training", 4)])
def test_a_budget_of_training_leaves_releases_out_and_the_trace_has_them(
    covers: Literal["everything", "training"], epochs: int, tmp_path: Path
) -> None:
    """Each shuffled epoch costs rho 1 / (2 * 2^2) and the DP-PCA 1 / (2 * 16^2)."""
    spec = small_trial(
        epochs=10,
        sampling=SamplingSpec("shuffle", 36),
        noise=NoiseSpec(2.0),
        preprocessing=Component("dp_pca", {"dimensions": 8, "noise_multiplier": 16.0}),
        budget=BudgetSpec(rho=0.5, covers=covers),
    )
    result, trace, _ = train(spec, tmp_path)
    assert (result.epochs, result.stopped) == (epochs, "budget")
    assert total_rho(trace) == pytest.approx(epochs / 8 + 1 / 512, rel=1e-12)
    rho = epochs / 8 + 1 / 512
    assert account(trace, 1e-5, "zcdp").epsilon == pytest.approx(rho + 2.0 * math.sqrt(rho * math.log(1e5)), rel=1e-9)


def test_a_full_batch_is_the_number_of_training_examples(tmp_path: Path) -> None:
    """The same mechanism and the same bits as with the number written out."""
    named, counted = (
        train(small_trial(epochs=3, sampling=SamplingSpec("poisson", size)), tmp_path / str(size))
        for size in ("full", TRAIN_SIZE)
    )
    assert named[1] == counted[1]
    assert (named[1].segments[0].sampling, named[0].steps) == (PoissonSampling(1.0), 3)
    assert named[0].history == counted[0].history
    assert read_bytes(named[2].model) == read_bytes(counted[2].model)


def test_non_private_training_says_so(tmp_path: Path) -> None:
    result, trace, files = train(small_trial(clipping=Component("none"), noise=NoiseSpec(0.0)), tmp_path)
    assert not trace.is_private
    assert account(trace, 1e-5).epsilon == math.inf
    assert result.initial_bound is None
    assert result.history[-1].sensitivity is None
    assert (norms_of(files).contributions == 1.0).all()


def test_contributions_under_noise_that_reacted_are_estimates() -> None:
    reacting = NoiseSpec(2.0, Component("validation", {"factor": 0.5, "period": 1}))
    mechanism = planned_mechanism(small_trial(noise=reacting, norms=NormSpec("every_step")), 90)
    assert mechanism.trace(3).contributions == "output_specific"
    reacted = mechanism.trace(3, (0.5, 0.9, 0.95))
    assert (reacted.contributions, reacted.noise_follows_results) == ("estimate", True)
