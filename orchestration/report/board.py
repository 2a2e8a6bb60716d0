"""The page of `dpsweep dashboard`: all sweeps below some folders, their progress, growing curves, and a comparison.

`Board` looks at a sweep's results again only after a trial of it has ended, or its state has changed. It does so in its
own thread, and for a tenth of the time at most: to read and check the results of 2,000 trials takes several seconds.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files as resources
from string import Template
from typing import Any, Final

from dpsweep.accounting.errors import DpsweepError, StorageError
from dpsweep.accounting.records.files import exists, read_bytes
from dpsweep.accounting.records.json_text import parsed_json
from dpsweep.orchestration.comparison.claims import checked_record
from dpsweep.orchestration.comparison.evidence import NO_EVIDENCE
from dpsweep.orchestration.comparison.findings import findings
from dpsweep.orchestration.comparison.formats import PERCENT, Format, at_most, per_unit, without_unit
from dpsweep.orchestration.comparison.inventory import SweepSummary, sweeps_below
from dpsweep.orchestration.comparison.metrics import METRICS, main_metric
from dpsweep.orchestration.comparison.parameters import choices
from dpsweep.orchestration.comparison.rate_metrics import group_metric, spoken
from dpsweep.orchestration.comparison.tuning_notes import importance
from dpsweep.orchestration.comparison.values import epsilon, main
from dpsweep.orchestration.report.figures import LEAST_DRAWN
from dpsweep.orchestration.report.plot import packed_plotly, script_safe
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.store.published import (
    NON_PRIVATE,
    Label,
    PublishedSweep,
    PublishedTrial,
    TrialState,
    task_of,
)
from dpsweep.workers.tasks import task_called

_MOST_CURVES: Final = 60
"""Most curves that one sweep draws, the newest ones; more would hide each other."""
_AXES: Final = ("epsilon", "worst_group_accuracy", "accuracy_gap", "median_example_epsilon")
"""Names in `METRICS` of what parallel coordinates show besides choices and the main score, where trials have it."""


_SHORT: Final = 1.0
"""Seconds of reading the results of a sweep that are not worth a rest."""
_REST: Final = 10.0
"""Times as long as the results of a sweep took to read until they are read again while it goes on."""


@dataclass
class _Known:
    """The results of a sweep. `read_at`: number of trials that were over, and the state of the sweep, when they were
    read; None while they have yet to be. `shown`: as `Board.state` gives it.

    `rests`: seconds of a monotonic clock until which a sweep that goes on is left alone. `growing`: main score by epoch
    of the trials that run, as far as this process has seen it.
    """

    read_at: tuple[int, str] | None = None
    task: str = "classification"
    shown: Mapping[str, Any] = field(default_factory=dict)
    curves: Sequence[Mapping[str, Any]] = ()
    problem: str = "its results are being read"
    rests: float = 0.0
    growing: dict[str, dict[int, float]] = field(default_factory=dict)


_SEED: Final = re.compile(r"-(?:split-?)?seed\d+-")
"""Part of a key from which on trials of a setting differ."""
_NOTHING_READ: Final = {
    "best": "",
    "settings": [],
    "neighbours": [],
    "parallel": [],
    "importance": [],
    "alike": False,
}


class Board:
    """The sweeps below ``folders`` (absolute paths or URIs), as plain values for the page.

    One thread calls `refresh` repeatedly; any thread may call the other methods.
    """

    def __init__(self, folders: Sequence[str]) -> None:
        self._folders = tuple(folders)
        self._known: dict[str, _Known] = {}
        self._state: Mapping[str, Any] = {"at": time.time(), "sweeps": [], "problems": []}

    def state(self) -> Mapping[str, Any]:
        """Return what the page shows, for JSON: one entry per sweep, and why some cannot be read."""
        return self._state

    def report(self, folder: str) -> str | None:
        """Return the address of the report of a sweep on the board; None for any other folder."""
        return SweepFiles(folder).report if folder in self._known else None

    def refresh(self) -> None:
        """Look at all sweeps again. Their progress is shown at once, results as soon as they are read and checked."""
        found = [each for folder in self._folders for each in sweeps_below(folder)]
        self._show(found)
        for each in found:
            known, now, begun = self._known.get(each.folder), (_ended(each), each.state), time.monotonic()
            if known is None or not each.trials or known.read_at == now:
                continue
            goes_on = known.read_at is not None and known.read_at[1] == each.state
            if goes_on and begun < known.rests:
                continue
            known.read_at = now if _read(each.folder, known) else None
            took = time.monotonic() - begun
            known.rests = begun + _REST * took if took > _SHORT else 0.0
            self._show(found)

    def _show(self, found: Sequence[SweepSummary]) -> None:
        sweeps = [self._sweep(each) for each in found if not each.problem]
        problems = [each.problem for each in found if each.problem]
        self._state = _plain({"at": time.time(), "sweeps": sweeps, "problems": problems})

    def _sweep(self, found: SweepSummary) -> dict[str, Any]:
        known, snapshot = self._known.setdefault(found.folder, _Known()), found.snapshot
        for trial in snapshot.trials if snapshot else ():
            score = trial.accuracy if trial.accuracy is not None else next(iter(trial.scores.values()), None)
            is_drawn = score is not None and score >= LEAST_DRAWN
            if trial.epoch is not None and score is not None and is_drawn and not trial.state.has_ended:
                epoch = trial.epoch - 1  # counted from 0, as those of curves of results are
                known.growing.setdefault(trial.key, {})[epoch] = score
        growing = [
            _curve(key, sorted(points.items()), is_baseline=NON_PRIVATE in key, is_over=False)
            for key, points in known.growing.items()
        ]
        return {
            "folder": found.folder,
            "name": found.name,
            "state": found.state,
            "ended": _ended(found),
            "trials": sum(found.trials.values()),
            "counts": dict(found.trials),
            "left": snapshot.seconds_left if snapshot and found.state == "running" else None,
            "score": _main_word(known.task),
            "unit": _unit(main_metric(known.task).format),
            "problem": known.problem,
            "curves": [*known.curves, *growing][-_MOST_CURVES:],
            "all_curves": len(known.curves) + len(growing),
            **(known.shown or _NOTHING_READ),
        }


def _plain(value: Any) -> Any:
    """Return the value with None for numbers that are not finite, which JSON does not have."""
    match value:
        case float() if not math.isfinite(value):
            return None
        case Mapping():
            return {key: _plain(each) for key, each in value.items()}
        case list() | tuple():
            return type(value)(map(_plain, value))
    return value


def _ended(found: SweepSummary) -> int:
    """Return the number of trials that are over; without a status.json all are taken to be."""
    if found.snapshot is None:
        return sum(found.trials.values())
    return sum(trial.state.has_ended for trial in found.snapshot.trials)


def _read(folder: str, known: _Known) -> bool:
    """Read the results of a sweep, after checking what they claim; a sweep that cannot be read says why.

    Returns: False where its storage did not answer, which may pass.
    """
    try:
        data: PublishedSweep = checked_record(SweepFiles(folder)).data()
    except DpsweepError as error:
        known.problem = str(error).splitlines()[0]
        return not isinstance(error, StorageError)
    finished = [trial for trial in data.trials if trial.state is TrialState.FINISHED]
    known.task, known.problem, known.curves = data.task, "", _curves(data)
    compared = _compared(SweepFiles(folder))
    by_candidates = importance(_candidates(SweepFiles(folder)))
    known.shown = {
        "best": _best(data, compared.useless),
        "settings": _points(finished),
        "neighbours": _neighbours(finished),
        "parallel": _parallel(finished),
        "importance": by_candidates or ([] if compared.is_alike else importance(data.trials)),
        "alike": compared.is_alike,
    }
    for trial in data.trials:
        if trial.history:
            known.growing.pop(trial.key, None)
    return True


def _candidates(files: SweepFiles) -> tuple[PublishedTrial, ...]:
    """Return the candidates of the sweep's tuning, which vary more than what was trained with the best; () without
    one.
    """
    tuning = files.of_tuning
    try:
        return checked_record(tuning).data().trials if exists(tuning.manifest) else ()
    except DpsweepError:
        return ()


@dataclass(frozen=True)
class _Compared:
    """What the report says of a sweep. `useless`: by setting why it has learnt nothing, "" if it has. `is_alike`:
    whether it compares several methods and tells none from another one.
    """

    useless: Mapping[str, str] = field(default_factory=dict)
    is_alike: bool = False


def _compared(files: SweepFiles) -> _Compared:
    """Return what the report of a sweep says by its intervals; nothing before that is written."""
    if not exists(files.comparison):
        return _Compared()
    try:
        found = parsed_json(read_bytes(files.comparison))
        useless = {str(each["name"]): str(each["useless"]) for each in found["settings"]}
        verdicts = {str(each["verdict"]) for each in found.get("differences", ())}
        return _Compared(useless, bool(verdicts) and verdicts.isdisjoint(("better", "worse")))
    except (DpsweepError, ValueError, TypeError, KeyError):
        return _Compared()


def _best(data: PublishedSweep, said_useless: Mapping[str, str]) -> str:
    """Return the private setting with the best mean of the main score, of those that have learnt something.

    A single trial would be the luckiest seed. Intervals are not computed here, while trials run; the report's are
    respected.
    """
    found = findings(data, NO_EVIDENCE)
    useless = {**found.useless, **said_useless}
    setting = found.best(found.main.name, [each for each in found.private if not useless.get(each.name)])
    reached = setting.over_seeds(main) if setting else None
    if setting is None or reached is None:
        first = found.private[0].name if found.private else ""
        return f"none of use: {first} {useless[first].partition(' (')[0]}" if first else ""
    seeds = f"mean of {reached.count} seeds" if reached.count > 1 else "one seed"
    shown = found.main.format.one(reached.mean)
    claim = f"{found.per_unit(setting)}{', an estimate' * bool(setting.reasons)}"
    return f"{setting.name}: {found.word} {shown} ({seeds}) at ε = {at_most(setting.highest_epsilon)}{claim}"


def _curves(data: PublishedSweep) -> list[dict[str, Any]]:
    """Return the main score by epoch of the trials that are over."""
    name = f"test_{task_called(data.task).main}"
    curves = []
    for trial in data.trials:
        scores = ((each.epoch, each.metrics.get(name, -math.inf)) for each in trial.history)
        points = [(epoch, score) for epoch, score in scores if score >= LEAST_DRAWN]
        if points:
            curves.append(_curve(trial.key, points, is_baseline=trial.is_baseline, is_over=True))
    return curves


def _curve(key: str, points: Sequence[tuple[int, float]], is_baseline: bool, is_over: bool) -> dict[str, Any]:
    x, y = zip(*points, strict=True)
    return {"key": key, "setting": _SEED.split(key)[0], "x": x, "y": y, "baseline": is_baseline, "over": is_over}


def _points(trials: Sequence[PublishedTrial]) -> list[dict[str, Any]]:
    """Return each finished trial as a point of the comparison; epsilon is None for a baseline."""
    return [
        {
            "name": trial.key,
            "method": str(trial.labels.get("clipping", "")),
            "epsilon": None if trial.is_baseline else epsilon(trial),
            "main": score if (score := main(trial)) is not None and score >= LEAST_DRAWN else None,
        }
        for trial in trials
    ]


def _neighbours(trials: Sequence[PublishedTrial]) -> list[str]:
    """Return the adjacencies of the epsilons, each with its unit: those of others must not be compared with them."""
    costs = (trial.privacy for trial in trials if trial.privacy and trial.privacy.is_private)
    return sorted({f"{each.adjacency}{per_unit(each.unit)}" for each in costs})


def _main_word(task: str) -> str:
    """Return the main score of a task as a sentence calls it."""
    return spoken(group_metric(task_called(task).main))


def _unit(shown: Format) -> str:
    """Return the unit of a share, which the page multiplies by 100; "" of other numbers."""
    return "%" if shown is PERCENT else shown.points


def _parallel(trials: Sequence[PublishedTrial]) -> list[dict[str, Any]]:
    """Return an axis for each choice that varies, and for the main score and `_AXES`; [] for too few trials."""
    private = [trial for trial in trials if not trial.is_baseline]
    if len(private) < 2:
        return []
    rows = choices(private)
    axes = [_axis(name, [row.get(name) for row in rows]) for name in dict.fromkeys(n for row in rows for n in row)]
    for each in METRICS:
        values = [each.value(trial) for trial in private]
        is_chosen = each.name in rows[0]
        if each.name in _AXES and not is_chosen and all(value is not None for value in values):
            axes.append({"label": without_unit(each.heading), "values": values, "unit": _unit(each.format)})
    task = task_of(private)
    values = [main(trial) for trial in private]
    return [*axes, {"label": _main_word(task), "values": values, "unit": _unit(main_metric(task).format)}]


def _axis(name: str, values: Sequence[Label | None]) -> dict[str, Any]:
    """Return an axis of numbers as they are, of texts by their places among all texts."""
    if all(isinstance(value, int | float) for value in values):
        return {"label": name, "values": list(values)}
    named = ["–" if value is None else str(value) for value in values]
    texts = sorted({*named})
    return {"label": name, "values": [texts.index(text) for text in named], "texts": texts}


def board_page(state: Mapping[str, Any], period: float) -> str:
    """Return the page as one HTML document that asks ``/state`` again every ``period`` seconds."""
    template = Template(
        resources("dpsweep.orchestration.report").joinpath("dashboard.html").read_text(encoding="utf-8")
    )
    return template.substitute(plotly=packed_plotly(), state=script_safe(state), period=str(round(1000 * period)))
