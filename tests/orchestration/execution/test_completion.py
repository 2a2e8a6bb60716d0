"""What a completed trial costs, also when its noise followed results, and how good its estimates are."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from dpsweep.accounting import account, attack_risk, privacy_curve
from dpsweep.accounting.mechanism.reasons import weakened
from dpsweep.accounting.mechanism.samplings import PoissonSampling
from dpsweep.accounting.mechanism.trace import Segment, SideQuery, Trace
from dpsweep.accounting.records.traces import read_trace
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.orchestration.execution.completion import (
    Times,
    bounding_trace,
    complete_trial,
    costs,
    quality_of_estimates,
)
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.store.published import EstimateQuality
from dpsweep.orchestration.store.results import Costs, TrialResult, all_weakened, read_result
from dpsweep.orchestration.sweeps.plan import plan_sweep
from dpsweep.orchestration.sweeps.planned import PlannedTrial
from dpsweep.orchestration.sweeps.schema import SweepSpec, parse_sweep
from dpsweep.workers.trials.trial import run_trial
from tests.accounting.stored_trial import account_trial, job_of
from tests.orchestration.sample_grids import small

FOLLOWING = {"name": "validation", "factor": 0.5, "period": 1, "threshold": -2.0}
"""The noise would halve after any epoch whose accuracy did not improve by more than -2: it never does."""


def completed(folder: Path, factor: float = 1.0, **changes: object) -> tuple[PlannedTrial, Trace, TrialResult]:
    """Run a trial, and complete it as if its plan had ``factor`` times the noise."""
    settings = {"clipping": {"name": "flat", "bound": 1.0}, "noise": FOLLOWING, "seeds": 0}
    data = {"name": "digits", "keep": {8: 0.1}, "public_fraction": 0.1}
    sweep = parse_sweep(small(**{"data": data, **settings, **changes}))
    (planned,) = plan_sweep(sweep).trials
    files = SweepFiles(str(folder)).trial(planned.spec.key)
    run_trial(planned.spec, files.root, releases=planned.releases)
    steps = (replace(each, noise_multiplier=factor * each.noise_multiplier) for each in planned.trace.segments)
    planned = replace(planned, trace=replace(planned.trace, segments=tuple(steps)))
    result = complete_trial(planned, files, sweep, Times(0.0, 1.0))
    return planned, read_trace(files.trace), result


def test_noise_that_followed_results_costs_what_was_planned(tmp_path: Path) -> None:
    planned, trace, result = completed(tmp_path, epochs=3)
    assert {segment.noise_multiplier for segment in trace.segments} == {planned.spec.noise.initial_noise_multiplier}
    assert len(planned.trace.segments) == 3
    assert result.worst_case == planned.worst_case
    assert result.worst_case.reasons == ("known_seed",), "not that noise followed results"
    assert result.worst_case.epsilon == pytest.approx(5.0, rel=1e-3)
    assert result.risks[0] == weakened(attack_risk(privacy_curve(planned.trace)), ("known_seed",))
    stored = read_result(SweepFiles(str(tmp_path)).trial(planned.spec.key).result)
    assert isinstance(stored, TrialResult)
    assert stored.risks == result.risks


def test_a_run_longer_than_its_plan_is_an_estimate(tmp_path: Path) -> None:
    privacy = {"noise_multiplier": 4.0, "delta": 1e-5, "budget": {"rho": 0.2}}
    planned, trace, result = completed(
        tmp_path, epochs=4, privacy=privacy, sampling={"method": "shuffle", "batch_size": 128}
    )
    assert trace.steps > planned.trace.steps
    assert result.worst_case.kind == "estimate"
    assert {risk.kind for risk in result.risks} == {"estimate"}
    assert result.worst_case.epsilon > 0.0


def test_a_run_with_less_noise_than_planned_is_an_estimate(tmp_path: Path) -> None:
    planned, trace, result = completed(tmp_path, 2.0, epochs=1, noise="constant")
    assert result.worst_case.reasons == ("known_seed", "noise_followed_results")
    assert {risk.reasons for risk in result.risks} == {result.worst_case.reasons}
    assert result.worst_case.epsilon == account(trace, planned.spec.delta, result.worst_case.accountant).epsilon


PLAN = Trace(100, (Segment(0, 4, PoissonSampling(0.1), 2.0), Segment(4, 4, PoissonSampling(0.1), 1.0)))


def test_the_plan_bounds_only_what_it_dominates() -> None:
    noisier = replace(PLAN, segments=(Segment(0, 8, PoissonSampling(0.1), 2.0),))
    assert bounding_trace(PLAN, PLAN) == PLAN
    assert bounding_trace(PLAN.until(5), PLAN) == PLAN.until(5)
    assert bounding_trace(noisier, PLAN) == PLAN
    assert bounding_trace(replace(noisier, contributions="guarantee"), PLAN) == replace(PLAN, contributions="guarantee")
    asking = Segment(0, 8, PoissonSampling(0.1), 2.0, (SideQuery("counts", 1.0),))
    for segments in (
        (Segment(0, 8, PoissonSampling(0.1), 1.5),),
        (Segment(0, 8, PoissonSampling(0.2), 2.0),),
        (Segment(0, 9, PoissonSampling(0.1), 2.0),),
        (asking,),
    ):
        assert bounding_trace(replace(PLAN, segments=segments), PLAN) is None
    assert bounding_trace(replace(noisier, adjacency="zero_out"), PLAN) is None


def test_noise_that_decays_to_nothing_ends_in_an_infinite_epsilon(tmp_path: Path) -> None:
    """Also a schedule that starts with noise may reach multipliers that count as none."""
    privacy = {"noise_multiplier": 1.0, "delta": 1e-5}
    _, trace, result = completed(tmp_path, epochs=3, noise={"name": "exponential", "decay": 20.0}, privacy=privacy)
    assert trace.segments[-1].noise_multiplier == 0.0
    assert result.worst_case.epsilon == math.inf
    assert result.individuals is None


ACCOUNTING = {"group_sizes": [1, 2, 3], "also": ["pld", "rdp-classic"]}


@pytest.fixture(scope="module")
def sweep() -> SweepSpec:
    return parse_sweep(small(clipping="flat", noise="constant", seeds=0, accounting=ACCOUNTING))


@pytest.fixture(scope="module")
def planned(sweep: SweepSpec) -> PlannedTrial:
    (trial,) = plan_sweep(sweep).trials
    return trial


@pytest.fixture(scope="module")
def found(planned: PlannedTrial, sweep: SweepSpec) -> Costs:
    return costs(planned.trace, planned.spec.delta, sweep)


def test_groups_are_accounted_by_privacy_loss_distributions(planned: PlannedTrial, found: Costs) -> None:
    """What one example costs, times their size, is less than they pay."""
    assert found.groups == (found.worst_case, *(account(planned.trace, 1e-5, "pld", size) for size in (2, 3)))
    assert found.groups[1].epsilon > 2.05 * account(planned.trace, 1e-5, "pld").epsilon


def test_attacks_are_bounded_for_one_record_and_every_group(planned: PlannedTrial, found: Costs) -> None:
    assert found.risks == tuple(attack_risk(privacy_curve(planned.trace, size)) for size in (1, 2, 3))


def test_a_run_of_the_planned_trace_costs_what_is_planned(planned: PlannedTrial, found: Costs) -> None:
    claimed = all_weakened(found, planned.reasons)
    assert (claimed.worst_case, *claimed.others) == (planned.worst_case, *planned.others)


def test_estimates_have_the_same_numbers(found: Costs) -> None:
    weaker = all_weakened(found, ("known_seed", "noise_followed_results"))
    kinds = [claim.kind for claim in (weaker.worst_case, *weaker.others, *weaker.groups)]
    assert {*kinds, *(risk.kind for risk in weaker.risks)} == {"estimate"}
    reasons = {*(other.reasons for other in weaker.others), *(risk.reasons for risk in weaker.risks)}
    assert reasons == {("known_seed", "noise_followed_results")}
    assert [each.epsilon for each in weaker.groups] == [each.epsilon for each in found.groups]


WORST = 1e9


def quality(folder: Path, **norms: object) -> EstimateQuality:
    """A short run with the given norms, judged by 40 examples tracked exactly."""
    sweep = parse_sweep(
        small(
            clipping={"name": "flat", "bound": 4.0},
            noise="constant",
            seeds=0,
            epochs=4,
            privacy={"noise_multiplier": 1.0, "delta": 1e-5, "accountant": "rdp"},
            norms={"exact_examples": 40, **norms},
        )
    )
    spec = plan_sweep(sweep).trials[0].spec
    files = TrialFiles(str(folder))
    run_trial(spec, files.root)
    epsilons = account_trial(job_of(files.root, spec.delta, "rdp"))
    shuffled = replace(epsilons, example_ids=epsilons.example_ids[::-1], upper=epsilons.upper[::-1])
    found = quality_of_estimates(files, [shuffled], read_trace(files.trace), WORST)
    assert found == quality_of_estimates(files, [epsilons], read_trace(files.trace), WORST)
    return found


@pytest.mark.long
def test_norms_of_every_step_leave_nothing_to_estimate_and_those_of_every_epoch_little(tmp_path: Path) -> None:
    exact = quality(tmp_path / "step", refreshes_per_epoch="every_step")
    assert exact.examples == 40
    assert exact.correlation == pytest.approx(1.0, abs=1e-9)
    assert exact.largest_error == pytest.approx(0.0, abs=1e-9)
    estimated = quality(tmp_path / "epoch", refreshes_per_epoch=1)
    assert estimated.correlation is not None
    assert 0.5 < estimated.correlation < 1.0
    assert 0.0 < estimated.mean_error < estimated.largest_error
