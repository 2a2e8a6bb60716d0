"""What trials cost together, and that no deletion makes it less."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.errors import DataCorruption
from dpsweep.accounting.mechanism.reasons import Reason
from dpsweep.accounting.mechanism.samplings import FixedBatchSampling, PoissonSampling, ShuffledSampling
from dpsweep.accounting.mechanism.trace import GaussianRelease, Segment, Trace
from dpsweep.orchestration.comparison.formats import at_most
from dpsweep.orchestration.comparison.ledger import composed, composed_epsilon
from dpsweep.orchestration.pipeline import Outcome, RunRequest, render_again, run_sweep
from dpsweep.orchestration.report.prose import composed_cost
from dpsweep.orchestration.store.attempts import Attempt, AttemptLog, adopt_attempts, read_attempts
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.store.published import PublishedPrivacy, PublishedTrial, TrialState
from dpsweep.orchestration.tracking.tracker import composition_entries
from tests.known import known
from tests.orchestration.sample_grids import in_process, key_in, small, trial_in
from tests.orchestration.tracking.recordings import client_of, runs_of

RUN = Trace(1000, (Segment(0, 200, PoissonSampling(0.05), 1.0),))
EPSILON = account(RUN, 1e-5).epsilon
EPSILON_OF_TWO = account(Trace(1000, (replace(RUN.segments[0], steps=400),)), 1e-5).epsilon


def trial(key: str, *attempts: Attempt) -> PublishedTrial:
    return PublishedTrial(
        key, {}, TrialState.FINISHED, privacy=PublishedPrivacy(EPSILON, 1e-5, "pld"), attempts=attempts
    )


def attempt(key: str = "a", number: int = 1, trace: Trace = RUN, seed: int | None = None) -> Attempt:
    return Attempt(key, number, 1e-5, trace, seed, ended=True)


def test_seeds_together_cost_what_one_run_of_all_their_steps_costs() -> None:
    found = known(composed(trial(key, attempt(key)) for key in "abcd"))
    whole = account(Trace(1000, (replace(RUN.segments[0], steps=800),)), 1e-5)
    assert found.epsilon == pytest.approx(whole.epsilon, rel=1e-3)
    assert (found.trials, found.attempts, known(found.estimate).kind) == (4, 0, "guarantee")


def test_one_trial_costs_what_it_says() -> None:
    assert composed_epsilon(trial("a", attempt())) == EPSILON
    assert composed([PublishedTrial("none", {}, TrialState.FINISHED)]) is None


@pytest.mark.parametrize("number", [1, 3])
def test_groups_pay_for_all_trials_together(number: int) -> None:
    """For each size of which the trials claim an epsilon; it weakens with that of one record."""
    of_two = {1: EPSILON, 2: account(RUN, 1e-5, "pld", 2).epsilon}
    trials = [
        replace(own, privacy=PublishedPrivacy(EPSILON, 1e-5, "pld", group_epsilons=of_two))
        for own in (trial(key, attempt(key)) for key in "abc"[:number])
    ]
    found = known(composed(trials))
    (group,) = found.groups
    whole = account(Trace(1000, (replace(RUN.segments[0], steps=200 * number),)), 1e-5, "pld", 2)
    assert group.estimate is not None
    assert group.estimate.epsilon == pytest.approx(whole.epsilon, rel=1e-3)
    assert (group.group_size, group.estimate.kind) == (2, "guarantee")
    assert found.as_dict()["groups"] == [group.as_dict()]
    metrics, tags = composition_entries(trials)
    assert metrics["privacy/composed_epsilon_group_of_2"] == group.epsilon
    assert (tags["composed_delta"], tags["composed_adjacency"], tags["composed_unit"]) == (
        *("1e-05", "add_remove", "example"),
    )
    assert tags["composed_epsilon_kind_group_of_2"] == "guarantee"
    said = " ".join(composed_cost(trials))
    assert (f"owns at most 2, pay ε = {group.epsilon:#.3g}: a guarantee" in said) == (number > 1), said
    seeded = known(composed([replace(own, attempts=(attempt(own.key, seed=0),)) for own in trials]))
    assert [each.as_dict()["kind"] for each in seeded.groups] == ["estimate"]
    _, tags = composition_entries([replace(own, attempts=(attempt(own.key, seed=0),)) for own in trials])
    assert tags["composed_epsilon_kind_group_of_2"] == "estimate"


@pytest.mark.parametrize("number", [1, 2])
def test_noise_from_known_seeds_guarantees_nothing(number: int) -> None:
    found = known(composed(trial(key, attempt(key, seed=seed)) for seed, key in enumerate("ab"[:number])))
    assert known(found.estimate).kind == "estimate"
    assert found.reasons == ("known_seed",)


def test_one_trial_that_was_stopped_says_why_it_is_an_estimate() -> None:
    privacy = PublishedPrivacy(EPSILON, 1e-5, "pld", "estimate")
    stopped = PublishedTrial("a", {}, TrialState.STOPPED, privacy=privacy, attempts=(replace(attempt(), ended=False),))
    found = known(composed([stopped]))
    assert known(found.estimate).kind == "estimate"
    assert found.reasons == ("end_followed_results",)


def test_trials_that_results_added_guarantee_nothing_together() -> None:
    """One trial of them claims what it would without the others."""
    seeds = [replace(trial(key, attempt(key)), is_added=True) for key in "ab"]
    assert known(composed(seeds)).reasons == ("end_followed_results",)
    assert known(known(composed(seeds[:1])).estimate).kind == "guarantee"


def test_an_earlier_attempt_is_added() -> None:
    anew = trial("a", replace(attempt(), trace=RUN.until(100)), attempt(number=2))
    expected = account(Trace(1000, (replace(RUN.segments[0], steps=300),)), 1e-5).epsilon
    assert composed_epsilon(anew) == pytest.approx(expected, rel=1e-3)


def test_a_trial_that_ended_and_was_trained_again_may_have_been_by_its_results() -> None:
    found = known(composed([trial("a", attempt(), attempt(number=2))]))
    assert (known(found.estimate).kind, found.reasons) == ("estimate", ("end_followed_results",))


@pytest.mark.long
def test_a_release_counts_once_and_releases_of_two_folders_count_twice(tmp_path: Path) -> None:
    """A tuning beside its sweep counts no candidate again; two sweeps with the same candidates count them all."""
    read: list[tuple[Attempt, ...]] = []
    for name in ("one", "other"):
        files = SweepFiles(str(tmp_path / name)).of_tuning
        AttemptLog(files, "c").note(attempt("c"))
        read.append(read_attempts(files, "c"))
    one, other = (replace(trial(key, attempt(key)), candidates=each) for key, each in zip("ab", read, strict=True))
    alone, beside, both = (known(composed(each)) for each in ([one], [one, trial("c", *read[0])], [one, other]))
    assert [each.candidates for each in (alone, beside, both)] == [1, 0, 2]
    assert known(alone.epsilon) == pytest.approx(known(beside.epsilon))
    whole = account(Trace(1000, (replace(RUN.segments[0], steps=800),)), 1e-5)
    assert known(both.epsilon) == pytest.approx(whole.epsilon, rel=1e-3)


def test_a_release_that_another_sweep_took_over_counts_once(tmp_path: Path) -> None:
    """Releases of equal costs that were made apart count each, and so do those of records without a name."""
    first, other = (SweepFiles(str(tmp_path / name)) for name in ("first", "other"))
    log = AttemptLog(first, "a")
    log.note(attempt())
    for _ in range(2):  # as after an interruption
        adopt_attempts(other, "a", read_attempts(first, "a"))

    def together() -> tuple[int, int, float]:
        found = known(composed(trial("a", *read_attempts(files, "a")) for files in (first, other)))
        return found.trials, found.attempts, known(found.epsilon)

    assert together() == (1, 0, EPSILON)
    log.take_up("a", continues=False)
    log.note(attempt())
    assert together()[:2] == (1, 1)
    assert together()[2] == pytest.approx(EPSILON_OF_TWO, rel=1e-3)
    for files in ((first, other), (other, first)):
        retried = known(composed(trial("a", *read_attempts(each, "a")) for each in files))
        assert known(retried.epsilon) == pytest.approx(EPSILON_OF_TWO, rel=1e-3)
        assert (retried.trials, retried.attempts) == (1, 1), "in whatever order the sweeps are named"
        assert "end_followed_results" in retried.reasons
    unnamed = [trial("a", replace(attempt(), folder=folder)) for folder in ("first", "other")]
    assert known(composed(unnamed)).epsilon == pytest.approx(EPSILON_OF_TWO, rel=1e-3)


def test_statistics_that_only_one_of_two_sweeps_released_are_no_start() -> None:
    trained, shown = (
        replace(attempt(), release="trained"),
        replace(attempt(trace=RUN.until(0)), number=2, release="shown"),
    )
    for trials in ([[trained], [trained, shown]], [[trained, shown], [trained]]):
        found = known(composed(trial("a", *each) for each in trials))
        assert found.attempts == 0
        assert "end_followed_results" not in found.reasons


def test_what_is_copied_before_it_ends_and_goes_on_apart_counts_twice(tmp_path: Path) -> None:
    folders = [SweepFiles(str(tmp_path / name)) for name in ("first", "copy")]
    AttemptLog(folders[0], "a").note(replace(attempt(trace=RUN.until(100)), ended=False))
    shutil.copytree(folders[0].root, folders[1].root)
    for files in folders:
        log = AttemptLog(files, "a")
        log.take_up("a", continues=True)
        log.note(attempt())
    found = known(composed(trial("a", *read_attempts(files, "a")) for files in folders))
    assert found.trials == 2
    assert known(found.epsilon) == pytest.approx(EPSILON_OF_TWO, rel=1e-3)


@pytest.mark.parametrize("of_both", [(), ("unaccounted_tuning",)])
def test_a_single_release_is_as_weak_as_its_weakest_claim(of_both: tuple[Reason, ...]) -> None:
    """A sweep that took a trial over may choose by results; the claim of the other one stays as it was."""
    named = replace(attempt(), release="once")
    known_there = PublishedPrivacy(EPSILON, 1e-5, "pld", "estimate" if of_both else "guarantee", reasons=of_both)
    found = known(composed([trial("a", named), replace(trial("a", named), privacy=known_there)]))
    assert (found.trials, known(found.estimate).kind) == (1, known_there.kind)
    assert {*of_both} <= {*found.reasons}


def test_every_process_computes_the_same_bits() -> None:
    """Hashes of strings differ between processes, and with them the order of sets."""
    code = (
        "from dpsweep.accounting import PoissonSampling, Segment, Trace\n"
        "from dpsweep.orchestration.comparison.ledger import composed\n"
        "from dpsweep.orchestration.store.attempts import Attempt\n"
        "from dpsweep.orchestration.store.published import PublishedPrivacy, PublishedTrial\n"
        "from dpsweep.orchestration.store.published import TrialState\n"
        "levels = (0.9, 1.1, 1.3, 1.7)\n"
        "runs = {level: Trace(1000, (Segment(0, 200, PoissonSampling(0.05), level),)) for level in levels}\n"
        "attempts = {str(level): Attempt(str(level), 1, 1e-5, run, None, ended=True) for level, run in runs.items()}\n"
        "privacy = PublishedPrivacy(1.0, 1e-5, 'pld')\n"
        "trials = [PublishedTrial(key, {}, TrialState.FINISHED, privacy=privacy, attempts=(attempt,)) "
        "for key, attempt in attempts.items()]\n"
        "print(composed(trials).epsilon)"
    )
    printed = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True).stdout
        for env in ({**os.environ, "PYTHONHASHSEED": seed} for seed in "12")
    }
    assert len(printed) == 1


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (attempt("b", seed=0), "repeated_seed"),
        (replace(attempt("b"), ended=False), "end_followed_results"),
        (attempt("b", trace=replace(RUN, noise_follows_results=True)), "noise_followed_results"),
        (replace(attempt("b"), reasons=("classes_from_rows",)), "classes_from_rows"),
    ],
)
def test_what_no_theorem_covers_is_an_estimate(other: Attempt, reason: str) -> None:
    found = known(composed([trial("a", attempt(seed=0)), trial("b", other)]))
    assert known(found.estimate).kind == "estimate"
    assert found.reasons == ("known_seed", reason) if reason == "repeated_seed" else reason in found.reasons


def test_runs_without_a_common_adjacency_have_no_number() -> None:
    fixed = Trace(1000, (Segment(0, 10, FixedBatchSampling(1000, 50), 1.0),))
    shuffled = Trace(1000, (Segment(0, 10, ShuffledSampling(10), 8.0),), adjacency="zero_out")
    found = known(composed([trial("a", attempt(trace=fixed)), trial("b", attempt("b", trace=shuffled))]))
    assert found.epsilon is None
    assert "share no adjacency" in found.refusal


def test_released_statistics_add_up() -> None:
    once = Trace(1000, releases=(GaussianRelease("mean", 20.0),))
    found = known(composed(trial(key, replace(attempt(key), statistics=once)) for key in "abcd"))
    assert found.release_epsilon == pytest.approx(
        account(Trace(1000, releases=(GaussianRelease("m", 10.0),)), 1e-5).epsilon
    )


def test_the_log_only_grows(tmp_path: Path) -> None:
    files = SweepFiles(str(tmp_path))
    log = AttemptLog(files, ["a"])
    log.take_up("a", continues=False)
    log.note(replace(attempt(), trace=RUN.until(100), ended=False))
    log.note(replace(attempt(), trace=RUN.until(50), ended=False))
    assert [each.trace.steps for each in read_attempts(files, "a")] == [100], "a replay shows nothing new"
    log.note(replace(attempt(), trace=RUN.until(50), ended=True))
    assert [each.trace.steps for each in read_attempts(files, "a")] == [100], "an end before what was shown is not one"
    log.note(replace(attempt(), trace=RUN.until(100), ended=False, statistics=RUN.until(1)))
    assert log.has_released_statistics("a"), "a stopped trial releases statistics after its last step"
    log = AttemptLog(files, ["a"])
    log.take_up("a", continues=True)
    log.note(attempt())
    assert [(each.number, each.trace.steps, each.ended) for each in read_attempts(files, "a")] == [(1, 200, True)]
    log.take_up("a", continues=False)
    log.note(replace(attempt(), trace=RUN.until(10), ended=False))
    assert [(each.number, each.trace.steps) for each in read_attempts(files, "a")] == [(1, 200), (2, 10)]
    Path(files.attempts("a"), "000001.json").unlink()
    with pytest.raises(DataCorruption, match=r"holds '000002.json' in place of 000001.json"):
        read_attempts(files, "a")
    Path(files.attempts("a"), "\x1b]0;title\nerror: none").write_text("{}")
    with pytest.raises(DataCorruption, match=r"holds '\\x1b\]0;title\\nerror: none' in place"):
        read_attempts(files, "a")


def request(folder: Path, **changes: object) -> RunRequest:
    text = small(clipping=[{"name": "flat", "bound": 1.0}], noise="constant", noise_source="os_entropy", **changes)
    return in_process(text, folder / "out", None)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run_sweep(request(tmp_path_factory.mktemp("sweep"), release="private"))


@pytest.mark.long
def test_averages_and_headline_carry_what_their_trials_cost_together(outcome: Outcome) -> None:
    rows = json.loads(Path(outcome.files.results).read_text())
    composed_here = rows[0]["composed"]["seeds"]["epsilon"]
    assert composed_here > 1.3 * rows[0]["epsilon"]
    assert rows[0]["composed"]["seeds"]["kind"] == "guarantee"
    assert rows[0]["composed"]["sweep"]["release_epsilon"] > 1.3 * rows[0]["release_epsilon"]
    runs = {run.data.tags["dpsweep.kind"]: run for run in runs_of(client_of(Path(outcome.files.root)))}
    for kind in ("average", "sweep"):
        metrics, tags = runs[kind].data.metrics, runs[kind].data.tags
        assert metrics["privacy/composed_epsilon"] == pytest.approx(composed_here)
        assert metrics["privacy/composed_release_epsilon"] > 1.3 * rows[0]["release_epsilon"]
        assert tags["composed_epsilon_kind"] == "guarantee"
        assert tags["epsilon_kind"] != "guarantee", "a mean of epsilons bounds nothing"
    page = Path(outcome.files.report).read_text()
    assert f"All 2 private trials together cost ε\xa0=\xa0{at_most(composed_here)} at δ" in page


@pytest.mark.long
def test_a_deleted_trial_that_runs_again_is_counted_twice(outcome: Outcome, tmp_path: Path) -> None:
    shutil.copytree(outcome.files.root, tmp_path / "out")
    files = SweepFiles(str(tmp_path / "out"))
    shutil.rmtree(trial_in(files.root, "flat-seed0").root)
    again = run_sweep(request(tmp_path, release="private"))
    row = next(
        row for row in json.loads(Path(files.results).read_text()) if row["key"] == key_in(files.root, "flat-seed0")
    )
    assert row["epsilon"] == pytest.approx(5.0, rel=1e-2)
    assert row["composed_epsilon"] > 1.3 * row["epsilon"]
    assert row["composed"]["trial"]["attempts"] == 1
    assert row["composed"]["sweep"]["epsilon"] > row["composed"]["seeds"]["epsilon"] * 0.999 > row["composed_epsilon"]
    assert "1 earlier start of them included" in Path(again.files.report).read_text()
    assert json.loads(Path(render_again(files.root).files.results).read_text()) == json.loads(
        Path(files.results).read_text()
    )


def test_statistics_that_are_drawn_again_are_counted_again(outcome: Outcome, tmp_path: Path) -> None:
    shutil.copytree(outcome.files.root, tmp_path / "out")
    files = SweepFiles(str(tmp_path / "out"))
    before = json.loads(Path(files.results).read_text())[0]
    Path(trial_in(files.root, "flat-seed0").released).unlink()
    Path(trial_in(files.root, "flat-seed0").result).unlink()
    run_sweep(request(tmp_path, release="private"))
    after = json.loads(Path(files.results).read_text())[0]
    assert after["composed"]["trial"]["release_epsilon"] > 1.3 * before["composed"]["trial"]["release_epsilon"]
    assert after["composed_epsilon"] > before["composed_epsilon"]


def test_a_folder_without_a_log_is_still_added_up(outcome: Outcome, tmp_path: Path) -> None:
    shutil.copytree(outcome.files.root, tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "attempts")
    before = json.loads(Path(outcome.files.results).read_text())[0]["composed"]["sweep"]["epsilon"]
    found = known(composed(render_again(str(tmp_path / "out")).record.data().trials))
    assert found.epsilon == pytest.approx(before)
    assert math.isfinite(before)
