"""`dpsweep status`: what it says of a sweep that runs, waits, has ended, or whose driver is gone."""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from dpsweep.accounting.errors import DataCorruption, InvalidInput
from dpsweep.orchestration.commands.cluster_jobs import tell_what_is_missing
from dpsweep.orchestration.commands.status_command import has_died, warn_of_another
from dpsweep.orchestration.execution.submission import SubmittedSweep
from dpsweep.orchestration.store.layout import LOCK
from dpsweep.orchestration.store.published import TrialState
from dpsweep.orchestration.store.status import NOTHING_RECORDED, RecordingStatus
from dpsweep.orchestration.store.status_snapshot import (
    STALE_AFTER,
    ClusterSnapshot,
    NodeSnapshot,
    SweepSnapshot,
    TrialSnapshot,
    read_snapshot,
    write_snapshot,
)
from tests.hostile.of_folders import write_json
from tests.known import known
from tests.orchestration.invoking import invoked, refused
from tests.orchestration.processes import Command
from tests.orchestration.sample_results import stored_sample
from tests.orchestration.sample_snapshots import snapshot_of

TRIALS = (
    TrialSnapshot("flat-seed0", TrialState.FINISHED, 20, 20, 4, 0.91, 2.5, True),
    TrialSnapshot("flat-seed1", TrialState.TRAINING, 10, 20, 2, 0.85, 1.7, True),
    TrialSnapshot("flat-seed2", TrialState.FAILED, 0, 20, error="ValueError in f (a.py:3)"),
    TrialSnapshot("flat-seed3", TrialState.PENDING, 0, 20),
)


def snapshot(age: float = 2.0, state: str = "running", cluster: ClusterSnapshot | None = None) -> SweepSnapshot:
    driver = {"host": "head", "pid": 17, "job": "small-0123456789"}
    return snapshot_of(*TRIALS, age=age, state=state, elapsed=245.0, seconds_left=61.0, cluster=cluster, **driver)


def status(command: Command, *arguments: object) -> str:
    ended = command("status", *arguments)
    assert ended.code == 0, ended.err
    return ended.out


def refusal(command: Command, code: int, *arguments: object) -> str:
    ended = command("status", *arguments)
    (line,) = ended.err.splitlines()
    assert ended.code == code
    return line


def test_a_running_sweep(tmp_path: Path, command: Command) -> None:
    nodes = (NodeSnapshot("a", {"CPU": 4.0}), NodeSnapshot("b", {"CPU": 4.0, "GPU": 1.0}))
    cluster = ClusterSnapshot(nodes, {"CPU": 1.0}, {"CPU": 0.0}, 1, {})
    write_snapshot(f"{tmp_path}/status.json", snapshot(cluster=cluster), private=False)
    lines = status(command, tmp_path).splitlines()
    assert lines[0] == (
        "small: running, 2 of 4 trials done, 1 running, 1 waiting, 1 failed; 4:05 elapsed, 1:01 to finish"
    )
    assert "driver on head (pid 17), job small-0123456789, seen " in lines[1]
    assert "2 nodes: CPU 8 (0 free), GPU 1 (0 free); 1 trial waits for CPU 1 each" in lines[2]
    (row,) = [line for line in lines if line.startswith("flat-seed1")]
    assert row.split() == ["flat-seed1", "training", "2", "10/20", "1.70", "accuracy", "85.0%"]
    assert lines[-1] == "failed flat-seed2: ValueError in f (a.py:3)"


def test_nothing_runs_in_a_sweep_that_was_interrupted(tmp_path: Path, command: Command) -> None:
    write_snapshot(f"{tmp_path}/status.json", snapshot(state="interrupted"), private=False)
    lines = status(command, tmp_path).splitlines()
    assert lines[0].startswith("small: interrupted, 2 of 4 trials done, 1 interrupted, 1 waiting, 1 failed")
    (row,) = [line for line in lines if line.startswith("flat-seed1")]
    assert row.split()[1] == "interrupted"


def test_a_shortage(tmp_path: Path, command: Command) -> None:
    cluster = ClusterSnapshot((NodeSnapshot("a", {"CPU": 4.0}),), {"CPU": 1.0, "GPU": 1.0}, {}, 4, {"GPU": 1.0})
    write_snapshot(f"{tmp_path}/status.json", snapshot(cluster=cluster), private=False)
    assert "4 trials wait: no node can give a trial GPU 1" in status(command, tmp_path)


@pytest.mark.parametrize("state", ["running", "stopped"])
def test_no_text_of_a_status_is_markup_or_changes_the_terminal(state: str, tmp_path: Path, command: Command) -> None:
    odd = "[/x] \x1b]0;title\nerror: forged"
    trial = replace(TRIALS[0], key=odd, accuracy=None, scores={odd: 0.5})
    cluster = ClusterSnapshot(
        (NodeSnapshot(odd, {odd: 4.0}),), {odd: 1.0}, {}, 1, {odd: 1.0} if state == "running" else {}
    )
    forged = replace(snapshot(state=state, cluster=cluster), name=odd, host=odd, job=odd, reason=odd, limits=(odd,))
    write_snapshot(f"{tmp_path}/status.json", replace(forged, trials=(trial,)), private=False)
    shown = status(command, tmp_path)
    assert "\x1b" not in shown
    assert not any(line.startswith("error:") for line in shown.splitlines())
    assert shown.count(r"[/x] \x1b]0;title") >= 7


def test_a_stale_one_is_called_stale_with_its_age(tmp_path: Path, command: Command) -> None:
    write_snapshot(f"{tmp_path}/status.json", snapshot(age=7500.0), private=False)
    first = status(command, tmp_path).splitlines()[0]
    assert first.startswith("small: stale: no sign of its driver for 2 h 5 min; then 2 of 4 trials done")
    printed = json.loads(status(command, tmp_path, "--json"))
    assert printed["stale"] is True
    assert printed["age"] >= 7500.0


def test_a_driver_whose_clock_is_ahead_is_not_called_seen_just_now(tmp_path: Path, command: Command) -> None:
    write_snapshot(f"{tmp_path}/status.json", snapshot(age=-75.5), private=False)
    assert "job small-0123456789, whose clock is 1 min 1" in status(command, tmp_path).splitlines()[1]


def test_what_is_shown_may_be_old_on_a_full_disk(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_snapshot(f"{tmp_path}/status.json", snapshot(), private=False)
    assert command("status", tmp_path).err == ""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))
    told = command("status", tmp_path).err
    assert told == f"warning: the disk of {tmp_path} is full, so that what follows may be old; free some space\n"
    write_snapshot(f"{tmp_path}/status.json", snapshot(state="finished"), private=False)
    assert command("status", tmp_path).err == "", "the last status; a read-only folder has no free space either"


def test_a_driver_of_this_host_that_has_ended_is_lost(tmp_path: Path, command: Command) -> None:
    (tmp_path / LOCK).touch()
    write_snapshot(f"{tmp_path}/status.json", replace(snapshot(), host=socket.gethostname(), job=None), private=False)
    lines = status(command, tmp_path).splitlines()
    assert lines[0].startswith("small: lost, 2 of 4 trials done, 1 interrupted, 1 waiting")
    assert lines[2].startswith("its driver has ended without saying how: it was killed, or could not write; the same")


def test_a_killed_driver_of_a_job_is_awaited_as_its_supervisor_starts_it_again(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever watches sees the next driver, too."""
    (tmp_path / LOCK).touch()
    killed = replace(snapshot(), host=socket.gethostname())
    waits = iter([replace(killed, state="finished")])
    monkeypatch.setattr("time.sleep", lambda _: write_snapshot(f"{tmp_path}/status.json", next(waits), private=False))
    write_snapshot(f"{tmp_path}/status.json", killed, private=False)
    shown = [json.loads(line)["state"] for line in status(command, tmp_path, "--watch", "--json").splitlines()]
    assert shown == ["running", "finished"]


def test_a_store_whose_name_no_file_can_have_is_not_asked(tmp_path: Path, command: Command) -> None:
    forged = RecordingStatus(trials=4, store=f"sqlite:////{'a' * 300}", failure="interrupted")
    ended = replace(snapshot(state="interrupted"), recording=forged)
    write_snapshot(f"{tmp_path}/status.json", ended, private=False)
    assert status(command, tmp_path).startswith("small: interrupted")


def test_runs_in_mlflow_of_a_lost_driver_are_ended_once_it_is_silent() -> None:
    """A lock that does not reach makes a living driver look lost."""
    lost = replace(snapshot(state="lost"), recording=RecordingStatus(trials=4))
    assert not lost.may_run_in_mlflow()
    assert replace(lost, heartbeat=lost.heartbeat - STALE_AFTER).may_run_in_mlflow()


def test_nothing_starts_or_waits_for_nodes_once_the_driver_is_lost(tmp_path: Path, command: Command) -> None:
    cluster = ClusterSnapshot((), {"CPU": 1.0}, {}, 1, {}, starting=1)
    for state, starts in (("running", True), ("lost", False)):
        found = replace(snapshot(state=state, cluster=cluster), trials=(*TRIALS, replace(TRIALS[3], key="last")))
        write_snapshot(f"{tmp_path}/status.json", replace(found, host="elsewhere"), private=False)
        said = status(command, tmp_path)
        assert ("1 starting, 1 waiting" in said, "trial waits for" in said) == (starts, starts)
        assert ("2 waiting" in said) == (not starts)


@pytest.mark.parametrize("columns", ["80", "20"])
def test_keys_of_trials_are_never_broken(
    columns: str, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "individual-exponential-decay0.1-epsilon8-seed0-0d74d74fd8"
    trial, failed = replace(TRIALS[0], key=key), replace(TRIALS[2], error="ValueError in f (a.py:3) " * 20)
    write_snapshot(f"{tmp_path}/status.json", replace(snapshot(), trials=(trial, failed)), private=False)
    monkeypatch.setenv("COLUMNS", columns)
    printed = status(command, tmp_path).splitlines()
    (row,) = [line for line in printed if line.startswith(key)]
    assert row.split() == [key, "finished", "4", "20/20", "2.50", "accuracy", "91.0%"]
    assert printed[-1].rstrip().endswith("(a.py:3)"), "where output is no terminal, an error is one line"


def test_a_status_that_is_replaced_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of an object, of which a read takes the size first."""
    write_snapshot(f"{tmp_path}/status.json", snapshot(), private=False)
    whole = (tmp_path / "status.json").read_bytes()
    reads = [whole[:-40], whole]
    monkeypatch.setattr("dpsweep.accounting.records.sealed.read_bytes", lambda uri: reads.pop(0))
    found = known(read_snapshot(f"{tmp_path}/status.json"))
    assert (found.name, reads) == ("small", [])


def test_a_tuning_is_shown_until_its_sweep_has_begun(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tuning").mkdir()
    write_snapshot(f"{tmp_path}/tuning/status.json", snapshot(age=20.0), private=False)
    assert status(command, tmp_path).startswith("small (tuning): running, 2 of 4 trials done")
    write_snapshot(f"{tmp_path}/tuning/status.json", snapshot(age=10.0, state="finished"), private=False)

    def begin(seconds: float) -> None:
        write_snapshot(f"{tmp_path}/status.json", snapshot(state="finished"), private=False)

    monkeypatch.setattr("dpsweep.orchestration.commands.status_command.time.sleep", begin)
    lines = status(command, tmp_path, "--watch").splitlines()
    assert [line.split(",")[0] for line in lines] == ["small (tuning): finished", "small: finished"]


def test_a_change_is_one_line_off_a_terminal(tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is said again while the driver writes nothing new."""
    now = snapshot()
    later = [now, now, replace(now, elapsed=250.0), replace(now, elapsed=255.0, state="finished")]
    waits = iter(later)
    monkeypatch.setattr("time.sleep", lambda _: write_snapshot(f"{tmp_path}/status.json", next(waits), private=False))
    write_snapshot(f"{tmp_path}/status.json", now, private=False)
    lines = status(command, tmp_path, "--watch").splitlines()
    assert [line.split("; ")[1].split(" ")[0] for line in lines] == ["4:05", "4:10", "4:15"]


def test_json_and_watch(tmp_path: Path, command: Command) -> None:
    write_snapshot(f"{tmp_path}/status.json", snapshot(age=7500.0, state="failed"), private=False)
    (line,) = status(command, f"file://{tmp_path}", "--json", "--watch").splitlines()
    printed = json.loads(line)
    assert printed["counts"] == dict.fromkeys(printed["counts"], 1) | {"accounting": 0, "stopped": 0}
    assert (printed["stale"], printed["state"]) == (False, "failed")
    assert status(command, tmp_path, "--watch").startswith("small: failed, 2 of 4 trials done")


def test_a_folder_without_one(tmp_path: Path, command: Command) -> None:
    assert refusal(command, 2, tmp_path / "nothing").startswith(f"error: there is no {tmp_path}/nothing/status.json")
    (tmp_path / "status.json").write_text("{}")
    assert "is damaged: it is no JSON object with a checksum" in refusal(command, 1, tmp_path)


def job(state: str, name: str = "other-0123456789") -> SubmittedSweep:
    return SubmittedSweep(name, name, "/shared", state, 0.0)


def test_a_job_that_failed_before_its_sweep_began_is_not_shown_the_status_of_another(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its output holds another sweep."""
    warn_of_another(job("FAILED"), snapshot(state="finished"))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "warning: other-0123456789 has failed; what follows is not its status, but what small-012345"
    )
    with pytest.raises(InvalidInput, match=r"has stopped before its sweep had a status; `dpsweep logs other-01"):
        warn_of_another(job("STOPPED"), None)
    with pytest.raises(InvalidInput, match=r"is pending and its driver has written no status yet; ask again in some"):
        warn_of_another(job("PENDING"), None)
    warn_of_another(job("RUNNING"), snapshot(state="interrupted"))
    assert "is running; what follows is not its status, but what small-0123456789 wrote" in capsys.readouterr().err
    for asked, said in (("RUNNING", "running"), ("SUCCEEDED", "finished"), ("FAILED", "failed")):
        warn_of_another(job(asked), replace(snapshot(state=said), job=job("").id))
    assert capsys.readouterr().err == ""


def test_a_job_that_was_killed_with_its_driver_is_not_shown_as_running(capsys: pytest.CaptureFixture[str]) -> None:
    killed = replace(snapshot(), job=job("").id)
    assert not has_died(job("FAILED"), killed), "a driver that has outlived its supervisor writes on"
    silent = replace(killed, heartbeat=killed.heartbeat - STALE_AFTER)
    assert not has_died(job("RUNNING"), silent), "its supervisor starts it again"
    assert has_died(job("FAILED", "newer-0123456789"), silent)
    assert capsys.readouterr().err == ""
    assert has_died(job("FAILED"), silent)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: other-0123456789 has failed, and its driver did not say how: it was killed, or")
    assert line.endswith(
        "`dpsweep logs other-0123456789` shows what it printed, and the same `dpsweep submit` continues it"
    )


def test_a_database_of_mlflow_is_shown_with_the_command_that_serves_it(tmp_path: Path, command: Command) -> None:
    for store, shown in (
        (
            "sqlite:////srv/mlflow.db",
            "MLflow: `mlflow ui --backend-store-uri sqlite:////srv/mlflow.db`, then http://page",
        ),
        ("http://mlflow:5000", "MLflow: http://page"),
    ):
        seen = replace(snapshot(), recording=RecordingStatus(store=store, page="http://page"))
        write_snapshot(str(tmp_path / "status.json"), seen, private=False)
        assert shown in status(command, tmp_path).splitlines()


def test_a_trial_without_progress_is_told_of_while_its_driver_lives(tmp_path: Path, command: Command) -> None:
    trials = tuple(replace(each, quiet=420.0) if each.state.is_running else each for each in TRIALS)
    for age, state, is_told in (
        (2.0, "running", True),
        (2.0, "interrupted", False),
        (STALE_AFTER + 9, "running", False),
    ):
        write_snapshot(str(tmp_path / "status.json"), replace(snapshot(age, state), trials=trials), private=False)
        shown = status(command, tmp_path)
        assert ("training, no progress for 7 min 0 s" in shown) == is_told
        assert (", 1 running (1 without progress), 1 waiting" in shown) == is_told


def test_a_stop_tells_what_is_missing_and_nothing_of_a_sweep_that_had_trials_to_train(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped = replace(job("STOPPED", "small-0123456789"), output=str(tmp_path))
    missing = RecordingStatus(39, 300, failure="stopped", command="dpsweep record out")
    for state, recording, told in (
        ("interrupted", NOTHING_RECORDED, ""),
        ("recording", missing, "39 of 300 trials are recorded in MLflow (stopped); `dpsweep record out` records"),
    ):
        seen = replace(snapshot(state=state), recording=recording)
        write_snapshot(str(tmp_path / "status.json"), seen, private=False)
        tell_what_is_missing(stopped)
        printed = "".join(capsys.readouterr())
        assert printed.startswith(told) if told else printed == ""


def test_a_flipped_digit_and_a_missing_checksum_are_noticed(tmp_path: Path, command: Command) -> None:
    file = tmp_path / "status.json"
    write_snapshot(str(file), snapshot(state="finished"), private=False)
    written = file.read_text()
    file.write_text(written.replace("0.91", "0.97"))
    said = f"error: {file} is damaged: its content differs from its checksum"
    assert refusal(command, 1, tmp_path).startswith(said)
    file.write_text(json.dumps({name: value for name, value in json.loads(written).items() if name != "sha256"}))
    assert "it is no JSON object with a checksum" in refusal(command, 1, tmp_path)


def test_many_trials_are_summed_up(tmp_path: Path, command: Command) -> None:
    """The first that run or have failed, and how many there are besides; every trial on request."""
    ended = [
        replace(TRIALS[0], key=f"done-{place}", accuracy=0.01 * place, epsilon=1.991 + place) for place in range(40)
    ]
    failed = [replace(TRIALS[0], key=f"lost-{place}", state=TrialState.FAILED, error="lost") for place in range(7)]
    write_snapshot(str(tmp_path / "status.json"), replace(snapshot(), trials=(*ended, *failed)), private=False)
    shown = status(command, tmp_path)
    assert "done-0" not in shown
    assert (shown.count("lost-"), "lost-4" in shown) == (10, True), "five rows, and five errors"
    assert "42 of 47 trials are not shown: --trials shows all, --state failed the 7 failed ones" in shown
    assert "finished trials: accuracy 0.00 to 0.390, epsilon 2.00 to 41.0" in shown
    assert status(command, tmp_path, "--trials").count("done-") == 40
    only = status(command, tmp_path, "--state", "failed")
    assert (only.count("done-"), "lost-6" in only) == (0, True)
    assert "unknown state 'faild'; did you mean 'failed'?" in refusal(command, 2, tmp_path, "--state", "faild")


LISTED = (
    TrialSnapshot("a", TrialState.FINISHED, 20, 20),
    TrialSnapshot("b", TrialState.TRAINING, 10, 20),
    TrialSnapshot("c", TrialState.ACCOUNTING, 20, 20),
    TrialSnapshot("d", TrialState.PENDING, 0, 20),
)


def listed(*arguments: object) -> Result:
    return invoked("list", *arguments, env={"RAY_API_SERVER_ADDRESS": ""})


def found(folder: object) -> dict[str, Any]:
    """By folder, from ``--json``."""
    return {Path(each["folder"]).name: each for each in json.loads(listed(folder, "--json").stdout)["sweeps"]}


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder of a short path, so that no line of a table with paths is broken."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


def test_sweeps_are_found_at_any_depth_with_trials_by_state_and_last_change(folder: Path) -> None:
    stored_sample(folder / "runs" / "deep" / "old")
    running = stored_sample(folder / "runs" / "new", name="digits")
    beat = time.time() - 2.0
    write_snapshot(running.status, snapshot_of(*LISTED, name="digits", heartbeat=beat), False)
    (folder / "runs" / "empty").mkdir()
    sweeps = found(folder)
    assert sweeps.keys() == {"old", "new"}
    assert sweeps["old"]["trials"] == {"finished": 2, "failed": 2}
    assert (sweeps["old"]["name"], sweeps["old"]["state"], sweeps["old"]["problem"]) == ("small", "unknown", None)
    assert sweeps["new"]["trials"] == {"pending": 1, "running": 2, "finished": 1}
    assert (sweeps["new"]["state"], sweeps["new"]["changed"]) == ("running", beat)
    lines = listed(folder).stdout.splitlines()
    assert len(lines) == 3
    minute = time.strftime("%Y-%m-%d %H:%M", time.gmtime(beat))
    row = next(line for line in lines if line.startswith("digits"))
    assert f"running  1 pending, 2 running, 1 finished  {minute}" in " ".join(row.split(" "))


def test_a_driver_that_is_gone_is_called_stale(tmp_path: Path) -> None:
    files = stored_sample(tmp_path)
    gone = snapshot_of(*LISTED, age=600.0)
    write_snapshot(files.status, gone, False)
    assert found(f"file://{tmp_path}").popitem()[1]["state"] == "stale"
    write_snapshot(files.status, replace(gone, state="interrupted"), False)
    assert found(f"file://{tmp_path}").popitem()[1]["trials"] == {"pending": 1, "interrupted": 2, "finished": 1}


def test_links_hidden_folders_and_the_inside_of_sweeps_are_left_out(tmp_path: Path) -> None:
    stored_sample(tmp_path / "sweep")
    stored_sample(tmp_path / "sweep" / "trials" / "copy")
    stored_sample(tmp_path / ".hidden")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert list(found(tmp_path)) == ["sweep"]


def test_what_is_no_sweep_is_refused_and_what_is_damaged_is_named(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nothing"):
        (line,) = refused(InvalidInput, "list", folder).splitlines()
        assert line == f"{folder} holds no sweep, and no folder below it does; name one that `dpsweep run` wrote to"
    stored_sample(tmp_path / "good")
    damaged = stored_sample(tmp_path / "bad")
    Path(damaged.manifest).write_text("{}")
    shown = listed(tmp_path)
    assert isinstance(shown.exception, DataCorruption)
    assert "bad/sweep.json" in str(shown.exception)
    assert "good" in shown.stdout


def test_neither_folder_nor_cluster_is_one_line() -> None:
    with pytest.raises(InvalidInput, match=r"give a FOLDER .* or the --address"):
        raise listed().exception or AssertionError


@pytest.mark.parametrize(
    ("name", "value"),
    [("heartbeat", math.nan), ("heartbeat", 1e300), ("elapsed", math.inf), ("seconds_left", math.nan)],
)
def test_numbers_that_no_driver_writes_are_damage(folder: Path, name: str, value: float) -> None:
    stored_sample(folder / "good")
    status = stored_sample(folder / "bad", name="forged").status
    write_snapshot(status, snapshot_of(*LISTED, name="forged", heartbeat=1.0), False)
    write_json(Path(status), {**json.loads(Path(status).read_text()), name: value})
    assert listed(folder, "--json").exit_code == 1
    sweeps = found(folder)
    assert "is no status of this version" in sweeps["bad"]["problem"]
    assert sweeps["good"]["problem"] is None


@pytest.mark.parametrize("changes", [{"created": "2020-13-45"}, {"sweep_id": None}, {"sweep": []}, {"more": 1}])
def test_a_manifest_of_other_values_is_damage(folder: Path, changes: dict[str, object]) -> None:
    manifest = Path(stored_sample(folder / "bad").manifest)
    write_json(manifest, {**json.loads(manifest.read_text()), **changes})
    assert "is no manifest of this version" in found(folder)["bad"]["problem"]


def test_folders_in_one_another_without_end_and_odd_names_are_named(folder: Path) -> None:
    stored_sample(folder / "good")
    folder.joinpath(*80 * "d").mkdir(parents=True)
    (folder / os.fsdecode(b"\xff\x1b]0;title\x07")).mkdir()
    sweeps = json.loads(listed(folder, "--json").stdout)["sweeps"]
    problems = [each["problem"] for each in sweeps if each["problem"]]
    assert len(problems) == 2
    assert any("lies more than 64 folders deep" in each for each in problems)
    assert any("\\xff" in each and "no UTF-8" in each for each in problems)
    shown = listed(folder)
    assert "\x1b" not in shown.output
    assert isinstance(shown.exception, DataCorruption)
    assert "good" in shown.stdout
