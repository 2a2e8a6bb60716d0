"""The page of `dpsweep dashboard`: all sweeps below some folders, their progress, growing curves, and a comparison.

`Board` is read by a server repeatedly; it looks at a sweep's results again only after a trial of it has ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files as resources
from string import Template
from typing import Any, Final

from accounting.errors import DpsweepError
from accounting.records import exists
from orchestration.comparison.claims import checked_record
from orchestration.comparison.formats import number
from orchestration.comparison.importance import importance
from orchestration.comparison.inventory import SweepSummary, sweeps_below
from orchestration.comparison.metrics import METRICS
from orchestration.comparison.parameters import varying
from orchestration.comparison.rate_metrics import group_metric
from orchestration.comparison.settings import finished_settings
from orchestration.comparison.values import epsilon, main
from orchestration.records.layout import SweepFiles
from orchestration.records.published import NON_PRIVATE, Label, PublishedSweep, PublishedTrial
from orchestration.records.states import TrialState
from orchestration.report.html import script_safe
from orchestration.report.page import packed_plotly
from workers.tasks import task_called

_MOST_CURVES: Final = 60
"""Most curves that one sweep draws, the newest ones; more would hide each other."""
_AXES: Final = ("epsilon", "worst_group_accuracy", "accuracy_gap", "median_epsilon_i")
"""Metrics of the parallel coordinates besides the main score, by name, where a trial has them."""


@dataclass
class _Known:
    """What was read of a sweep's results when ``ended`` of its trials were over."""

    ended: int = -1
    trials: tuple[PublishedTrial, ...] = ()
    candidates: tuple[PublishedTrial, ...] = ()
    task: str = "classification"
    problem: str = ""
    growing: dict[str, dict[int, float]] = field(default_factory=dict)
    """Main score by epoch of the trials that run, as far as this process has seen it."""


class Board:
    """The sweeps below ``folders`` (absolute paths or URIs), as plain values for the page. Thread-safe."""

    def __init__(self, folders: Sequence[str]) -> None:
        self._folders = tuple(folders)
        self._known: dict[str, _Known] = {}
        self._lock = threading.Lock()

    def state(self) -> dict[str, Any]:
        """Return what the page shows now, for JSON: one entry per sweep, and why some cannot be read."""
        with self._lock:
            found = [each for folder in self._folders for each in sweeps_below(folder)]
            sweeps = [self._sweep(place, each) for place, each in enumerate(found) if not each.problem]
            problems = [each.problem for each in found if each.problem]
        return {"at": time.time(), "sweeps": sweeps, "problems": problems}

    def report(self, folder: str) -> str | None:
        """Return the address of the report of a sweep on the board; None for any other folder."""
        known = folder in self._known
        return SweepFiles(folder).report if known else None

    def _sweep(self, place: int, found: SweepSummary) -> dict[str, Any]:
        known = self._known.setdefault(found.folder, _Known())
        snapshot, total = found.snapshot, sum(found.trials.values())
        over = [trial for trial in snapshot.trials if trial.state.has_ended] if snapshot else []
        ended = len(over) if snapshot else total
        if ended != known.ended:
            self._read(found.folder, known, ended)
        for trial in snapshot.trials if snapshot else ():
            score = trial.accuracy if trial.accuracy is not None else next(iter(trial.scores.values()), None)
            if trial.epoch is not None and score is not None and not trial.state.has_ended:
                known.growing.setdefault(trial.key, {})[trial.epoch] = score
        shown = [trial for trial in known.trials if trial.state is TrialState.FINISHED]
        return {
            "id": place,
            "folder": found.folder,
            "name": found.name,
            "state": found.state,
            "ended": ended,
            "trials": total,
            "counts": dict(found.trials),
            "left": snapshot.seconds_left if snapshot and found.state == "running" else None,
            "best": _best(shown, known.task),
            "score": task_called(known.task).main.replace("_", " "),
            "problem": known.problem,
            "curves": _curves(known),
            "settings": _points(shown),
            "parallel": _parallel(shown),
            "importance": importance(known.candidates) or importance(known.trials),
        }

    def _read(self, folder: str, known: _Known, ended: int) -> None:
        try:
            data: PublishedSweep = checked_record(SweepFiles(folder)).data()
        except DpsweepError as error:
            known.problem = str(error).splitlines()[0]
        else:
            known.trials, known.task, known.problem = data.trials, data.task, ""
            known.candidates = _candidates(SweepFiles(folder))
            for trial in data.trials:
                if trial.history:
                    known.growing.pop(trial.key, None)
        known.ended = ended


def _candidates(files: SweepFiles) -> tuple[PublishedTrial, ...]:
    """The candidates of the sweep's tuning, which vary more than what was trained with the best; () without one."""
    tuning = SweepFiles(files.tuning)
    try:
        return checked_record(tuning).data().trials if exists(tuning.manifest) else ()
    except DpsweepError:
        return ()


def _best(trials: Sequence[PublishedTrial], task: str) -> str:
    """The private setting with the best mean of the main score; a single trial would be the luckiest seed."""
    means = [
        (mean.mean, setting, mean.count)
        for setting in finished_settings(trials)
        if not setting.is_baseline and (mean := setting.over_seeds(main))
    ]
    if not means:
        return ""
    score, setting, count = max(means, key=lambda each: each[0])
    cost = setting.over_seeds(epsilon)
    seeds = f"mean of {count} seeds" if count > 1 else "one seed"
    of = task_called(task).main.replace("_", " ")
    shown = group_metric(task_called(task).main).format.one(score)
    return f"{setting.name}: {of} {shown} ({seeds}) at ε = {number(cost.high if cost else None)}"


def _curves(known: _Known) -> list[dict[str, Any]]:
    """Main score by epoch: of trials that are over as stored, of others as seen so far."""
    name = f"test_{task_called(known.task).main}"
    curves = []
    for trial in known.trials:
        points = [(each.epoch, each.metrics[name]) for each in trial.history if name in each.metrics]
        if points:
            curves.append(_curve(trial.key, points, is_baseline=trial.is_baseline, is_over=True))
    for key, growing in known.growing.items():
        curves.append(_curve(key, sorted(growing.items()), is_baseline=NON_PRIVATE in key, is_over=False))
    return curves[-_MOST_CURVES:]


def _curve(key: str, points: Sequence[tuple[int, float]], is_baseline: bool, is_over: bool) -> dict[str, Any]:
    x, y = zip(*points, strict=True)
    return {"key": key, "x": x, "y": y, "baseline": is_baseline, "over": is_over}


def _points(trials: Sequence[PublishedTrial]) -> list[dict[str, Any]]:
    """Each finished trial as a point of the comparison; epsilon is None for a baseline."""
    return [
        {
            "name": trial.key,
            "method": str(trial.labels.get("clipping", "")),
            "epsilon": None if trial.is_baseline else epsilon(trial),
            "main": main(trial),
        }
        for trial in trials
    ]


def _parallel(trials: Sequence[PublishedTrial]) -> list[dict[str, Any]]:
    """An axis for each parameter and label that varies, and for the main score and `_AXES`; [] for too few trials."""
    private = [trial for trial in trials if not trial.is_baseline]
    if len(private) < 2:
        return []
    rows = varying([{**trial.labels, **trial.params} for trial in private])
    axes = [_axis(name, [row.get(name) for row in rows]) for name in dict.fromkeys(n for row in rows for n in row)]
    for each in METRICS:
        values = [each.value(trial) for trial in private]
        if each.name in _AXES and all(value is not None for value in values):
            axes.append({"label": each.heading, "values": values})
    score = task_called(_task(private)).main.replace("_", " ")
    return [*axes, {"label": score, "values": [main(trial) for trial in private]}]


def _task(trials: Sequence[PublishedTrial]) -> str:
    return next((trial.quality.task for trial in trials if trial.quality), "classification")


def _axis(name: str, values: Sequence[Label | None]) -> dict[str, Any]:
    """An axis of numbers as they are, of texts by their places among all texts."""
    label = name.removeprefix("spec.").replace("_", " ")
    if all(isinstance(value, int | float) for value in values):
        return {"label": label, "values": list(values)}
    texts = sorted({str(value) for value in values})
    return {"label": label, "values": [texts.index(str(value)) for value in values], "texts": texts}


def board_page(state: Mapping[str, Any], period: float) -> str:
    """Return the page as one HTML document that asks ``/state`` again every ``period`` seconds."""
    template = Template(resources("orchestration.report").joinpath("dashboard.html").read_text(encoding="utf-8"))
    return template.substitute(plotly=packed_plotly(), state=script_safe(state), period=str(round(1000 * period)))
