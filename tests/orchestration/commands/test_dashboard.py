"""`dpsweep dashboard`: one local page for all sweeps below some folders, which only its address opens."""

from __future__ import annotations

import json
import math
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import uvicorn
from starlette.testclient import TestClient

from dpsweep.accounting.errors import InvalidInput, StorageError
from dpsweep.orchestration.commands.dashboard import application, dashboard
from dpsweep.orchestration.comparison.claims import checked_record
from dpsweep.orchestration.comparison.metrics import METRICS
from dpsweep.orchestration.comparison.parameters import choices
from dpsweep.orchestration.comparison.record import SweepRecord
from dpsweep.orchestration.comparison.tuning_notes import importance
from dpsweep.orchestration.report.board import Board
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.store.published import PublishedTrial, PublishedTuning, TrialState
from dpsweep.orchestration.store.status_snapshot import TrialSnapshot, read_snapshot, write_snapshot
from tests.known import known
from tests.orchestration.processes import COMMAND
from tests.orchestration.report.emulated import PHONE, tab_of
from tests.orchestration.report.test_browser import CHROMIUM, FLAGS
from tests.orchestration.sample_outcomes import outcomes, trial
from tests.orchestration.sample_results import EXACT, stored_sample
from tests.orchestration.sample_snapshots import snapshot_of

TOKEN = "a-token"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two sweeps: one that is over, and one that trains its second trial."""
    stored_sample(tmp_path / "over")
    running = stored_sample(tmp_path / "running", name="other")
    trials = (
        TrialSnapshot("a", TrialState.FINISHED, 20, 20, accuracy=0.9),
        TrialSnapshot("b", TrialState.TRAINING, 10, 20, epoch=3, accuracy=0.5),
    )
    snapshot = snapshot_of(*trials, name="other <b>", elapsed=5.0, seconds_left=65.0)
    write_snapshot(running.status, snapshot, private=False)
    return tmp_path


def read(folder: Path) -> Board:
    board = Board([str(folder)])
    board.refresh()
    return board


def client(folder: Path) -> TestClient:
    return TestClient(application(read(folder), TOKEN), base_url="http://127.0.0.1", follow_redirects=False)


def opened(folder: Path) -> TestClient:
    found = client(folder)
    assert found.get("/", params={"token": TOKEN}).status_code == 303
    return found


def test_nobody_gets_in_without_the_address(folder: Path) -> None:
    anybody = client(folder)
    for path in ("/", "/state", "/report?folder=x", "/?token=wrong"):
        answer = anybody.get(path)
        assert (answer.status_code, "with its token" in answer.text) == (401, True)
    assert "HttpOnly" in client(folder).get("/", params={"token": TOKEN}).headers["set-cookie"]


def test_a_second_dashboard_in_the_same_browser_ends_no_first(folder: Path) -> None:
    first, other = opened(folder), "second-token"
    second = TestClient(application(read(folder), other), base_url="http://127.0.0.1", cookies=first.cookies)
    assert second.get("/", params={"token": other}).status_code == 200
    first.cookies.update(second.cookies)
    assert (first.get("/state").status_code, second.get("/state").status_code) == (200, 200)


def test_the_page_shows_every_sweep_and_how_far_it_is(folder: Path) -> None:
    state = opened(folder).get("/state").json()
    over, running = state["sweeps"]
    assert (over["name"], over["state"], over["ended"]) == ("small", "unknown", over["trials"])
    assert (running["state"], running["ended"], running["trials"], running["left"]) == ("running", 1, 2, 65.0)
    assert running["curves"][-1] == {
        "key": "b",
        "setting": "b",
        "x": [2],
        "y": [0.5],
        "baseline": False,
        "over": False,
    }
    assert re.match(r"flat.*: accuracy \d+\.\d% \((one seed|mean of)", over["best"])
    assert {point["epsilon"] is None for point in over["settings"]} == {True, False}


def test_parallel_coordinates_show_privacy_and_fairness_of_every_trial(tmp_path: Path) -> None:
    stored_sample(tmp_path / "over", EXACT, finished=range(4))
    (over,) = read(tmp_path).state()["sweeps"]
    headings = [each.heading for each in METRICS if each.name == "median_example_epsilon"]
    shown = ["Worst-case ε", *headings, "Worst-served group", "Accuracy gap", "accuracy"]
    assert [axis["label"] for axis in over["parallel"]] == shown
    assert {len(axis["values"]) for axis in over["parallel"]} == {2}


def test_units_of_scores_and_epsilons_are_those_of_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accuracy in percent, gaps in points; an epsilon of one row says so where people own several."""
    monkeypatch.setattr("dpsweep.orchestration.comparison.findings.Findings.is_of_rows", lambda *_: True)
    stored_sample(tmp_path / "over", EXACT, finished=range(4))
    (over,) = read(tmp_path).state()["sweeps"]
    units = {axis["label"]: axis.get("unit", "") for axis in over["parallel"]}
    assert (over["unit"], units["accuracy"], units["Worst-served group"], units["Accuracy gap"]) == (
        "%", "%", "%", " points",
    )  # fmt: skip
    assert units["Worst-case ε"] == ""
    assert over["neighbours"] == ["add_remove"]
    assert over["best"].partition(" at ")[2].startswith("ε = 3.00 per row, an estimate")


def test_no_setting_is_the_best_that_has_learnt_nothing(folder: Path) -> None:
    over = stored_sample(folder / "over")
    board = read(folder)
    assert re.match(r"flat.*: accuracy", board.state()["sweeps"][0]["best"])
    name = board.state()["sweeps"][0]["best"].partition(":")[0]
    Path(over.comparison).write_text(
        json.dumps({"settings": [{"name": name, "useless": "predicted one class (it reaches 50%)"}]})
    )
    assert read(folder).state()["sweeps"][0]["best"] == f"none of use: {name} predicted one class"
    Path(over.comparison).write_text("[]")
    assert re.match(r"flat.*: accuracy", read(folder).state()["sweeps"][0]["best"])


def test_results_are_read_again_with_the_report_and_after_the_storage_failed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "dpsweep.orchestration.report.board"
    whole = checked_record

    def refusing(files: SweepFiles) -> SweepRecord:
        raise StorageError("cannot read s3://bucket: slow down")

    monkeypatch.setattr(f"{module}.checked_record", refusing)
    board = read(folder)
    assert board.state()["sweeps"][1]["problem"] == "cannot read s3://bucket: slow down"
    monkeypatch.setattr(f"{module}.checked_record", whole)
    board.refresh()
    running = board.state()["sweeps"][1]
    assert (running["problem"], running["best"][:4]) == ("", "flat")
    files = SweepFiles(str(folder / "running"))
    name = running["best"].partition(":")[0]
    Path(files.comparison).write_text(json.dumps({"settings": [{"name": name, "useless": "learnt nothing"}]}))
    write_snapshot(files.status, replace(known(read_snapshot(files.status)), state="finished"), private=False)
    board.refresh()
    assert board.state()["sweeps"][1]["best"] == f"none of use: {name} learnt nothing"


def test_progress_is_shown_before_results_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    board = Board([str(folder)])
    monkeypatch.setattr("dpsweep.orchestration.report.board._read", lambda *of: seen.append(board.state()["sweeps"]))
    assert board.state()["sweeps"] == []
    board.refresh()
    assert [(each["ended"], each["problem"]) for each in seen[0]] == [
        (4, reading := "its results are being read"),
        (1, reading),
    ]


def test_results_that_take_long_to_read_are_read_seldom_while_trials_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = Mock(return_value=True)
    monkeypatch.setattr("dpsweep.orchestration.report.board._SHORT", -1.0)
    monkeypatch.setattr("dpsweep.orchestration.report.board._REST", 1e9)
    monkeypatch.setattr("dpsweep.orchestration.report.board._read", reading)
    board, files = Board([str(folder / "running")]), SweepFiles(str(folder / "running"))
    board.refresh()
    status = known(read_snapshot(files.status))
    more = replace(status, trials=(*status.trials, TrialSnapshot("z", TrialState.FINISHED, 20, 20)))
    for state, times in (("running", 1), ("finished", 2)):
        write_snapshot(files.status, replace(more, state=state), private=False)
        board.refresh()
        assert reading.call_count == times, state


def test_curves_grow_while_a_trial_trains(folder: Path) -> None:
    board = read(folder)
    files = folder / "running" / "status.json"
    trials = (TrialSnapshot("b", TrialState.TRAINING, 15, 20, epoch=4, accuracy=0.625),)
    snapshot = snapshot_of(*trials, name="other")
    write_snapshot(str(files), snapshot, private=False)
    board.refresh()
    grown = board.state()["sweeps"][1]["curves"][-1]
    assert (grown["x"], grown["y"]) == ((2, 3), (0.5, 0.625)), "epochs from 0, as those of `EpochRecord`"
    lost = replace(trials[0], epoch=5, accuracy=None, scores={"r2": -1e45})
    write_snapshot(str(files), replace(snapshot, trials=(lost,)), private=False)
    board.refresh()
    assert board.state()["sweeps"][1]["curves"][-1]["y"] == (0.5, 0.625), "beside -1e45 all others would be a line"


def test_a_report_runs_apart_and_only_reports_are_given(folder: Path) -> None:
    (folder / "over" / "report.html").write_text("<script>parent.stolen = document.cookie</script>")
    reader = opened(folder)
    answer = reader.get("/report", params={"folder": str(folder / "over")})
    policy = answer.headers["content-security-policy"]
    assert (answer.status_code, "sandbox allow-scripts" in policy, "allow-same-origin" in policy) == (200, True, False)
    for other in ("/etc", str(folder), str(folder / "over" / ".." / "over"), ""):
        assert reader.get("/report", params={"folder": other}).status_code == 404
    (folder / "over" / "report.html").unlink()
    assert reader.get("/report", params={"folder": str(folder / "over")}).text == "This sweep has no report yet.\n"


def test_a_damaged_sweep_is_named_and_the_others_are_shown(folder: Path) -> None:
    (folder / "over" / "sweep.json").write_text("{")
    state = opened(folder).get("/state").json()
    assert [each["name"] for each in state["sweeps"]] == ["other <b>"]
    (problem,) = state["problems"]
    assert "over/sweep.json" in problem


def test_numbers_that_json_has_not_are_shown_as_none(folder: Path) -> None:
    board = read(folder)
    board._known[str(folder / "over")].curves = [{"key": "a", "x": [1], "y": [math.nan]}]
    board.refresh()
    shown = TestClient(application(board, TOKEN), base_url="http://127.0.0.1")
    assert shown.get("/", params={"token": TOKEN}).status_code == 200
    assert shown.get("/state").json()["sweeps"][0]["curves"][0]["y"] == [None]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(("nowhere",), "there is no nowhere"), ((".", "--host", "192.0.2.1"), "cannot listen on 192.0.2.1 port 0")],
)
def test_what_cannot_be_shown_is_one_error(arguments: tuple[str, ...], said: str) -> None:
    folders, host = [arguments[0]], arguments[2] if len(arguments) > 2 else "127.0.0.1"
    with pytest.raises(InvalidInput, match=said):
        dashboard(folders, host, 0)


def varied(of: str, values: list[Any]) -> list[PublishedTrial]:
    """Trials whose accuracy rises with the value, and another parameter that does nothing."""
    draw = np.random.default_rng(0)
    trials = []
    for place, value in enumerate(values):
        found = trial(outcomes((0.6 + 0.03 * place,) * 2, place), "flat", place)
        trials.append(replace(found, params={of: value, "spec.other": float(draw.random())}))
    return trials


def test_importance_finds_what_the_score_depends_on() -> None:
    trials = varied("spec.clipping.bound", [0.1 * place for place in range(10)])
    (first, share), *others = importance(trials)
    assert (first, share > 0.7) == ("clipping.bound", True)
    assert sum((share, *(each for _, each in others))) == pytest.approx(1.0)
    assert importance(trials[:7]) == [], "too few"
    unrelated = varied("spec.clipping.bound", np.random.default_rng(1).permutation(10).tolist())
    assert importance(unrelated) == [], "chance"
    assert importance([replace(each, params={}) for each in trials]) == [], "nothing varies but the seed"


def test_parameters_that_only_vary_together_count_once() -> None:
    """The memory of one clipping method is no choice of its own, nor is a decay of one of three schedules."""
    trials = []
    for place in range(12):
        clipping, schedule = ("flat", "dpsgd_f")[place % 2], ("constant", "step", "exponential")[place % 3]
        found = trial(outcomes((0.6 + 0.2 * (place % 2) + 0.05 * (place % 3),) * 2, place), clipping, place)
        own: dict[str, Any] = {"spec.clipping.params.count_memory": 0.9} if clipping == "dpsgd_f" else {}
        own |= {"spec.noise.schedule.params.decay": 0.1} if schedule == "exponential" else {}
        trials.append(replace(found, labels={**found.labels, "schedule": schedule}, params=own))
    assert [name for name, _ in importance(trials)] == ["clipping, clipping.count memory", "schedule"]


def test_values_that_a_tuning_chose_count_as_the_setting_that_they_were_chosen_for() -> None:
    """Each setting has its own best bound, which would take a part of what its method and epsilon explain."""
    trials = []
    for place in range(12):
        clipping, budget, bound = (
            ("flat", "dpsgd_f")[place % 2],
            (1.0, 8.0)[place // 2 % 2],
            (0.1, 0.5, 1.0, 2.0)[place % 4],
        )
        found = trial(outcomes((0.6 + 0.2 * (place % 2) + 0.1 * (place // 2 % 2),) * 2, place), clipping, place)
        tuning = PublishedTuning("accuracy", {"clipping.bound": bound}, (({"clipping.bound": bound}, 0.5),))
        params: dict[str, Any] = {"spec.clipping.params.bound": bound}
        labels = {**found.labels, "epsilon": budget}
        trials.append(replace(found, labels=labels, params=params, tuning=tuning))
    assert {name for name, _ in importance(trials)} == {"clipping", "epsilon"}


def test_nothing_is_said_to_matter_where_the_report_tells_no_methods_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where trials of other seeds on the same test examples are predictable."""
    monkeypatch.setattr(
        "dpsweep.orchestration.report.board.importance", lambda trials: [("clipping", 1.0)] * bool(trials)
    )
    sweep = stored_sample(tmp_path / "over")
    shown = []
    for verdict in ("not distinguishable", "better"):
        found = {"settings": [], "differences": [{"verdict": verdict}, {"verdict": "not distinguishable"}]}
        Path(sweep.comparison).write_text(json.dumps(found))
        (over,) = read(tmp_path).state()["sweeps"]
        shown.append((over["alike"], over["importance"]))
    assert shown == [(True, []), (False, [("clipping", 1.0)])]


def test_each_choice_is_there_once_by_its_name_in_the_sweep_file() -> None:
    """A label that repeats a parameter would take half of its importance away."""

    def made(seed: int, bound: float, rate: float) -> PublishedTrial:
        found = trial(outcomes((0.9, 0.9)), f"flat ({bound})", seed, optimizer=f"sgd ({rate})", candidate=seed)
        params: dict[str, Any] = {"spec.clipping.name": "flat", "spec.clipping.params.bound": bound}
        params |= {"spec.optimizer.name": "sgd", "spec.optimizer.params.rate": rate}
        return replace(found, params={**params, "spec.noise.initial_noise_multiplier": 1.5 + bound})

    trials = [made(0, 0.5, 0.1), made(1, 1.0, 0.1), made(2, 1.0, 0.3)]
    assert choices(trials) == [
        {"clipping.bound": 0.5, "optimizer.rate": 0.1},
        {"clipping.bound": 1.0, "optimizer.rate": 0.1},
        {"clipping.bound": 1.0, "optimizer.rate": 0.3},
    ]
    names = {"spec.noise.schedule.name": "exponential"}
    falling = [
        replace(
            each,
            labels={**each.labels, "schedule": f"exponential (decay {decay})"},
            params={**trials[0].params, **names, "spec.noise.schedule.params.decay": decay},
        )
        for each, decay in ((trials[0], 0.1), (trials[0], 0.2))
    ]
    assert choices(falling) == [{"noise.schedule.decay": 0.1}, {"noise.schedule.decay": 0.2}]
    other = replace(trials[0], labels={**trials[0].labels, "clipping": "individual"}, params={})
    assert [row["clipping"] for row in choices([trials[0], other])] == ["flat", "individual"]


@pytest.fixture
def served(folder: Path) -> Iterator[str]:
    """The address of a dashboard that really listens."""
    server = uvicorn.Server(uvicorn.Config(application(read(folder), TOKEN), port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/?token={TOKEN}"
    server.should_exit = True
    thread.join()


@pytest.mark.skipif(not CHROMIUM, reason="no chromium or chrome to draw the page with")
def test_a_browser_draws_it_and_escapes_names(served: str, tmp_path: Path) -> None:
    flags = [flag for flag in FLAGS if "host-resolver" not in flag]
    with tab_of(CHROMIUM, flags, tmp_path) as tab:
        for width in (1280, PHONE):
            tab.open(served, width)
            assert tab.value("document.querySelectorAll('.main-svg').length") >= 4
            assert "other <b>" in tab.value("document.body.innerText")
            assert tab.value("document.documentElement.scrollWidth") <= width
        assert tab.complaints == []


def test_the_command_prints_its_address_and_ends_in_order(folder: Path) -> None:
    command = [*COMMAND, "dashboard", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert re.fullmatch(r"dashboard: http://127\.0\.0\.1:\d+/\?token=[\w-]{32}\n", process.stdout.readline())
        process.terminate()
        _, said = process.communicate(timeout=60)
    assert "Traceback" not in said
