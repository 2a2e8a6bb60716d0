"""Epsilons of all users at once are those that each user's records have together, whatever part they lie in."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from accounting.errors import DataCorruption, InvalidInput
from accounting.individual import individual_epsilons
from accounting.jobs import UNITS, AccountingJob, account_part, store_epsilons
from accounting.pld import epsilon_of_examples
from accounting.records import NormShards, StoredUsers, TrialFiles, read_epsilons, read_private, read_trace, write_users
from accounting.summaries import Counting
from tests.accounting.stored_trial import job_of, snapshot, write_trial

DELTA, STEPS = 1e-5, (0, 40, 80)
USERS = np.random.default_rng(3).integers(0, 20, 50) * 7
"""Of 50 examples: some users have several records, in different parts, and some have one."""


def ids() -> NDArray[np.int64]:
    return np.asarray(snapshot(0, 50).example_ids, np.int64)


@pytest.fixture
def job(tmp_path: Path) -> AccountingJob:
    root = str(tmp_path / "trial")
    write_trial(root)
    write_users(TrialFiles(root).users, ids(), USERS, 8)
    folder = f"{root}/private/accounts/a/users"
    return replace(job_of(root, DELTA, "pld"), counting=Counting(500.0), folder=folder, unit="user")


def test_every_user_has_the_epsilon_of_all_own_records(job: AccountingJob) -> None:
    summary = store_epsilons(job)
    found = read_epsilons(job.folder)
    assert sorted(found.example_ids.tolist()) == np.unique(USERS).tolist()
    assert summary.examples == len(np.unique(USERS))
    contributions = np.stack([snapshot(step, 50).contributions for step in STEPS], axis=1).astype(np.float32)
    trace, counts = read_trace(TrialFiles(job.root).trace), set[int]()
    for user, upper, lower in zip(found.example_ids, found.upper, found.lower, strict=True):
        own = contributions[user == USERS]
        counts.add(min(len(own), 2))
        if len(own) == 1:
            alone = individual_epsilons(STEPS, own, trace, DELTA, "pld")
            expected = float(alone.upper[0]), float(alone.lower[0])
        else:
            together = epsilon_of_examples(trace, STEPS, own, DELTA)
            expected = together.upper, together.lower
        assert (upper, lower) == pytest.approx(expected, rel=1e-6)
        assert upper >= expected[0] * (1 - 1e-6)
    assert counts == {1, 2}
    assert StoredUsers(TrialFiles(job.root).users).most_records == np.bincount(USERS).max()


def test_other_users_are_another_question(job: AccountingJob) -> None:
    """What an interrupted run stored for other users of the same examples is not taken up."""
    trace, other = read_trace(TrialFiles(job.root).trace), replace(job, root=f"{job.root}2")
    write_trial(other.root)
    write_users(TrialFiles(other.root).users, ids(), USERS[::-1], 8)
    files = TrialFiles(job.root)

    part = NormShards(files.norms).files(0)
    assert UNITS[job.unit](job, part).inputs(trace) != UNITS[other.unit](other, part).inputs(trace)
    assert UNITS["user"](job, part).inputs(trace) != UNITS["example"](job, part).inputs(trace)


def test_a_trial_without_users_says_what_to_do(tmp_path: Path) -> None:
    root = str(tmp_path / "trial")
    write_trial(root)
    with pytest.raises(InvalidInput, match="name no users, or an earlier version trained it"):
        store_epsilons(replace(job_of(root, DELTA, "pld"), unit="user"))


def test_users_of_other_examples_and_damage_are_refused(job: AccountingJob) -> None:
    users = Path(TrialFiles(job.root).users)
    part = users / "part-00001.arrow"
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    with pytest.raises(DataCorruption, match="sha256 differs"):
        store_epsilons(job)
    for path in users.iterdir():
        path.unlink()
    write_users(str(users), ids() + 1, USERS, 8)
    with pytest.raises(DataCorruption, match="is of other examples than the norms"):
        store_epsilons(job)
    summary = users / "users.json"
    summary.write_text(json.dumps({**json.loads(summary.read_text()), "most_records": 1}))
    with pytest.raises(DataCorruption, match="differs from its checksum"):
        StoredUsers(str(users))


def test_a_share_reads_each_manifest_once(job: AccountingJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have a hash for every part: at 1e8 examples and 300 snapshots, 45 MB."""
    read: list[str] = []

    def noted(uri: str) -> bytes:
        read.append(uri)
        return read_private(uri)

    part = NormShards(TrialFiles(job.root).norms).files(0)
    monkeypatch.setattr("accounting.records.sealed.read_private", noted)
    account_part(job, part)
    found = sorted(uri.removeprefix(part.directory) for uri in read if uri.startswith(part.directory))
    assert found == ["/complete.json", *(f"/step={step:08d}/manifest.json" for step in STEPS)]
