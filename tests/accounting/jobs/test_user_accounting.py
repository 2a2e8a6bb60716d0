"""Epsilons of all users at once are those that each user's records have together, whatever part they lie in."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from dpsweep.accounting.calibration.parameter_search import calibrate_filter
from dpsweep.accounting.errors import DataCorruption, InvalidInput
from dpsweep.accounting.individual import individual_epsilons
from dpsweep.accounting.jobs import user_accounting as users_module
from dpsweep.accounting.jobs.examples import (
    AccountingJob,
    Part,
    PartwiseJob,
    Result,
    account_in_process,
    inputs_of,
    store_epsilons,
)
from dpsweep.accounting.jobs.summaries import Counting
from dpsweep.accounting.jobs.user_accounting import (
    AccountShares,
    ReuseShares,
    SortRows,
    account_users,
    epsilons_of_users,
)
from dpsweep.accounting.mechanism.samplings import PoissonSampling
from dpsweep.accounting.mechanism.trace import Segment, Trace
from dpsweep.accounting.pld import epsilon_of_examples
from dpsweep.accounting.records.arrow_parts import MANIFEST
from dpsweep.accounting.records.encryption import KEY_VARIABLE
from dpsweep.accounting.records.epsilon_files import read_epsilons
from dpsweep.accounting.records.files import exists, list_files, read_bytes
from dpsweep.accounting.records.part_files import PartFiles
from dpsweep.accounting.records.sealed import read_private, write_private_sealed
from dpsweep.accounting.records.snapshot_objects import Piece, read_piece
from dpsweep.accounting.records.traces import read_trace
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.accounting.records.user_files import StoredUsers, write_users
from tests.accounting.stored_trial import job_of, snapshot, write_norms, write_trial
from tests.accounting.work import counted

DELTA, STEPS = 1e-5, (0, 40, 80)
USERS = np.random.default_rng(3).integers(0, 20, 50)
"""Of 50 examples in 7 parts: some users have several records, in different parts, and some have one."""
ANOTHER_USER = 5_000
"""More records than any other user, in all parts."""


def ids() -> NDArray[np.int64]:
    return np.asarray(snapshot(0, 50).example_ids, np.int64)


def job_in(root: str, users: NDArray[np.int64] = USERS) -> AccountingJob:
    write_trial(root)
    write_users(TrialFiles(root).users, ids(), np.arange(len(ids())), users, 8)
    folder = f"{root}/private/accounts/a/users"
    return replace(job_of(root, DELTA, "pld"), counting=Counting(500.0), folder=folder)


@pytest.fixture
def job(tmp_path: Path) -> AccountingJob:
    return job_in(str(tmp_path / "trial"))


def rows_of(job: AccountingJob) -> str:
    return TrialFiles(job.root).rows_by_user


def stored(job: AccountingJob) -> dict[str, bytes]:
    """The parts of users, decrypted."""
    return {name: read_private(f"{job.folder}/{name}") for name in list_files(job.folder) if name.endswith(".arrow")}


class Interrupted(Exception):
    """The run ends here."""


class Stages:
    """A scatter that counts what it does, and ends the run before a part of one kind of job."""

    def __init__(self, kind: type | None = None, after: int = 0) -> None:
        self.done: Counter[str] = Counter()
        self._kind, self._after = kind, after

    def __call__(self, job: PartwiseJob[Part, Result], parts: Sequence[Part]) -> Iterator[Result]:
        for number, part in enumerate(parts):
            if self._kind is type(job) and number >= self._after:
                raise Interrupted
            self.done[type(job).__name__] += 1
            yield job.account(part)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("key", ["", "ab" * 32], ids=["plain", "encrypted"])
def test_every_user_has_the_epsilon_of_all_own_records(
    tmp_path: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, key)
    users = np.where(np.arange(50) % 5 == 0, ANOTHER_USER, USERS)
    job = job_in(str(tmp_path / "trial"), users)
    summary = account_users(job, account_in_process)
    found = read_epsilons(job.folder)
    assert sorted(found.example_ids.tolist()) == np.unique(users).tolist()
    assert summary.examples == len(np.unique(users))
    contributions = np.stack([snapshot(step, 50).contributions for step in STEPS], axis=1).astype(np.float32)
    trace, counts = read_trace(TrialFiles(job.root).trace), set[int]()
    assert found.lower is None
    for user, upper in zip(found.example_ids, found.upper, strict=True):
        own = contributions[user == users]
        counts.add(min(len(own), 2))
        if len(own) == 1:
            alone = float(individual_epsilons(STEPS, own, trace, DELTA, "pld").upper[0])
            assert upper == pytest.approx(alone, rel=1e-6)
        else:
            finest = epsilon_of_examples(trace, STEPS, own, DELTA, tolerance=1e-6).upper
            assert finest * (1 - 1e-6) <= upper <= finest * (1 + 1e-3)
    assert counts == {1, 2}
    assert StoredUsers(TrialFiles(job.root).users).most_records == 10


def test_outputs_of_nearly_all_losses_are_found_in_one_iteration() -> None:
    trace = Trace(10_000, (Segment(0, 80, PoissonSampling(0.01), 1.0),))
    rows = np.random.default_rng(0).uniform(0.05, 1.0, (20, 4)).astype(np.float32)
    with counted() as work:
        epsilons_of_users(np.zeros(20, np.int64), rows, [0, 20, 40, 60], trace, DELTA)
    assert 0 < work.losses < 16_000  # of 14,000 losses


def test_a_filter_guarantees_nothing_about_all_records_of_a_user() -> None:
    """Each record stays within its budget, but what several of a user contributed is read off the run."""
    steps = (Segment(0, 80, PoissonSampling(0.1), 2.0),)
    plain = Trace(50, steps, contributions="output_specific")
    filtered = replace(plain, filter=calibrate_filter(plain, 1.0, DELTA))
    rows = np.full((3, 1), 0.5, np.float32)
    found = epsilons_of_users(np.array([7, 7, 8]), rows, [0], filtered, DELTA)
    assert found.kind == "output_specific"
    together = epsilon_of_examples(filtered, [0], rows[:2], DELTA).upper
    alone = individual_epsilons([0], rows[2:], filtered, DELTA, "pld").upper[0]
    assert found.upper.tolist() == pytest.approx([together, alone], rel=1e-3)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("root", ["local", "mock://users/trial"])
def test_the_bits_do_not_depend_on_how_rows_are_sorted(
    tmp_path: Path, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each share reads all norms; or rows are sorted by one task, by four, or by one for each part."""
    job, found = job_in(str(tmp_path / "trial") if root == "local" else root), list[dict[str, bytes]]()
    for direct, least, tasks in ((7, 1, 0), (2, 1, 1), (2, 4, 4), (2, 64, 7)):
        monkeypatch.setattr(users_module, "DIRECT", direct)
        monkeypatch.setattr(users_module, "LEAST_TASKS", least)
        again, stages = replace(job, folder=f"{job.folder}-{tasks}"), Stages()
        account_users(again, stages)
        assert stages.done == Counter({"SortRows": tasks, "AccountShares": 7})
        found.append({**stored(again), MANIFEST: read_bytes(f"{again.folder}/{MANIFEST}")})
        assert list_files(rows_of(job)) == ()
    assert found[1:] == found[:1] * 3
    assert sorted(found[0]) == [MANIFEST, *(f"part-{share:05d}.arrow" for share in range(7))]


def test_what_is_sorted_together_fits_the_memory(job: AccountingJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(users_module, "LEAST_TASKS", 1)
    monkeypatch.setattr(users_module, "SORTED_BYTES", 3 * 8 * len(STEPS) * 4)
    stages = Stages()
    account_users(job, stages)
    assert stages.done["SortRows"] == 3, "seven parts, three at a time"


def test_every_byte_is_read_once(job: AccountingJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the norms, and of the sorted rows, whose pieces without rows nobody asks for."""
    norms, pieces = Counter[tuple[int, int]](), list[Piece]()
    read = PartFiles._stored

    def noted(part: PartFiles, number: int) -> bytes:
        norms[part.part, number] += 1
        return read(part, number)

    def noted_piece(place: Piece) -> bytes:
        pieces.append(place)
        return read_piece(place)

    monkeypatch.setattr(PartFiles, "_stored", noted)
    monkeypatch.setattr("dpsweep.accounting.records.user_rows.read_piece", noted_piece)
    account_users(job, account_in_process)
    assert norms == Counter({(part, number): 1 for part in range(7) for number in range(len(STEPS))})
    assert len(pieces) == len(set(pieces))
    shares, parts = USERS % 7, np.arange(50) // 8
    assert len(pieces) == len(np.unique(shares * 7 + parts))


def test_the_manifests_are_read_by_the_caller_alone(job: AccountingJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have a hash for every part: at 1e8 examples and 300 snapshots, 37 MB."""
    read: list[str] = []

    def noted(uri: str) -> bytes:
        read.append(uri)
        return read_private(uri)

    norms = TrialFiles(job.root).norms
    monkeypatch.setattr("dpsweep.accounting.records.sealed.read_private", noted)
    account_users(job, account_in_process)
    found = sorted(uri.removeprefix(norms) for uri in read if uri.startswith(norms))
    assert found == ["/complete.json", *(f"/step={step:08d}/manifest.json" for step in STEPS)]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize("kind", [SortRows, AccountShares])
def test_an_interrupted_run_is_continued(job: AccountingJob, kind: type, after: int) -> None:
    """Killed while rows are sorted, between sorting and accounting, and while shares are accounted."""
    whole = replace(job, folder=f"{job.folder}-whole")
    summary = account_users(whole, account_in_process)
    with pytest.raises(Interrupted):
        account_users(job, Stages(kind, after))
    assert exists(f"{rows_of(job)}/part-00002.json") == (after > 0 or kind is AccountShares)
    written = {name: Path(rows_of(job), name).stat().st_ino for name in list_files(rows_of(job))}
    stages = Stages(AccountShares, 1)
    with pytest.raises(Interrupted):
        account_users(job, stages)
    again = {name: Path(rows_of(job), name).stat().st_ino for name in list_files(rows_of(job))}
    assert written.items() <= again.items(), "what is there is not written again"
    last = Stages()
    continued = account_users(job, last)
    taken = 1 + after if kind is AccountShares else 1
    assert last.done == Counter({"ReuseShares": taken, "SortRows": 7, "AccountShares": 7 - taken})
    assert stored(job) == stored(whole)
    np.testing.assert_array_equal(continued.histogram.counts, summary.histogram.counts)
    assert continued.everyone.shares == summary.everyone.shares
    assert list_files(rows_of(job)) == ()


def test_what_is_stored_is_taken_up_and_what_is_damaged_is_computed_again(job: AccountingJob) -> None:
    account_users(job, account_in_process)
    whole, stages = stored(job), Stages()
    account_users(job, stages)
    assert stages.done == Counter({"ReuseShares": 7})
    part = Path(job.folder, "part-00003.arrow")
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    stages = Stages()
    account_users(job, stages)
    assert stages.done == Counter({"ReuseShares": 7, "AccountShares": 1})
    assert stored(job) == whole


@pytest.mark.parametrize("key", ["", "ab" * 32], ids=["plain", "encrypted"])
def test_sorted_rows_are_private(job: AccountingJob, key: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(KEY_VARIABLE, key)
    job = job_in(str(tmp_path / "secret"))
    with pytest.raises(Interrupted):
        account_users(job, Stages(AccountShares))
    folder = Path(rows_of(job))
    assert folder.stat().st_mode & 0o777 == 0o700
    files = sorted(folder.iterdir())
    assert [path.name for path in files] == [
        f"part-{part:05d}.{kind}" for part in range(7) for kind in ("arrow", "json")
    ]
    for path in files:
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.read_bytes().startswith(b"dpsweep-encrypted") == bool(key)
    account_users(job, account_in_process)
    assert not folder.exists()


@pytest.mark.thinned(2)
@pytest.mark.parametrize("key", ["", "ab" * 32], ids=["plain", "encrypted"])
def test_damage_to_sorted_rows_is_named_and_does_not_last(
    tmp_path: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flipped byte between sorting and accounting, a file that is cut, and one that is missing."""
    monkeypatch.setenv(KEY_VARIABLE, key)
    job = job_in(str(tmp_path / "trial"))
    whole = replace(job, folder=f"{job.folder}-whole")
    account_users(whole, account_in_process)

    class Damaging(Stages):
        def __init__(self, content: bytes | None) -> None:
            super().__init__()
            self.content = content

        def __call__(self, job: PartwiseJob[Part, Result], parts: Sequence[Part]) -> Iterator[Result]:
            if isinstance(job, AccountShares):
                path = Path(rows_of(job.job), "part-00004.arrow")
                path.unlink() if self.content is None else path.write_bytes(self.content)
            return super().__call__(job, parts)

    with pytest.raises(Interrupted):
        account_users(job, Stages(AccountShares))
    intact = Path(rows_of(job), "part-00004.arrow").read_bytes()
    middle = len(intact) // 2
    for content in (intact[:middle] + bytes([intact[middle] ^ 1]) + intact[middle + 1 :], intact[:-1], None):
        with pytest.raises(DataCorruption, match=r"rows-by-user/part-00004\.arrow.*account the trial again"):
            account_users(replace(job, folder=f"{job.folder}-{len(content or b'')}"), Damaging(content))
    account_users(job, account_in_process)
    assert stored(job) == stored(whole)
    assert list_files(rows_of(job)) == ()


def test_users_of_few_parts_are_divided_among_tasks(job: AccountingJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that cores share the work, and its progress shows."""
    whole = replace(job, folder=f"{job.folder}-whole")
    account_users(whole, account_in_process)
    monkeypatch.setattr(users_module, "USERS_AT_ONCE", 2)
    stages = Stages()
    account_users(job, stages)
    assert stages.done == Counter({"SortRows": 7, "AccountShares": -(-len(np.unique(USERS)) // 2)})
    found, expected = read_epsilons(job.folder), read_epsilons(whole.folder)
    assert dict(zip(found.example_ids, found.upper, strict=True)) == dict(
        zip(expected.example_ids, expected.upper, strict=True)
    )


def test_a_shared_record_counts_for_each_of_its_users(tmp_path: Path) -> None:
    root = str(tmp_path / "trial")
    write_trial(root, examples=12, rows_per_part=4)
    owned = np.repeat(np.arange(12), 1 + np.arange(12) % 3)
    users = np.arange(len(owned)) % 4
    write_users(TrialFiles(root).users, np.asarray(snapshot(0, 12).example_ids), owned, users, 4)
    job = replace(job_of(root, DELTA, "pld"), counting=Counting(500.0), folder=f"{root}/private/accounts/a/users")
    account_users(job, account_in_process)
    found = read_epsilons(job.folder)
    contributions = np.stack([snapshot(step, 12).contributions for step in STEPS], axis=1).astype(np.float32)
    assert sorted(found.example_ids.tolist()) == list(range(4))
    for user, upper in zip(found.example_ids.tolist(), found.upper, strict=True):
        own = contributions[owned[users == user]]
        expected = epsilon_of_examples(read_trace(f"{root}/trace.arrow"), STEPS, own, DELTA).upper
        assert upper == pytest.approx(expected, rel=1e-3)
    assert StoredUsers(TrialFiles(root).users).most_records == np.bincount(users).max()


@pytest.mark.long
def test_other_users_are_another_question(job: AccountingJob, tmp_path: Path) -> None:
    """What an interrupted run stored for other users of the same examples is not taken up."""
    with pytest.raises(Interrupted):
        account_users(job, Stages(AccountShares, 3))
    users = Path(TrialFiles(job.root).users)
    for path in users.iterdir():
        path.unlink()
    write_users(str(users), ids(), np.arange(len(USERS)), USERS[::-1], 8)
    account_users(job, account_in_process)
    other = job_in(str(tmp_path / "other"), USERS[::-1])
    account_users(other, account_in_process)
    assert stored(job) == stored(other)


def test_other_norms_are_another_question(job: AccountingJob) -> None:
    """Neither rows nor epsilons of earlier norms are taken up."""
    with pytest.raises(Interrupted):
        account_users(job, Stages(AccountShares, 3))
    norms, stages = TrialFiles(job.root).norms, Stages()
    shutil.rmtree(norms)
    write_norms(norms, 8, *(snapshot(step, 50, seed=1) for step in STEPS))
    account_users(job, stages)
    assert stages.done == Counter({"ReuseShares": 3, "SortRows": 7, "AccountShares": 7})
    again = replace(job, folder=f"{job.folder}-again")
    account_users(again, account_in_process)
    assert stored(job) == stored(again)


def test_inputs_depend_on_all_that_determines_epsilons(job: AccountingJob) -> None:
    trace = read_trace(TrialFiles(job.root).trace)
    asked = ((job, trace, "a"), (job, trace, "b"), (replace(job, delta=1e-6), trace, "a"), (job, Trace(50), "a"))
    assert len({inputs_of(*each) for each in asked}) == 4
    assert ReuseShares(job, "a").root == job.root


def test_a_small_data_set_sorts_nothing(tmp_path: Path) -> None:
    root = str(tmp_path / "trial")
    write_trial(root, examples=50, rows_per_part=25)
    write_users(TrialFiles(root).users, ids(), np.arange(len(USERS)), USERS, 25)
    job = replace(job_of(root, DELTA, "pld"), counting=Counting(500.0), folder=f"{root}/private/accounts/a/users")
    stages = Stages()
    account_users(job, stages)
    assert stages.done == Counter({"AccountShares": 2})


def test_a_trial_without_users_says_what_to_do(tmp_path: Path) -> None:
    root = str(tmp_path / "trial")
    write_trial(root)
    with pytest.raises(InvalidInput, match="data name no users"):
        account_users(job_of(root, DELTA, "pld"), account_in_process)


def test_users_of_other_examples_and_damage_are_refused(job: AccountingJob) -> None:
    users = Path(TrialFiles(job.root).users)
    part = users / "part-00001.arrow"
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    with pytest.raises(DataCorruption, match="sha256 differs"):
        account_users(job, account_in_process)
    for changed, rows_per_part in ((ids() + 1, 8), (ids(), 16)):
        for path in users.iterdir():
            path.unlink()
        write_users(str(users), changed, np.arange(len(USERS)), USERS, rows_per_part)
        with pytest.raises(DataCorruption, match="is of other examples than the norms"):
            account_users(job, account_in_process)
    summary = users / "users.json"
    summary.write_text(json.dumps({**json.loads(summary.read_text()), "most_records": 1}))
    with pytest.raises(DataCorruption, match="differs from its checksum"):
        StoredUsers(str(users))
    for forged in (b"{}", b'{"most_records": []}', b'{"most_records": -1}'):
        write_private_sealed(str(summary), forged)
        with pytest.raises(DataCorruption, match="holds no numbers of users and records"):
            StoredUsers(str(users))


def test_examples_are_accounted_as_before(job: AccountingJob) -> None:
    """Both questions may be asked of one trial."""
    account_users(job, account_in_process)
    assert store_epsilons(job_of(job.root, DELTA)).examples == 50
