"""Tables on narrow terminals: no word is broken, and nothing is left out."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console, Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dpsweep import orchestration
from dpsweep.orchestration.commands import options
from dpsweep.orchestration.comparison.formats import Fitting, seconds
from dpsweep.orchestration.pipeline import progress
from dpsweep.orchestration.pipeline.progress import IF_IT_HANGS, ConsoleDisplay, _picture
from dpsweep.orchestration.store.published import TrialState
from dpsweep.orchestration.store.status import RecordingStatus, SweepStatus, TrialStatus
from tests.orchestration.sample_results import sample_record

KEY = "individual-exponential-epsilon8-seed1000000-ec7523857b"


def printed(renderable: object, width: int) -> list[str]:
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 62, 200])
def test_a_table_fits_the_terminal_with_every_value(width: int) -> None:
    table = Table(box=None)
    for column in ("trial", "worst-case ε", "test accuracy", "worst-served group", "time"):
        table.add_column(column, no_wrap=True)
    table.add_row(KEY, "8.00", "87.5%", Text("African-American: 60.5%"), "12 min 4 s")
    table.add_row("short", "–", "", Text(""), "")
    lines = printed(Fitting(table), width)
    assert max(map(len, lines)) <= width
    assert any(KEY in line for line in lines), "no key is broken"
    words = " ".join(" ".join(lines).split())
    for shown in ("8.00", "87.5%", "African-American: 60.5%", "12 min 4 s", "worst-served group", "short"):
        assert shown in words
    assert ("worst-case ε 8.00; test accuracy 87.5%" in words) == (width < 200)


def test_no_column_is_squeezed_below_its_words() -> None:
    table = Table(box=None)
    table.add_column("trial", no_wrap=True)
    table.add_column("differs in", overflow="fold")
    table.add_column("worst-served group", no_wrap=True)
    table.add_row(KEY, "model logistic", "m: 88.3%")
    assert "differs in model logistic; worst-served group m: 88.3%" in " ".join(printed(Fitting(table), 83))
    assert "logistic" in [line.strip() for line in printed(Fitting(table), 88)], "wrapped at a blank"


@pytest.mark.parametrize("width", range(40, 90, 3))
def test_a_table_at_any_width_keeps_its_words_and_its_title(width: int) -> None:
    table = Table("unit", "at least", "accountant", "adjacency", "kind", title="bounds by a very long title")
    table.add_row("group of 2", "7.21% (7.20%)", "pld", "add_remove", "guarantee")
    fitting = Fitting(table)
    printed(fitting, 95 - width)  # a terminal may change its width
    lines = printed(fitting, width)
    words = "".join(" ".join(lines).split())
    assert max(map(len, lines)) <= width
    for word in ("add_remove", "guarantee", "accountant", "7.21%", "(7.20%)", "group", "bounds"):
        assert word in words
    assert "…" not in words
    assert not any(line.startswith("│") and not line.endswith("│") for line in lines), "no border is cut off"


def test_a_long_address_widens_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    console = partial(Console, file=file, force_terminal=True, width=80, color_system=None)
    monkeypatch.setattr(options, "stdout", console)
    table = Table("trial", "state", "epsilon", "on test data", box=None)
    table.add_row(Text(KEY), "finished", "none (not private)", "accuracy 77.5%")
    options.show(Group("http://127.0.0.1:5000/#/" + "x" * 100, Fitting(table)))
    address, key, values = [line.rstrip() for line in file.getvalue().splitlines()]
    assert (len(address), key) == (124, KEY)
    assert values == "  state finished; epsilon none (not private); on test data accuracy 77.5%"


def test_one_module_makes_texts_of_what_others_wrote() -> None:
    """So that none is shown without `for_terminal`."""
    folder = Path(orchestration.__path__[0])
    assert {path.name for path in folder.rglob("*.py") if re.search(r"\bText[.(]", path.read_text())} == {"formats.py"}


def test_the_live_picture_breaks_no_key() -> None:
    status = SweepStatus([TrialStatus(KEY, 300, TrialState.TRAINING)], on_end=lambda trial: None)
    lines = printed(_picture(status), 80)
    assert KEY in [line.strip() for line in lines]
    assert max(map(len, lines)) <= 80


def test_a_trial_that_an_earlier_driver_trained_took_the_time_of_its_result(tmp_path: Path) -> None:
    record, _ = sample_record(tmp_path)
    result = next(each.result for each in record.statuses.values() if each.result)
    console = Console(file=io.StringIO(), width=200)
    accounted_now = TrialStatus(KEY, 300, TrialState.FINISHED, result=result, started=500.0, trained=500.0, ended=501.0)
    ConsoleDisplay(console).ended(accounted_now)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().rstrip().endswith(f", {seconds(result.ended - result.started)}")
    assert result.ended - result.started > 1.0


def watched(status: SweepStatus, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[str]]]:
    """Yield a function that returns the lines printed since the last call, off a terminal, with a look every moment."""
    monkeypatch.setattr(progress, "_LINE_INTERVAL", 0.01)
    console = Console(file=io.StringIO(), width=200)

    def lines() -> list[str]:
        time.sleep(0.3)
        assert isinstance(console.file, io.StringIO)
        text = console.file.getvalue()
        console.file.seek(0)
        console.file.truncate()
        return text.splitlines()

    with ConsoleDisplay(console).watching(status):
        yield lines


def test_a_line_on_the_recording_is_printed_once_until_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    status = SweepStatus([TrialStatus(KEY, 300, TrialState.FINISHED)], on_end=lambda trial: None)
    silent = RecordingStatus(39, 300, trouble="MLflow does not answer")
    for lines in watched(status, monkeypatch):
        for recording in (RecordingStatus(39, 300), silent, silent, RecordingStatus(40, 300)):
            before, status.recording = status.recording, recording
            assert lines() == ([] if before is recording else [recording.line()])


def test_a_silent_trial_is_told_of_once_until_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    status = SweepStatus([TrialStatus(KEY, 300, TrialState.TRAINING)], on_end=lambda trial: None)
    found: list[float | None] = [None]
    monkeypatch.setattr(status, "quiet", lambda key: found[0])
    for lines in watched(status, monkeypatch):
        assert lines() == []
        for quiet in (301.0, None, 302.0):
            found[0] = quiet
            told = [f"warning: {KEY}: no progress for 5 min {quiet - 300.0:.0f} s; {IF_IT_HANGS}"] if quiet else []
            assert lines() == told
    assert "no progress for 5 min 2 s" in " ".join(printed(_picture(status), 200))


def test_a_picture_in_a_cell_is_left_out_of_a_stacked_row() -> None:
    table = Table(box=None)
    table.add_column("trial", no_wrap=True)
    table.add_column("progress", no_wrap=True)
    table.add_row("x" * 70, ProgressBar(total=10, completed=5, width=24))
    assert [line.strip() for line in printed(Fitting(table), 80)] == ["x" * 70, ""]
