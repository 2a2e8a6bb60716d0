"""Completion, unit by unit: what a trial discloses under each mode, at which delta, and that it is drawn once."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.individual.epsilons import IndividualEpsilons, individual_epsilons
from dpsweep.accounting.jobs.examples import Scatter, account_in_process
from dpsweep.accounting.jobs.release import ReleaseSpec
from dpsweep.accounting.mechanism.trace import Trace
from dpsweep.accounting.records.epsilon_files import read_epsilons
from dpsweep.accounting.records.traces import read_trace
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.orchestration.execution.completion import Times, complete_stopped, complete_trial, epsilon_so_far
from dpsweep.orchestration.store.published import IndividualStatistics
from dpsweep.orchestration.store.results import TrialResult, read_exact_statistics
from dpsweep.orchestration.sweeps.plan import plan_sweep
from dpsweep.orchestration.sweeps.planned import PlannedTrial
from dpsweep.orchestration.sweeps.schema import SweepSpec, parse_sweep
from dpsweep.workers.evaluation.attack_results import read_attacks
from dpsweep.workers.training.counters import read_counters
from dpsweep.workers.training.history import Progress
from dpsweep.workers.trials.trial import run_trial
from tests.known import known as present
from tests.orchestration.sample_grids import small

DELTA = 1e-4
"""Not the usual one."""
NOISE = {"histogram_noise_multiplier": 4.0, "group_count_noise_multiplier": 3.0, "group_sum_noise_multiplier": 2.0}
FAR = 7.0
"""Standard errors: a normal draw is further away with probability 2.6e-12."""


@dataclass(frozen=True)
class Trained:
    """A trial that has trained, and the sweep that asked for it."""

    sweep: SweepSpec
    planned: PlannedTrial
    files: TrialFiles

    def completed(self, scatter: Scatter = account_in_process) -> TrialResult:
        return complete_trial(self.planned, self.files, self.sweep, Times(10.0, 250.0), scatter)

    @property
    def exact(self) -> IndividualStatistics:
        """The exact statistics, which are private."""
        return present(read_exact_statistics(self.files.private_summary, ""))


def asked(**changes: object) -> SweepSpec:
    privacy = {"noise_multiplier": 1.0, "delta": DELTA, "accountant": "rdp"}
    clipping = {"name": "flat", "bound": 6.0}
    settings = {"clipping": clipping, "noise": "constant", "seeds": 0, "privacy": privacy}
    return parse_sweep(small(**{**settings, "attacks": {"loss_threshold": True}, **changes}))


def trained(folder: Path, **changes: object) -> Trained:
    sweep = asked(**changes)
    (planned,) = plan_sweep(sweep).trials
    files = TrialFiles(str(folder))
    run_trial(planned.spec, files.root, releases=planned.releases)
    return Trained(sweep, planned, files)


@pytest.fixture(scope="module")
def default(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Of a sweep that does not mention `release`."""
    return trained(tmp_path_factory.mktemp("default"))


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return trained(tmp_path_factory.mktemp("released"), release={"name": "private", **NOISE})


def as_mode(trial: Trained, mode: str) -> Trained:
    """The same training under another mode without mechanisms of its own."""
    return replace(trial, sweep=asked(release=mode))


def test_the_default_mode_discloses_nothing_of_training_examples(default: Trained) -> None:
    result = default.completed()
    assert default.sweep.disclosure == "none"
    assert result.individuals is None
    assert result.attacks.loss_threshold == ()
    assert not result.counters.courses
    assert read_attacks(default.files.attacks).loss_threshold, "both are there, in private"
    stored = Path(default.files.result).read_text()
    assert repr(present(default.exact.mean)) not in stored
    assert "threshold" not in stored.replace("loss_threshold", "")


def test_the_raw_mode_discloses_what_is_exact(default: Trained) -> None:
    raw = as_mode(default, "raw")
    result = raw.completed()
    assert result.individuals == raw.exact
    assert result.attacks == read_attacks(raw.files.attacks)
    assert result.counters == read_counters(raw.files.private_training)
    assert result.counters.courses
    assert result.attacks.loss_threshold


def test_under_a_filter_no_estimate_is_compared_with_tracked_examples(tmp_path: Path) -> None:
    """It enforces the epsilons, which are all alike."""
    filtered = trained(tmp_path, clipping={"name": "filter", "bound": 6.0, "epsilon": 9.0}, norms={"exact_examples": 5})
    filtered.completed()
    assert (filtered.exact.method, filtered.exact.estimates) == ("filter", None)


def test_examples_are_accounted_at_the_delta_of_the_trial(default: Trained) -> None:
    result = default.completed()
    assert read_epsilons(default.files.epsilons).delta == result.worst_case.delta == DELTA


def test_each_epoch_shows_what_its_steps_cost(default: Trained) -> None:
    """By the accountant of this sweep: the last epoch costs the whole."""
    result = default.completed()
    trace = read_trace(default.files.trace)
    spent = [account(trace.until(record.step), DELTA, "rdp").epsilon for record in result.training.history]
    assert result.epsilons == tuple(spent)
    assert result.epsilons[-1] == result.worst_case.epsilon
    assert epsilon_so_far(default.planned, trace.until(5)) == account(trace.until(5), DELTA, "rdp").epsilon
    assert (result.started, result.ended) == (10.0, 250.0)


def test_what_is_released_is_in_the_trace_and_costs_what_it_says(released: Trained) -> None:
    result = released.completed()
    assert read_trace(released.files.trace).releases == ReleaseSpec(**NOISE).releases()  # type: ignore[arg-type]  # floats
    size = result.training.train_size
    alone = account(Trace(size, releases=ReleaseSpec(**NOISE).releases()), DELTA).epsilon  # type: ignore[arg-type]  # floats
    assert present(result.individuals).release_epsilon == alone
    assert result.worst_case.epsilon > alone


def test_the_bound_of_a_release_is_public(released: Trained) -> None:
    """The planned worst case, and no maximum over the data."""
    individuals = present(released.completed().individuals)
    assert present(individuals.histogram).edges[-1] == released.planned.worst_case.epsilon


def test_what_is_released_are_the_upper_bounds_with_the_stated_noise(
    released: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though lower bounds are 0 here. Each number is wrong with probability 2.6e-12."""

    def without_lower(*given: Any) -> IndividualEpsilons:
        found = individual_epsilons(*given)
        return replace(found, lower=np.zeros_like(found.upper))

    monkeypatch.setattr("dpsweep.accounting.jobs.examples.individual_epsilons", without_lower)
    Path(released.files.released).unlink(missing_ok=True)
    individuals, exact = present(released.completed().individuals), released.exact
    assert individuals.disclosure == "private"
    assert individuals.kind == "estimate"
    assert exact.histogram is not None
    common = {group.name: group for group in exact.groups if group.name != "8"}
    for group in individuals.groups:
        if group.name in common:
            known = common[group.name]
            assert abs(present(group.examples) - present(known.examples)) < FAR * 3.0
            assert abs(group.mean - known.mean) < 1.2 * FAR * present(group.standard_error)
    assert present(individuals.mean) > 0.5 * present(exact.mean), "a hundred standard errors from 0"
    assert individuals != exact


def test_statistics_are_drawn_once_however_often_a_trial_is_completed(released: Trained) -> None:
    first = released.completed().individuals
    stored = Path(released.files.released).read_bytes()
    assert released.completed().individuals == first
    assert Path(released.files.released).read_bytes() == stored
    Path(released.files.released).unlink()
    assert released.completed().individuals != first, "another draw would show"


class Stopped(Exception):
    """By the scheduler."""


def test_a_stopped_trial_costs_what_it_ran(default: Trained, tmp_path: Path) -> None:
    files, seen = TrialFiles(str(tmp_path)), list[Progress]()

    def stop(progress: Progress) -> None:
        seen.append(progress)
        raise Stopped

    with pytest.raises(Stopped):
        run_trial(default.planned.spec, files.root, on_progress=stop)
    assert Path(files.checkpoint).is_file()
    result = complete_stopped(default.planned, files, default.sweep, Times(0.0, 1.0), seen[0], ())
    assert Path(files.checkpoint).is_file(), "its last norms are still to be stored"
    assert result.worst_case.epsilon == account(seen[0].trace, DELTA, "rdp").epsilon
    assert result.worst_case.kind == "estimate", "results decided how many steps there are"
    assert {each.kind for each in (*result.others, *result.groups)} == {"estimate"}
    assert {risk.kind for risk in result.risks} == {"estimate"}
    dearer = replace(seen[0].trace, segments=tuple(replace(s, noise_multiplier=0.5) for s in seen[0].trace.segments))
    found = complete_stopped(default.planned, files, default.sweep, Times(0.0, 1.0), replace(seen[0], trace=dearer), ())
    assert found.worst_case.kind == "estimate", "less noise than planned, which no plan bounds"
    assert found.worst_case.epsilon == account(dearer, DELTA, "rdp").epsilon
    assert 0.0 < result.worst_case.epsilon < default.planned.worst_case.epsilon < math.inf
