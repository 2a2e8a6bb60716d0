"""Accounting in Ray tasks equals accounting in process, whatever dies meanwhile; nothing missing counts as zero."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from dpsweep.accounting.errors import DataCorruption, public_text
from dpsweep.accounting.individual.epsilons import IndividualEpsilons, individual_epsilons
from dpsweep.accounting.jobs.examples import (
    AccountingJob,
    Part,
    PartwiseJob,
    Result,
    account_all,
    account_in_process,
    epsilons_of_part,
)
from dpsweep.accounting.jobs.parallel import AccountingFailed, AccountingQueue, _Room
from dpsweep.accounting.jobs.summaries import Counting
from dpsweep.accounting.jobs.user_accounting import account_users
from dpsweep.accounting.records.epsilon_files import read_epsilons
from dpsweep.accounting.records.files import list_files
from dpsweep.accounting.records.shards import NormShards, NormShardWriter
from dpsweep.accounting.records.traces import read_trace, write_trace
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.accounting.records.user_files import write_users
from tests.accounting.stored_trial import account_trial, job_of, snapshot, write_trial
from tests.orchestration.processes import command_line, descendants

DELTA = 1e-5


@pytest.fixture
def job(tmp_path: Path) -> AccountingJob:
    write_trial(str(tmp_path / "trial"))
    return job_of(str(tmp_path / "trial"), DELTA)


def disable_authentication(patch: pytest.MonkeyPatch) -> None:
    """Ray reads its authentication once per process, and another test may have had a token."""
    raylet = pytest.importorskip("ray._raylet")
    patch.setenv("RAY_AUTH_MODE", "disabled")
    raylet.Config.initialize("")


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # or else it listens on every interface
    ray = pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        disable_authentication(patch)
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
        yield
        ray.shutdown()


def test_a_trial_is_the_concatenation_of_its_parts(job: AccountingJob) -> None:
    result = account_trial(job)
    shards = NormShards(TrialFiles(job.root).norms)
    trace = read_trace(TrialFiles(job.root).trace)
    parts = [epsilons_of_part(job, shards.files(part), trace) for part in shards.parts]
    assert len(parts) == 7
    np.testing.assert_array_equal(result.upper, np.concatenate([part.upper for part in parts]))
    np.testing.assert_array_equal(result.example_ids, np.arange(50) * 3 + 1)
    np.testing.assert_array_equal(result.losses, snapshot(80, 50).losses.astype(np.float32))
    assert (result.delta, result.method, result.kind) == (DELTA, "rdp", "estimate")
    stored = read_epsilons(TrialFiles(job.root).epsilons)
    np.testing.assert_array_equal(stored.upper, result.upper)


def test_a_trial_equals_individual_accounting_of_the_whole_data_set(tmp_path: Path) -> None:
    trace = write_trial(str(tmp_path))
    contributions = np.stack([snapshot(step, 50).contributions for step in (0, 40, 80)], axis=1)
    whole = individual_epsilons([0, 40, 80], contributions, trace, DELTA, "rdp")
    parts = account_trial(job_of(str(tmp_path), DELTA))
    np.testing.assert_allclose(parts.upper, whole.upper, rtol=1e-6)
    assert (parts.upper >= whole.upper * (1 - 1e-12)).all()


def test_accounting_again_replaces_earlier_results(job: AccountingJob) -> None:
    first = account_trial(job)
    second = account_trial(job_of(job.root, 1e-6))
    assert (second.upper > first.upper).all()
    assert read_epsilons(TrialFiles(job.root).epsilons).delta == 1e-6


def test_what_an_interrupted_run_has_stored_is_not_computed_again(
    job: AccountingJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, seen = account_trial(job), list[int]()

    def observed(*given: Any) -> IndividualEpsilons:
        seen.append(len(given[1]))
        return individual_epsilons(*given)

    monkeypatch.setattr("dpsweep.accounting.jobs.examples.individual_epsilons", observed)
    for _ in range(3):
        with pytest.raises(DataCorruption, match="was not accounted"):
            account_trial(job, lambda job, parts: account_in_process(job, parts[:4]))
        assert seen == [8] * 4, "the first four parts, once"
    np.testing.assert_array_equal(account_trial(job).upper, expected.upper)
    assert seen == [8] * 6 + [2]
    seen.clear()
    with pytest.raises(DataCorruption, match="was not accounted"):
        account_trial(job_of(job.root, 1e-6), lambda job, parts: account_in_process(job, parts[:4]))
    assert (account_trial(job_of(job.root, 1e-7)).upper > expected.upper).all()
    assert seen == [8] * 10 + [2], "of another delta nothing is taken up"


def accounting_processes(title: str = "ray::account_part") -> list[int]:
    """Processes below this one that account a part now: Ray titles a process by the task that it runs."""
    return [pid for pid in descendants(os.getpid()) if title in command_line(pid)]


def kill_accounting(title: str = "ray::account_part") -> list[int]:
    """Kill them, and return their ids."""
    found = accounting_processes(title)
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return found


@contextlib.contextmanager
def repeatedly(act: Callable[[], object], seconds: float) -> Iterator[None]:
    """Call ``act`` in a thread, with this pause in between, until the block ends."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(seconds):
            act()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_killed_processes_neither_lose_nor_change_anything(tmp_path: Path, cluster: None) -> None:
    """Several trials at once, of several parts and of one, while whatever accounts is killed, twice."""
    sizes = {"several": 16, "one": 64}
    jobs = [job_of(str(tmp_path / f"{name}{i}"), DELTA) for name in sizes for i in range(3)]
    for job in jobs:
        write_trial(job.root, rows_per_part=sizes[Path(job.root).name[:-1]])
    expected = account_trial(jobs[0])
    rounds: list[list[int]] = []

    def kill_at_times() -> None:
        if len(rounds) < 2 and (killed := kill_accounting()):
            rounds.append(killed)
            time.sleep(1.0)

    with AccountingQueue(1) as queue, repeatedly(kill_at_times, 0.05), ThreadPoolExecutor(len(jobs)) as threads:
        results = list(threads.map(lambda job: account_trial(job, queue.scatter), jobs))
    assert rounds, "something was killed"
    for result in results:
        np.testing.assert_array_equal(result.upper, expected.upper)
        np.testing.assert_array_equal(result.lower, expected.lower)


@pytest.mark.long
def test_users_survive_killed_processes(job: AccountingJob, cluster: None) -> None:
    """Whatever sorts rows and whatever accounts users is killed, each once; every stored byte is as without."""
    users = np.random.default_rng(3).integers(0, 20, 50)
    write_users(TrialFiles(job.root).users, np.asarray(snapshot(0, 50).example_ids), np.arange(50), users, 8)
    asked = replace(job, method="pld", counting=Counting(500.0), folder=f"{job.root}/private/users-alone")
    account_users(asked, account_in_process)
    killed, attempts = Counter[str](), Counter[tuple[str, int]]()

    def scatter(job: PartwiseJob[Part, Result], parts: Sequence[Part]) -> Iterator[Result]:
        stage = type(job).__name__

        def kill_once() -> None:
            if not killed[stage]:
                killed[stage] += len(kill_accounting())

        with repeatedly(kill_once, 0.02):
            for result in queue.scatter(job, parts):
                attempts[stage, result.part] += 1
                yield result

    with AccountingQueue(1) as queue:
        account_users(replace(asked, folder=f"{job.root}/private/users-killed"), scatter)
    assert set(+killed) == {"SortRows", "AccountShares"}
    assert attempts == {(stage, part): 1 for stage in killed for part in range(7)}
    names = [name for name in list_files(asked.folder) if name.endswith(".arrow")]
    assert len(names) == 7
    for name in (*names, "manifest.jsonl"):
        assert Path(asked.folder, name).read_bytes() == Path(f"{job.root}/private/users-killed", name).read_bytes()
    assert not Path(TrialFiles(job.root).rows_by_user).exists()


@pytest.mark.long
def test_forty_trials_survive_kills_every_four_seconds(tmp_path: Path, cluster: None) -> None:
    """Trials of one part each, while whatever accounts is killed every 4 s until all are done."""
    jobs = [job_of(str(tmp_path / f"trial{number}"), DELTA) for number in range(40)]
    for job in jobs:
        write_trial(job.root, examples=300_000, rows_per_part=300_000)  # half a second each
    expected, killed = account_trial(jobs[0]), list[int]()
    with (
        AccountingQueue(1) as queue,
        repeatedly(lambda: killed.extend(kill_accounting()), 4.0),
        ThreadPoolExecutor(len(jobs)) as threads,
    ):
        results = list(threads.map(lambda job: account_trial(job, queue.scatter), jobs))
    assert killed, "something was killed"
    for result in results:
        np.testing.assert_array_equal(result.upper, expected.upper)
        np.testing.assert_array_equal(result.lower, expected.lower)


def test_errors_of_a_part_arrive_as_they_are(job: AccountingJob, cluster: None) -> None:
    """And are shown whole, as those that this process raises."""
    next(Path(TrialFiles(job.root).norms).glob("step=00000040/object-00000.arrow")).unlink()
    with AccountingQueue(1) as queue, ThreadPoolExecutor(1) as threads:
        error = threads.submit(account_all, job, queue.scatter).exception(timeout=120)
    assert isinstance(error, DataCorruption)
    assert re.search(r"object-00000\.arrow.*missing", public_text(error)), public_text(error)


def test_parts_of_failed_trials_leave_room_for_others(job: AccountingJob, cluster: None) -> None:
    """A trial fails at its first part, again and again as where its storage is away; its other parts are forgotten."""
    shard = next(Path(TrialFiles(job.root).norms).glob("step=00000040/object-00000.arrow"))
    content = shard.read_bytes()
    with AccountingQueue(1) as queue:
        shard.unlink()
        for _ in range(8):
            with pytest.raises(DataCorruption, match="missing"):
                account_trial(job, queue.scatter)
        shard.write_bytes(content)
        with ThreadPoolExecutor(1) as thread:
            again = thread.submit(account_trial, job, queue.scatter)
            try:
                upper = again.result(timeout=60).upper
            finally:
                queue.close()
    np.testing.assert_array_equal(upper, account_trial(job).upper)


def test_a_part_that_is_always_lost_fails_its_trial_and_no_other(
    job: AccountingJob, cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpsweep.accounting.jobs.parallel.ATTEMPTS", 2)
    with AccountingQueue(1) as queue:
        kill_accounting("ray::IDLE")  # those that have accounted in other tests
        with (
            repeatedly(kill_accounting, 0.02),  # a new process imports longer than that
            pytest.raises(AccountingFailed, match=r"part \d was lost 2 times.*run the same command again"),
        ):
            account_trial(job, queue.scatter)
        again = account_trial(job, queue.scatter)
    np.testing.assert_array_equal(again.upper, account_trial(job).upper)


def test_lack_of_memory_is_named_and_halves_what_runs_at_once(
    job: AccountingJob, cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpsweep.accounting.jobs.parallel.ATTEMPTS", 2)
    files = NormShards(TrialFiles(job.root).norms).files(0)
    huge = replace(files, steps=cast("tuple[int, ...]", range(2**44)))
    with AccountingQueue(1) as queue:
        with pytest.raises(
            AccountingFailed, match=r"part 0 was lost 2 times, at last by lack of memory; give .* more memory"
        ):
            list(queue.scatter(job, [huge]))
        assert queue.room.running_limit() == 1, "two CPUs, and two kills"
        assert len(account_trial(job, queue.scatter).upper) == 50


def test_parts_keep_off_gpus_while_other_nodes_can_run_them(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = {"NodeID": "a", "Alive": True, "Resources": {"CPU": 2.0}}
    with_gpu = {"NodeID": "b", "Alive": True, "Resources": {"CPU": 8.0, "GPU": 1.0}}
    nodes = [plain, with_gpu]
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    room = _Room({"CPU": 1.0}, None)
    assert (room.slots(), room.selector) == (2, {"ray.io/node-id": "!in(b)"})
    room.without("a")
    assert (room.slots(), room.selector) == (8, {"ray.io/node-id": "!in(a)"}), "the only ones that are left"
    needs_more = _Room({"CPU": 4.0}, None)
    assert (needs_more.slots(), needs_more.selector) == (2, {})


def test_a_closed_queue_leaves_nobody_waiting(job: AccountingJob, cluster: None) -> None:
    queue = AccountingQueue(0, {"nowhere": 1.0})  # no node has it
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(account_trial, job, queue.scatter)
        time.sleep(0.5)
        queue.close()
        with pytest.raises(AccountingFailed, match="the sweep was interrupted"):
            waiting.result(timeout=20)
    with pytest.raises(AccountingFailed, match="run the same command again"):
        account_trial(job, queue.scatter)


def test_a_part_that_is_not_returned_is_an_error(job: AccountingJob) -> None:
    with pytest.raises(DataCorruption, match="part 6 was not accounted"):
        account_trial(job, lambda job, parts: account_in_process(job, parts[:-1]))
    with pytest.raises(DataCorruption, match="was returned in place of part 0"):
        account_trial(job, lambda job, parts: account_in_process(job, parts[::-1]))


def test_examples_without_shards_are_an_error(tmp_path: Path) -> None:
    files = TrialFiles(str(tmp_path))
    trace = write_trial(str(tmp_path), examples=48)
    write_trace(files.trace, replace(trace, dataset_size=50))
    with pytest.raises(DataCorruption, match="48 examples, but the trace says 50"):
        account_trial(job_of(str(tmp_path), DELTA))


def test_an_interrupted_run_must_be_resumed_first(job: AccountingJob) -> None:
    """Whatever of the last snapshot is there: without it, the steps after it would cost what those before it did."""
    norms = Path(TrialFiles(job.root).norms)
    last, complete = norms / "step=00000080", norms / "complete.json"
    complete.unlink()
    with pytest.raises(DataCorruption, match="training was interrupted; resume the trial"):
        account_trial(job)
    (last / "manifest.json").unlink()
    with pytest.raises(DataCorruption, match="training was interrupted; resume the trial"):
        account_trial(job)
    with NormShardWriter(str(norms), 8) as writer:
        writer.write(snapshot(80, 50))
        writer.complete()
    assert len(account_trial(job).upper) == 50
    shutil.rmtree(last)
    with pytest.raises(DataCorruption, match="the snapshots end before or after what"):
        account_trial(job)
