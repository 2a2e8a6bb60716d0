"""`dpsweep account` accounts trials again: its numbers are those of the accountants, and nothing is done twice."""

from __future__ import annotations

import json
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import yaml
from pyarrow import parquet

from dpsweep import accounting
from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.errors import DataCorruption, InvalidInput
from dpsweep.accounting.individual.epsilons import IndividualEpsilons, individual_epsilons
from dpsweep.accounting.mechanism.estimates import PrivacyEstimate
from dpsweep.accounting.pld import epsilon_of_examples
from dpsweep.accounting.records.epsilon_files import read_epsilons
from dpsweep.accounting.records.shards import NormShards
from dpsweep.accounting.records.traces import read_trace
from dpsweep.accounting.records.user_files import StoredUsers
from dpsweep.orchestration.commands import upkeep_commands
from dpsweep.orchestration.comparison import claims
from dpsweep.orchestration.store import remembered
from dpsweep.orchestration.store.attempts import Attempt, AttemptLog
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.store.results import read_result
from tests.orchestration.execution.test_upkeep import KEYS, TEXT, files, trained_sweep
from tests.orchestration.execution.test_upkeep import trained as trained
from tests.orchestration.invoking import invoked, printed, refused
from tests.orchestration.sample_grids import keys_of, small
from tests.orchestration.tracking.recordings import client_of, runs_of

__all__ = ["files"]

DELTA = 1e-7


def asked(files: SweepFiles, *arguments: object) -> tuple[object, ...]:
    return ("account", files.root, "--address", "in-process", *arguments)


def found(files: SweepFiles, *arguments: str) -> list[dict[str, Any]]:
    accounts: list[dict[str, Any]] = json.loads(printed(*asked(files, "--json", *arguments)))["accounts"]
    return accounts


@pytest.mark.long
def test_another_delta_and_method_give_what_the_accountants_give(files: SweepFiles) -> None:
    before = {key: read_epsilons(files.trial(key).epsilons).upper for key in KEYS}
    answers = found(files, "--delta", str(DELTA), "--individual", "pld", "--group-sizes", "2,3")
    assert [answer["key"] for answer in answers] == KEYS
    for answer in answers:
        trial = files.trial(answer["key"])
        trace, norms = read_trace(trial.trace), NormShards(trial.norms)
        assert answer["epsilon"] == account(trace, DELTA, "auto").epsilon
        assert [each["epsilon"] for each in answer["groups"]] == [
            account(trace, DELTA, "pld", k).epsilon for k in (2, 3)
        ]
        part = norms.read(0)
        expected = individual_epsilons(part.steps, part.contributions, trace, DELTA, "pld").upper
        stored = read_epsilons(f"{answer['folder']}/epsilons")
        np.testing.assert_array_equal(stored.upper, expected)
        assert (stored.delta, stored.method) == (DELTA, "pld")
        capped = np.minimum(expected, answer["epsilon"])
        assert answer["individuals"]["mean"] == pytest.approx(capped.mean(), rel=1e-12)
        assert answer["individuals"]["median"] == pytest.approx(np.median(capped), rel=1e-12)
        assert stat.S_IMODE(Path(answer["folder"], "account.json").stat().st_mode) == 0o600
        np.testing.assert_array_equal(read_epsilons(trial.epsilons).upper, before[answer["key"]])
    printed("verify", files.root)


def test_what_is_stored_is_not_computed_again(files: SweepFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    first, computed = found(files, "--trial", KEYS[0], "--delta", str(DELTA)), list[int]()

    def observed(*given: Any) -> IndividualEpsilons:
        computed.append(1)
        return individual_epsilons(*given)

    monkeypatch.setattr("dpsweep.accounting.jobs.examples.individual_epsilons", observed)
    assert found(files, "--trial", KEYS[0], "--delta", str(DELTA)) == first
    assert computed == []
    damaged = next(Path(first[0]["folder"], "epsilons").glob("*.arrow"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    assert "accounts" in refused(DataCorruption, "verify", files.root)
    assert found(files, "--trial", KEYS[0], "--delta", str(DELTA)) == first
    assert computed == [1], "the damaged part, anew"


@pytest.fixture
def code_is_read_again() -> Iterator[None]:
    yield
    remembered._code.cache_clear()


def test_what_a_killed_one_left_is_deleted(files: SweepFiles) -> None:
    ask = ("--trial", KEYS[0], "--delta", "3e-7")
    (first,) = found(files, *ask)
    folder = Path(first["folder"])
    left = [folder / ".account.json.0123456789abcdef.partial", folder / "epsilons" / ".x.0123456789abcdef.partial"]
    for each in left:
        each.write_bytes(b"{")
    assert found(files, *ask) == [first]
    assert [each for each in left if each.exists()] == []


@pytest.mark.long
@pytest.mark.usefixtures("code_is_read_again")
def test_worst_cases_are_not_computed_again(files: SweepFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor where nobody but the user can write; anew if that is damaged, or another size, delta or code is asked for."""
    computed = list[int]()

    def observed(*given: Any) -> PrivacyEstimate:
        computed.extend([given[3]] if given[1] == DELTA else [])
        return account(*given)

    monkeypatch.setattr(claims, "account", observed)
    monkeypatch.setattr(remembered, "user_cache", lambda: tmp_path / "cache")
    ask = ("--trial", KEYS[0], "--delta", str(DELTA), "--group-sizes")
    first = found(files, *ask, "2,3")
    assert {*computed} == {1, 2, 3}
    computed.clear()
    assert found(files, *ask, "2,3") == first
    assert computed == []
    found(files, *ask, "2..4")
    assert 2 not in computed
    kept = tmp_path / "cache" / "answers" / "answers.db"
    assert (stat.S_IMODE(kept.stat().st_mode), stat.S_IMODE(kept.parent.stat().st_mode)) == (0o600, 0o700)
    kept.write_bytes(b"no database")
    computed.clear()
    assert found(files, *ask, "2,3") == first
    assert {1, 2, 3} <= {*computed}, "without a store that can be read"
    kept.unlink()
    found(files, *ask, "2,3")
    changed = Path(shutil.copytree(Path(accounting.__file__).parent, tmp_path / "accounting"))
    with changed.joinpath("pld", "loss.py").open("a") as source:
        source.write("# another bound\n")
    remembered._code.cache_clear()
    computed.clear()
    monkeypatch.setattr(accounting, "__file__", str(changed / "__init__.py"))
    assert found(files, *ask, "2,3") == first
    assert {1, 2, 3} <= {*computed}, "another source file"
    remembered._code.cache_clear()
    computed.clear()
    monkeypatch.setattr("importlib.metadata.version", lambda package: "0.0.1")
    assert found(files, *ask, "2,3") == first
    assert {1, 2, 3} <= {*computed}, "another version"


def test_the_private_report_shows_it_and_no_other_file(files: SweepFiles) -> None:
    for sizes in ("2", "3"):
        found(files, "--delta", str(DELTA), "--group-sizes", sizes)
    page = Path(files.private_report).read_text()
    assert "Accounted again" in page
    assert re.search(r"any 2 records: ε [\d.]+; any 3 records: ε", page), "nor is what an earlier one found lost"
    assert "Accounted again" not in Path(files.report).read_text()
    assert not (Path(files.root) / "mlflow.db").exists()


@pytest.mark.long
def test_a_raw_release_shows_it_in_the_report_and_in_mlflow(tmp_path: Path) -> None:
    files = trained_sweep(tmp_path / "out", TEXT + "release: raw\n")
    answers = found(files, "--delta", str(DELTA), "--individual", "pld")
    assert "Accounted again" in Path(files.report).read_text()
    runs = runs_of(client_of(Path(files.root)))
    metrics = {run.data.tags.get("dpsweep.trial_key"): run.data.metrics for run in runs}
    for answer in answers:
        values = {name: value for name, value in metrics[answer["key"]].items() if "/account/" in name}
        assert sorted(values.values()) == sorted(
            (answer["epsilon"], answer["individuals"]["mean"], answer["individuals"]["median"])
        )
    assert {run.info.status for run in runs} == {"FINISHED"}


def test_every_user_is_accounted_by_all_own_records(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lines = [f"{x:.3f},{'yes' if x > 0 else 'no'},u{rng.integers(0, 40)}" for x in rng.normal(size=160)]
    (tmp_path / "visits.csv").write_text("\n".join(["x,y,who", *lines]))
    data = {"name": "csv", "path": str(tmp_path / "visits.csv"), "label": "y", "user": "who", "test_fraction": 0.2}
    sweep = {**yaml.safe_load(TEXT), "data": {**data, "classes": ["no", "yes"], "ranges": {"x": [-4, 4]}}}
    files = trained_sweep(tmp_path / "out", yaml.safe_dump(sweep))
    answer, _ = found(files, "--by-user")
    trial, users = files.trial(answer["key"]), answer["users"]
    trace, norms = read_trace(trial.trace), NormShards(trial.norms).read(0)
    stored, whose = read_epsilons(f"{answer['folder']}/users"), StoredUsers(trial.users)
    owners = whose.owned(NormShards(trial.norms).files(0)).users().ids
    assert (users["users"], users["most_records"]) == (len(np.unique(owners)), np.bincount(owners).max())
    most = int(np.bincount(owners).argmax())
    expected = epsilon_of_examples(trace, norms.steps.tolist(), norms.contributions[owners == most], stored.delta).upper
    assert stored.upper[stored.example_ids == most] == pytest.approx(expected, rel=1e-3)
    assert users["largest"] == stored.upper.max()
    text = printed(*asked(files, "--trial", answer["key"], "--by-user"))
    told = f"{users['users']} users of up to {users['most_records']} records"
    assert told in text
    found(files, "--trial", answer["key"])
    assert told in Path(files.private_report).read_text()
    assert told not in Path(files.report).read_text()
    printed("verify", files.root)
    for part, next_step in (
        (f"{trial.users}/part-00000.arrow", "delete the trial's folder and resume"),
        (f"{answer['folder']}/users/part-00000.arrow", "delete its folder, and account the trial again"),
    ):
        intact = Path(part).read_bytes()
        Path(part).write_bytes(intact[:-1])
        reason = refused(DataCorruption, "verify", files.root)
        assert part in reason
        assert reason.count(next_step) == 1
        Path(part).write_bytes(intact)


def test_the_largest_epsilon_of_a_user_is_rounded_up(capsys: pytest.CaptureFixture[str]) -> None:
    users = SimpleNamespace(users=2, most_records=3, statistics=SimpleNamespace(median=1.0), largest=2.0004)
    upkeep_commands._print_details(SimpleNamespace(groups=(), users=users, folder="x"), ())  # type: ignore[arg-type]
    assert "largest ε 2.01" in capsys.readouterr().out


def test_given_records_are_accounted_over_all_trials_together(files: SweepFiles) -> None:
    """From their own contributions to each; what is shown a second time counts with the most that is possible."""
    both = [set(NormShards(files.trial(key).norms).read(0).example_ids.tolist()) for key in KEYS]
    ids, runs = sorted([max(both[0] & both[1]), max(both[0] - both[1], default=min(both[0]))]), []
    given = f"{ids[1]},{ids[0]}"
    for key in KEYS:
        trial = files.trial(key)
        trace, norms = read_trace(trial.trace), NormShards(trial.norms).read(0)
        rows = [np.flatnonzero(norms.example_ids == example) for example in ids]
        own = np.array([norms.contributions[row[0]] if len(row) else 0.0 * norms.contributions[0] for row in rows])
        runs.append((trace, norms.steps.tolist(), own))
    expected = accounting.epsilon_of_examples_together(runs, DELTA)

    def together_of(*arguments: str, included: str = "") -> dict[str, Any]:
        result = invoked(*asked(files, "--json", "--delta", DELTA, "--examples", given, *arguments))
        assert result.exit_code == 0, result.output
        assert f"these 2 records in all these trials together{included}: ε" in result.stderr
        assert "  no guarantee (norms_estimated): gradient norms" in result.stderr
        answer: dict[str, Any] = json.loads(result.stdout)["together"]
        return answer

    together = together_of()
    assert (together["epsilon"], together["group_size"]) == (pytest.approx(expected.epsilon, rel=1e-9), 2)
    assert together["kind"] == "estimate"
    assert "known_seed" in together["reasons"]
    assert together_of("--trial", KEYS[0])["epsilon"] < together["epsilon"]
    log, result = AttemptLog(files, KEYS), read_result(files.trial(KEYS[0]).result)
    assert result is not None
    for number in (1, 2):
        log.take_up(KEYS[0], continues=False)
        log.note(Attempt(KEYS[0], number, result.spec.delta, runs[0][0], 0, ended=True, reasons=result.reasons))
    twice = together_of(included=", 1 earlier start of them included")
    most = (runs[0][0], [0], [[1.0]] * 2)
    assert twice["epsilon"] == pytest.approx(
        accounting.epsilon_of_examples_together([most, *runs], DELTA).epsilon, rel=1e-9
    )
    unknown = refused(InvalidInput, *asked(files, "--examples", f"{ids[0]},100000"))
    assert "--examples has 100000, but no trial" in unknown
    largest = max(int(NormShards(files.trial(key).norms).read(0).example_ids.max()) for key in KEYS)
    assert f"the largest is {largest}" in unknown


def test_one_record_has_a_lower_bound_if_all_that_it_contributed_is_known(tmp_path: Path) -> None:
    """In fixed batches a record that contributes 0 displaces others; a trial that did not train on it costs nothing."""
    digits = {"name": "digits", "keep": dict.fromkeys(range(10), 0.1)}
    data, batches = [digits, {**digits, "split_seed": 1}], {"method": "fixed", "batch_size": 16}
    own = {"clipping": {"name": "flat", "bound": 1.0}, "noise": "constant", "seeds": [0], "model": "logistic"}
    text = small(data=data, sampling=batches, epochs=1, **own)
    files, (first, second) = trained_sweep(tmp_path / "out", text), keys_of(text).values()
    norms = [NormShards(files.trial(key).norms).read(0) for key in (first, second)]
    only = min({*norms[0].example_ids.tolist()} - {*norms[1].example_ids.tolist()})

    def together() -> dict[str, Any]:
        asks = asked(files, "--json", "--delta", DELTA, "--individual", "rdp", "--examples", only)
        answer: dict[str, Any] = json.loads(printed(*asks))["together"]
        return answer

    trace, row = read_trace(files.trial(first).trace), norms[0].example_ids == only
    expected = epsilon_of_examples(trace, norms[0].steps.tolist(), norms[0].contributions[row], DELTA)
    found = together()
    assert (found["epsilon"], found["lower_epsilon"]) == pytest.approx((expected.upper, expected.lower), rel=1e-3)
    log, result = AttemptLog(files, (first, second)), read_result(files.trial(first).result)
    assert result is not None
    for number in (1, 2):
        log.take_up(first, continues=False)
        log.note(Attempt(first, number, result.spec.delta, trace, 0, ended=True, reasons=result.reasons))
    assert together()["epsilon"] > found["epsilon"]
    assert together()["lower_epsilon"] is None


def test_data_without_users_say_so(files: SweepFiles) -> None:
    assert "leave --by-user out" in refused(InvalidInput, *asked(files, "--by-user"))


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_examples_are_summarised_by_the_groups_of_a_file(files: SweepFiles, tmp_path: Path, suffix: str) -> None:
    epsilons = read_epsilons(files.trial(KEYS[0]).epsilons)
    names = np.where(epsilons.example_ids % 3 == 0, "third", "rest")
    path, order = tmp_path / f"groups.{suffix}", np.random.default_rng(0).permutation(len(names))
    if suffix == "csv":
        rows = [f"{i},{name}" for i, name in zip(epsilons.example_ids[order], names[order], strict=True)]
        path.write_text("\n".join(["example_id,group", *rows]))
    else:
        parquet.write_table(pa.table({"group": names[order], "example_id": epsilons.example_ids[order]}), path)
    (answer,) = found(files, "--trial", KEYS[0], "--group-by", str(path))
    for group in answer["individuals"]["groups"]:
        own = np.minimum(epsilons.upper[names == group["name"]], answer["epsilon"])
        assert (group["examples"], group["mean"]) == (len(own), pytest.approx(own.mean(), rel=1e-12))
    assert [group["name"] for group in answer["individuals"]["groups"]] == ["rest", "third"]


def test_a_file_of_groups_must_be_whole(files: SweepFiles, tmp_path: Path) -> None:
    path = tmp_path / "groups.csv"
    for text, reason in (
        ("example_id,group\n0,a\n", "gives no group to some training examples"),
        ("example_id,group\n0,a\n0,b\n", "names an example twice"),
        ("id,group\n0,a\n", "needs the columns example_id"),
        ("example_id,group\nx,a\n", "needs the columns example_id"),
        ("example_id,group\n", "has no rows"),
    ):
        path.write_text(text)
        assert reason in refused(InvalidInput, *asked(files, "--group-by", path))
        path = path.with_name(f"{path.stem}x.csv")
    assert "does not exist" in refused(InvalidInput, *asked(files, "--group-by", tmp_path / "none.csv"))


def test_what_cannot_be_accounted_is_one_clear_line(files: SweepFiles) -> None:
    for arguments, reason in (
        (("--trial", "nothing"), f"has no finished private trial 'nothing'; it has: {', '.join(KEYS)}"),
        (("--delta", "2"), "delta is 2"),
        (("--individual", "pdl"), "did you mean 'pld'"),
        (("--group-sizes", "0"), "--group-sizes has '0'"),
    ):
        assert reason in refused(InvalidInput, *asked(files, *arguments))
    printed("prune", files.root, "--norms", "--older-than", "5")
    assert refused(InvalidInput, *asked(files)).startswith(f"the norms of {KEYS[0]} were deleted")
    printed(*asked(files, "--trial", KEYS[1]))
    shard = next(Path(files.trial(KEYS[1]).norms).glob("*/*.arrow"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    assert "sha256 differs" in refused(DataCorruption, *asked(files, "--delta", DELTA, "--trial", KEYS[1]))


def test_verify_reads_what_lies_beside_an_account(files: SweepFiles) -> None:
    (account_of_trial, *_) = found(files, "--delta", "1e-6")
    for name in ("epsilons/part-00000.json", "account.json", "epsilons/part-00000.arrow"):
        file = Path(account_of_trial["folder"], name)
        intact = file.read_bytes()
        file.write_bytes(intact[: len(intact) // 2] + b"?" + intact[len(intact) // 2 + 1 :])
        assert str(file) in refused(DataCorruption, "verify", files.root)
        file.write_bytes(intact)
    note = Path(account_of_trial["folder"], "epsilons", "part-00000.json")
    note.unlink()
    assert invoked("verify", files.root).exit_code == 0, "a note is needed only by another accounting"
