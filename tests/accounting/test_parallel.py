"""Accounting in actors equals accounting in process, whatever dies meanwhile; nothing missing counts as zero."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from accounting.errors import DataCorruption, InvalidInput
from accounting.individual.epsilons import individual_epsilons
from accounting.parallel import (
    AccountingJob,
    AccountingPool,
    PartResult,
    account_in_process,
    account_part,
    account_trial,
)
from accounting.records.layout import TrialFiles
from accounting.records.shards import NormShards, NormShardWriter, read_epsilons
from tests.accounting.stored_trial import snapshot, write_trial

DELTA = 1e-5


@pytest.fixture
def job(tmp_path: Path) -> AccountingJob:
    write_trial(str(tmp_path / "trial"))
    return AccountingJob(str(tmp_path / "trial"), DELTA)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # or else it listens on every interface
    ray = pytest.importorskip("ray")
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


def test_a_trial_is_the_concatenation_of_its_parts(job: AccountingJob) -> None:
    result = account_trial(job)
    parts = [account_part(job, part).epsilons for part in NormShards(TrialFiles(job.root).norms).parts]
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
    whole = individual_epsilons([0, 40, 80], contributions, trace, DELTA)
    parts = account_trial(AccountingJob(str(tmp_path), DELTA))
    np.testing.assert_allclose(parts.upper, whole.upper, rtol=1e-6)
    assert (parts.upper >= whole.upper * (1 - 1e-12)).all()


def test_accounting_again_replaces_earlier_results(job: AccountingJob) -> None:
    first = account_trial(job)
    second = account_trial(AccountingJob(job.root, 1e-6))
    assert (second.upper > first.upper).all()
    assert read_epsilons(TrialFiles(job.root).epsilons).delta == 1e-6


def test_killed_actors_neither_lose_nor_change_anything(job: AccountingJob, cluster: None) -> None:
    expected = account_trial(job)
    with AccountingPool(actors=2) as pool:

        def scatter_and_kill(job: AccountingJob, parts: Sequence[int]) -> Iterator[PartResult]:
            processes = pool.process_ids()
            results = pool.scatter(job, parts)
            yield next(results)
            for process in processes:
                os.kill(process, signal.SIGKILL)
            yield from results

        survived = account_trial(job, scatter_and_kill)
        again = account_trial(job, pool.scatter)
    for result in (survived, again):
        np.testing.assert_array_equal(result.upper, expected.upper)
        np.testing.assert_array_equal(result.lower, expected.lower)


def test_errors_of_a_part_arrive_as_they_are(job: AccountingJob, cluster: None) -> None:
    next(Path(TrialFiles(job.root).norms).glob("step=00000040/part-00002.arrow")).unlink()
    with AccountingPool(actors=1) as pool, pytest.raises(DataCorruption, match=r"part-00002\.arrow.*missing"):
        account_trial(job, pool.scatter)


def test_a_part_that_is_not_returned_is_an_error(job: AccountingJob) -> None:
    with pytest.raises(DataCorruption, match="part 6 was not accounted"):
        account_trial(job, lambda job, parts: account_in_process(job, parts[:-1]))
    with pytest.raises(DataCorruption, match="was returned in place of part 0"):
        account_trial(job, lambda job, parts: account_in_process(job, parts[::-1]))


def test_examples_without_shards_are_an_error(tmp_path: Path) -> None:
    write_trial(str(tmp_path), examples=50)
    files = TrialFiles(str(tmp_path))
    manifest = Path(files.norms) / "manifest.jsonl"
    lines = manifest.read_text().splitlines(keepends=True)
    manifest.write_text("".join(line for line in lines if '"part":6' not in line))
    with pytest.raises(DataCorruption, match="never committed"):
        account_trial(AccountingJob(str(tmp_path), DELTA))
    for path in Path(files.norms).glob("*/part-00006.arrow"):
        path.unlink()
    with pytest.raises(DataCorruption, match="48 examples, but the trace says 50"):
        account_trial(AccountingJob(str(tmp_path), DELTA))


def test_an_interrupted_snapshot_must_be_replayed_first(job: AccountingJob) -> None:
    manifest = Path(TrialFiles(job.root).norms) / "manifest.jsonl"
    manifest.write_bytes(manifest.read_bytes()[:-20])
    with pytest.raises(DataCorruption):
        account_trial(job)
    NormShardWriter(TrialFiles(job.root).norms, 8).write(snapshot(80, 50))
    assert len(account_trial(job).upper) == 50


def test_unknown_method_names_the_nearest(job: AccountingJob) -> None:
    with pytest.raises(InvalidInput, match="did you mean 'rdp'"):
        account_trial(AccountingJob(job.root, DELTA, "rpd"))
