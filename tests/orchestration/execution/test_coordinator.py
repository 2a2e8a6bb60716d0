"""The coordinator in one process: what becomes of trials that finish, fail, stop, or were there before."""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dpsweep.accounting.errors import StorageError
from dpsweep.accounting.jobs.examples import Part, PartwiseJob, Result, Scatter, account_in_process
from dpsweep.accounting.jobs.parallel import AccountingFailed
from dpsweep.accounting.records.epsilon_files import read_epsilons
from dpsweep.accounting.records.files import exists
from dpsweep.accounting.records.traces import read_trace
from dpsweep.orchestration.comparison.record import SweepRecord
from dpsweep.orchestration.execution.backend import TrialContext
from dpsweep.orchestration.execution.coordinator import Coordinator, initial_status
from dpsweep.orchestration.execution.in_process import InProcess
from dpsweep.orchestration.execution.publication import Publish, Published, empty_pages, published, publisher
from dpsweep.orchestration.store.attempts import read_attempts
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.store.published import PublishedSweep, PublishedTrial, TrialState
from dpsweep.orchestration.store.results import StoppedTrial, TrialResult, read_result
from dpsweep.orchestration.store.status import SweepStatus
from dpsweep.orchestration.sweeps.manifest import new_manifest, write_manifest
from dpsweep.orchestration.sweeps.plan import plan_sweep
from dpsweep.orchestration.sweeps.planned import Plan, PlannedTrial
from dpsweep.orchestration.sweeps.schema import SweepSpec, parse_sweep
from dpsweep.orchestration.tracking.plain_comparison import TrackedComparison
from dpsweep.orchestration.tracking.tracker import RunStatus, TrackedSweep
from dpsweep.workers.own_code.imports import NO_CODE
from dpsweep.workers.training.history import Progress
from dpsweep.workers.trials.trial import run_trial
from tests.known import known
from tests.orchestration.invoking import printed
from tests.orchestration.sample_grids import keys_of, small

TEXT = small(clipping=["none", {"name": "flat", "bound": 1.0}], noise="constant", seeds=[0, 1])
SWEEP = parse_sweep(TEXT)
KEYS = tuple(keys_of(TEXT).values())
FIRST, SECOND = (keys_of(TEXT)[name] for name in ("flat-seed0", "flat-seed1"))


class KeptTracker:
    """A tracker that keeps in memory what it was told last."""

    answered = 0

    def __init__(self) -> None:
        self.in_flight = 1
        self.trials: dict[str, PublishedTrial] = {}
        self.reports: list[PublishedSweep] = []
        self.closed: list[RunStatus] = []
        self.comparisons: list[tuple[TrackedComparison, tuple[str, ...]]] = []

    def address(self, sweep_id: str) -> str:
        return ""

    def interrupt(self) -> None:
        self.closed.append("KILLED")

    def open_sweep(self, sweep: TrackedSweep, anew: Sequence[str] = ()) -> str:
        return sweep.sweep_id

    def log_trial(self, trial: PublishedTrial) -> str:
        self.trials[trial.key] = trial
        return trial.key

    def log_report(self, pages: Path, data: PublishedSweep) -> None:
        self.reports.append(data)

    def compare_by(self, compared: TrackedComparison) -> None:
        return

    def log_comparison(self, compared: TrackedComparison, sentences: Sequence[str]) -> None:
        self.comparisons.append((compared, tuple(sentences)))

    def close(self, status: RunStatus = "FINISHED") -> None:
        self.closed.append(status)


class Bench:
    """One sweep's folder, run as often as a test wants."""

    def __init__(self, folder: Path, plan: Plan, sweep: SweepSpec = SWEEP) -> None:
        self.files, self.plan, self.sweep, self.tracker = SweepFiles(str(folder)), plan, sweep, KeptTracker()
        self.manifest = new_manifest(sweep, TEXT)
        self.execution = InProcess(TrialContext(self.files, sweep.disclosure, NO_CODE))
        self.ended: list[str] = []
        self.warned: list[str] = []

    def coordinator(self, publish: Publish = published, **changed: Callable[..., Any]) -> Coordinator:
        """A coordinator of the next run. changed: methods of its backend, by name."""
        status = SweepStatus(initial_status(self.plan), lambda trial: self.ended.append(trial.key))
        execution = InProcess(TrialContext(self.files, SWEEP.disclosure, NO_CODE))
        for name, method in changed.items():
            setattr(execution, name, method)
        return Coordinator(
            self.sweep,
            self.plan,
            self.manifest,
            self.files,
            self.tracker,
            status,
            execution,
            warn=self.warned.append,
            publish=publish,
        )

    def run(self, scatter: Scatter = account_in_process) -> SweepRecord:
        with self.coordinator(scatter=scatter) as coordinator:
            self.execution.train(coordinator.pending(), coordinator, "name")
            return coordinator.finish()[0]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_sweep(SWEEP)


@pytest.fixture
def bench(tmp_path: Path, plan: Plan) -> Bench:
    return Bench(tmp_path, plan)


def test_every_trial_is_accounted_recorded_and_reported(bench: Bench) -> None:
    record = bench.run()
    assert {key: record.status(key).state for key in KEYS} == dict.fromkeys(KEYS, TrialState.FINISHED)
    assert sorted(bench.ended) == sorted(KEYS)
    assert not record.failed
    assert {trial.state for trial in bench.tracker.trials.values()} == {TrialState.FINISHED}
    private = bench.tracker.trials[FIRST]
    assert known(private.privacy).epsilon == pytest.approx(5.0, rel=1e-3)
    assert known(private.quality).accuracy_change is not None, "compared with its baseline"
    assert bench.tracker.closed == ["FINISHED"]
    assert Path(bench.files.report).is_file()
    assert all(isinstance(read_result(bench.files.trial(key).result), TrialResult) for key in KEYS)


def test_a_process_of_its_own_writes_the_same_reports(bench: Bench, tmp_path: Path) -> None:
    record, elsewhere = bench.run(), publisher("head.example.org:6379")
    names = (bench.files.report, bench.files.private_report, bench.files.comparison, bench.files.results)
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    here = published(bench.files, record, tmp_path / "here"), [Path(name).read_bytes() for name in names]
    for name in names:
        Path(name).unlink()
    assert (elsewhere(bench.files, record, tmp_path / "there"), [Path(name).read_bytes() for name in names]) == here
    pages = [
        {path.name: path.read_bytes() for path in (tmp_path / place).rglob("*.html")} for place in ("here", "there")
    ]
    assert pages[0] == pages[1]
    assert pages[0]["report.html"] == Path(bench.files.report).read_bytes()
    assert len(pages[0]) > 1, "and figures"


def test_pages_that_a_killed_driver_left_go_when_others_are_made(tmp_path: Path) -> None:
    files = SweepFiles(str(tmp_path))
    left = Path(files.pages) / "report.html"
    left.parent.mkdir()
    left.touch()
    with empty_pages(files) as pages:
        assert list(pages.iterdir()) == []
        assert stat.S_IMODE(pages.stat().st_mode) == 0o700
    assert not pages.exists()


@pytest.mark.long
def test_what_was_trained_but_not_accounted_is_accounted(bench: Bench) -> None:
    bench.run()
    files = bench.files.trial(SECOND)
    before = read_result(files.result)
    assert isinstance(before, TrialResult)
    Path(files.result).unlink()
    for name in (files.spec, files.training):  # as in an object store, which knows seconds
        os.utime(name, (int(before.ended),) * 2)
    with bench.coordinator() as coordinator:
        assert coordinator.pending() == []
        record, _ = coordinator.finish()
    after = read_result(files.result)
    assert isinstance(after, TrialResult)
    assert 0.0 < after.ended - after.started < before.ended - before.started + 1.0, "of the run that trained it"
    assert (after.worst_case, after.training) == (before.worst_case, before.training)
    assert record.finished(SECOND) is not None


def test_accounting_that_fails_ends_that_trial_alone(bench: Bench) -> None:
    trial, kept = bench.files.trial(FIRST), {}

    def damaged(job: PartwiseJob[Part, Result], parts: Sequence[Part]) -> Iterator[Result]:
        if job.root == trial.root:
            part = next(Path(trial.norms).glob("*/*.arrow"))
            kept[part] = part.read_bytes()
            part.write_bytes(kept[part][:-1] + bytes([kept[part][-1] ^ 1]))
        return account_in_process(job, parts)

    record = bench.run(damaged)
    assert record.failed
    assert record.status(FIRST).state is TrialState.FAILED
    assert "sha256" in str(record.status(FIRST).error)
    assert record.finished(SECOND) is not None
    assert bench.tracker.closed == ["FAILED"]
    for part, content in kept.items():
        part.write_bytes(content)
    assert not bench.run().failed, "the next run accounts it"


@pytest.mark.long
def test_a_storage_that_refuses_for_a_while_fails_no_trial(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpsweep.orchestration.execution.coordinator.PAUSES", (0.01,) * 3)
    refusals = {FIRST: 3, SECOND: 4}

    def refusing(job: PartwiseJob[Part, Result], parts: Sequence[Part]) -> Iterator[Result]:
        key = Path(job.root).name
        refusals[key] -= 1
        if refusals[key] >= 0:
            raise StorageError("cannot write s3://bucket/part: slow down")
        return account_in_process(job, parts)

    record = bench.run(refusing)
    assert record.status(FIRST).state is TrialState.FINISHED
    assert record.status(SECOND).state is TrialState.FAILED, "it refused for longer than anybody waits"
    assert str(record.status(SECOND).error).startswith("StorageError in refusing")


def test_a_trial_whose_training_fails_leaves_the_others(bench: Bench) -> None:
    checkpoint = Path(bench.files.trial(FIRST).checkpoint)
    checkpoint.parent.mkdir(parents=True)
    checkpoint.write_bytes(b"no checkpoint")
    record = bench.run()
    states = {key: record.status(key).state for key in KEYS}
    assert states == {**dict.fromkeys(KEYS, TrialState.FINISHED), FIRST: TrialState.FAILED}
    assert "checkpoint.pt" in str(bench.tracker.trials[FIRST].error)


class Stop(Exception):
    """By the scheduler."""


def test_reports_wait_for_an_object_store(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dpsweep.orchestration.execution.storage_checks.PAUSES", (0.0,) * 2)
    bench.files, asked = SweepFiles(f"file://{tmp_path}/sweep"), list[Path]()

    def refusing(files: SweepFiles, record: SweepRecord, pages: Path) -> Published:
        asked.append(pages)
        if len(asked) < 3:
            raise StorageError("cannot write s3://bucket/report.html: slow down")
        return published(files, record, pages)

    with bench.coordinator(publish=refusing) as coordinator:
        coordinator.finish()
    assert (len(asked), exists(bench.files.report)) == (3, True)


def test_accounting_that_ends_before_statistics_are_drawn_counts_no_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpsweep.orchestration.execution.coordinator.PAUSES", (0.01,) * 3)
    sweep = parse_sweep(small(clipping="flat", noise="constant", seeds=[0], release="private"))
    (planned,) = (plan := plan_sweep(sweep)).trials
    bench = Bench(tmp_path, plan, sweep)

    def refusing(job: PartwiseJob[Part, Result], parts: Sequence[Part]) -> Iterator[Result]:
        raise StorageError("cannot write s3://bucket/part: slow down")

    assert bench.run(refusing).status(planned.key).state is TrialState.FAILED
    assert bench.run().status(planned.key).state is TrialState.FINISHED
    (attempt,) = read_attempts(bench.files, planned.key)
    assert known(attempt.statistics).releases == planned.releases


def stop_first(bench: Bench, plan: Plan, coordinator: Coordinator) -> None:
    """Train the first private trial until the scheduler stops it after an epoch."""
    planned = next(trial for trial in plan.trials if trial.key == FIRST)

    def report(progress: Progress) -> None:
        coordinator.progressed(FIRST, progress)
        raise Stop

    coordinator.started(FIRST)
    with pytest.raises(Stop):
        run_trial(planned.spec, bench.files.trial(FIRST).root, on_progress=report)
    coordinator.ended(FIRST)


def test_a_trial_that_was_stopped_costs_what_it_ran(bench: Bench, plan: Plan) -> None:
    """All of it, and each example up to the stop; its files are checked and used as those of any other."""
    planned, files = next(trial for trial in plan.trials if trial.key == FIRST), bench.files.trial(FIRST)
    write_manifest(bench.files, bench.manifest)
    with bench.coordinator() as coordinator:
        stop_first(bench, plan, coordinator)
        record, _ = coordinator.finish()
    stopped = record.status(FIRST).result
    assert isinstance(stopped, StoppedTrial)
    assert stopped.epoch == 1
    assert stopped.worst_case.epsilon < planned.worst_case.epsilon
    assert record.status(SECOND).state is TrialState.PENDING
    assert not Path(files.checkpoint).exists(), "it holds the key of the noise"

    assert stopped.trace == read_trace(files.trace)
    epsilons = read_epsilons(files.epsilons).upper
    shown = record.data(bench.files).trials
    (individuals,) = [known(trial.individuals) for trial in shown if trial.key == FIRST]
    assert individuals.mean == pytest.approx(epsilons.clip(max=stopped.worst_case.epsilon).mean())
    assert read_result(files.result) == stopped

    def dpsweep(*arguments: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(printed(*arguments, "--json"))
        return found

    verified = dpsweep("verify", bench.files.root)
    assert (verified["trials"], verified["candidates"], verified["damaged"]) == (1, 0, [])
    (again,) = dpsweep("account", bench.files.root, "--delta", "1e-7", "--address", "in-process")["accounts"]
    assert (again["key"], again["epsilon"] > stopped.worst_case.epsilon) == (FIRST, True)
    assert len(again["individuals"]["groups"]) == 10
    assert dpsweep("prune", bench.files.root, "--norms") == {"pruned": [FIRST]}


def test_a_trial_that_a_later_driver_stops_keeps_its_first_epochs(tmp_path: Path) -> None:
    sweep = parse_sweep(small(clipping="flat", noise={"name": "exponential", "decay": 0.1}, seeds=[0], epochs=3))
    (planned,) = (plan := plan_sweep(sweep)).trials
    bench = Bench(tmp_path, plan, sweep)
    seen: list[Progress] = []

    def train(coordinator: Coordinator) -> None:
        def report(progress: Progress) -> None:
            seen.append(progress)
            coordinator.progressed(planned.key, progress)
            raise Stop

        run_trial(planned.spec, bench.files.trial(planned.key).root, on_progress=report)

    with pytest.raises(Stop), bench.coordinator() as coordinator:
        train(coordinator)
    with bench.coordinator() as coordinator:
        with pytest.raises(Stop):
            train(coordinator)
        coordinator.ended(planned.key)
        record, _ = coordinator.finish()
    (shown,) = record.data().trials
    assert [each.epoch for each in shown.history] == [0, 1]
    assert [each.noise_multiplier for each in shown.history] == [each.noise_multiplier for each in seen]
    first, second = (each.metrics["epsilon"] for each in shown.history)
    assert first < second


def test_a_stopped_trial_whose_accounting_was_interrupted_is_accounted_by_the_next_run(
    bench: Bench, plan: Plan
) -> None:
    """And never trained further; where its examples cannot be accounted, it is not failed, and its key is gone."""

    def lost(job: PartwiseJob[Part, Result], parts: Sequence[Part]) -> Iterator[Result]:
        raise AccountingFailed("part 0 was lost")

    with bench.coordinator(scatter=lost) as coordinator:
        stop_first(bench, plan, coordinator)
        record, _ = coordinator.finish()
    assert record.status(FIRST).state is TrialState.STOPPED
    (warning,) = bench.warned
    assert f"the examples of {FIRST}, which the scheduler stopped, were not accounted" in warning
    assert "the worst case bounds each; the same command tries again: AccountingFailed" in warning
    stopped = read_result(bench.files.trial(FIRST).result)
    assert isinstance(stopped, StoppedTrial)
    assert not stopped.is_accounted
    assert not exists(bench.files.trial(FIRST).checkpoint)
    with bench.coordinator() as coordinator:
        assert FIRST not in {planned.key for planned in coordinator.pending()}
        again = coordinator.finish()[0].status(FIRST)
    assert isinstance(again.result, StoppedTrial)
    assert again.result.is_accounted
    assert replace(again.result, digests={}, individuals=None, group_names=()) == stopped
    with bench.coordinator() as coordinator:
        coordinator.finish()
    assert bench.ended == [FIRST, FIRST], "the third run has nothing left of it"


def test_an_interrupt_does_not_wait_for_a_stopped_trial_to_be_closed(bench: Bench, plan: Plan) -> None:
    """The next run closes it: its checkpoint is kept until then."""
    begun = threading.Event()

    def for_ever(planned: PlannedTrial, step: int) -> Iterator[None]:
        while True:
            begun.set()
            yield

    def interrupted() -> None:
        with bench.coordinator(close=for_ever) as coordinator:
            stop_first(bench, plan, coordinator)
            assert begun.wait(60.0)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert exists(bench.files.trial(FIRST).checkpoint)
    with bench.coordinator() as coordinator:
        result = coordinator.finish()[0].status(FIRST).result
    assert isinstance(result, StoppedTrial)
    assert result.is_accounted
    assert not exists(bench.files.trial(FIRST).checkpoint)


def test_an_interrupt_does_not_wait_for_parts_that_wait_for_resources(bench: Bench) -> None:
    """Trials may hold every CPU. The trial has not failed: the next run accounts it."""
    begun, given_up = threading.Event(), threading.Event()

    def waits(job: PartwiseJob[Part, Result], parts: Sequence[Part]) -> Iterator[Result]:
        begun.set()
        given_up.wait(60.0)
        raise AccountingFailed("the sweep was interrupted")
        yield from ()

    def interrupted() -> None:
        with bench.coordinator(scatter=waits, give_up=given_up.set) as coordinator:
            bench.execution.train(coordinator.pending(), coordinator, "name")
            assert begun.wait(60.0)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert given_up.is_set()
    assert bench.tracker.closed == ["KILLED"]
    assert TrialState.FAILED not in {trial.state for trial in bench.tracker.trials.values()}
    record = bench.run()
    assert {record.status(key).state for key in KEYS} == {TrialState.FINISHED}


def test_trials_that_are_recorded_in_a_row_share_a_record_until_one_changes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[SweepRecord] = []
    monkeypatch.setattr(Coordinator, "_record", _counted(Coordinator._record, built))
    with bench.coordinator() as coordinator:
        before = len(built)
        assert {coordinator._shown(key).state for key in KEYS} == {TrialState.PENDING}
        assert len(built) == before + 1
        coordinator.started(FIRST)
        assert [coordinator._shown(key).state for key in (FIRST, SECOND)] == [TrialState.TRAINING, TrialState.PENDING]
        assert len(built) == before + 2


def _counted(make: Callable[[Coordinator], SweepRecord], built: list[SweepRecord]) -> Callable[..., SweepRecord]:
    def counted(self: Coordinator) -> SweepRecord:
        built.append(make(self))
        return built[-1]

    return counted
