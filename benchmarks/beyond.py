"""Draws the figures that go beyond the papers, each from one stored sweep; `benchmarks.figures` names them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from benchmarks.charts import Axis, Panel, Point, Series, chart
from benchmarks.reproduced import Number, StoredSetting, StoredSweep
from dpsweep.orchestration.report.plot import CLIPPING_COLOURS, PALETTE

GROUPS: Final = {"Male": PALETTE[0], "Female": PALETTE[1]}
CLASSES: Final = {"2": PALETTE[0], "8": PALETTE[1]}


def over(numbers: Iterable[tuple[float, Number]], name: str, colour: str, joined: bool = False) -> Series:
    """Return a series of numbers with their intervals, given as (x, number); sorted by x."""
    points = [Point(x, number.mean, y_ends=number.ends) for x, number in sorted(numbers, key=lambda at: at[0])]
    return Series(name, colour, points, joined=joined)


def _private(sweep: StoredSweep) -> list[StoredSetting]:
    return [setting for setting in sweep.settings if "epsilon" in setting.numbers]


def _rows(settings: Sequence[StoredSetting], number: str, name: str, colour: str, hollow: bool = False) -> Series:
    """Return one point per setting, from the top down."""
    known = [(-row, setting.numbers[number]) for row, setting in enumerate(settings) if number in setting.numbers]
    points = [Point(found.mean, row, x_ends=found.ends) for row, found in known]
    return Series(name, colour, points, hollow=hollow)


def _names(settings: Sequence[StoredSetting]) -> Axis:
    return Axis("", {-row: setting.name for row, setting in enumerate(settings)})


def payers(sweep: StoredSweep, groups: Mapping[str, str] = GROUPS) -> str:
    """Accuracy and mean epsilon_i of each group by setting. groups: names and colours."""
    settings = _private(sweep)
    shown = (("test accuracy", "by_group.{}.accuracy"), ("mean εᵢ of the training examples", "epsilon_of.{}"))
    panels = [
        Panel(
            title,
            Axis(),
            _names(settings),
            [_rows(settings, number.format(group), group, colour) for group, colour in groups.items()],
        )
        for title, number in shown
    ]
    return chart(panels, height=110 + 34 * len(settings), left=190)


def digits(sweep: StoredSweep) -> str:
    """Accuracy against mean epsilon_i, one point per digit, for each way of clipping (paper A, Figures 6 and 8)."""
    methods = {"flat": "one bound for all", "individual": "individual clipping"}

    def points(setting: StoredSetting) -> list[Point]:
        names = [number.partition(".")[2] for number in setting.numbers if number.startswith("epsilon_of.")]
        found = [
            (setting.numbers[f"epsilon_of.{name}"], setting.numbers[f"by_group.{name}.accuracy"]) for name in names
        ]
        return [Point(paid.mean, accuracy.mean, y_ends=accuracy.ends) for paid, accuracy in found]

    series = []
    for setting in _private(sweep):
        method = str(setting.parameters["clipping.name"])
        series.append(Series(methods[method], CLIPPING_COLOURS[method], points(setting)))
    return chart([Panel("test accuracy of each digit", Axis("mean εᵢ of its training examples"), Axis(), series)])


def bounds(sweep: StoredSweep) -> str:
    """Change of accuracy against the bound, for all examples and by group, for each method."""
    methods = {"flat": "DPSGD", "dpsgd_f": "DPSGD-F"}
    numbers = {"all": "accuracy_change", **{group: f"by_group.{group}.accuracy_change" for group in GROUPS}}

    def series(method: str, number: str) -> Series:
        found = (
            (float(setting.parameters["clipping.params.bound"] or 0.0), setting.numbers[number])
            for setting in _private(sweep)
            if setting.parameters["clipping.name"] == method
        )
        return over(found, methods[method], CLIPPING_COLOURS[method], joined=True)

    panels = [
        Panel(
            f"change of accuracy, {title}",
            Axis("clipping bound", logarithmic=True),
            Axis(),
            [series(method, number) for method in methods],
        )
        for title, number in numbers.items()
    ]
    return chart(panels, height=330)


def filters(sweep: StoredSweep) -> str:
    """Accuracy over all examples and by group, for flat clipping and filters."""
    settings = _private(sweep)
    numbers = {"all": "accuracy", **{group: f"by_group.{group}.accuracy" for group in GROUPS}}
    panels = [
        Panel(
            title, Axis("test accuracy"), _names(settings), [_rows(settings, number, "mean and interval", PALETTE[0])]
        )
        for title, number in numbers.items()
    ]
    return chart(panels, height=110 + 34 * len(settings), left=170)


def tuning(sweep: StoredSweep) -> str:
    """Accuracy against two gaps between the groups, one point per choice of bound and learning rate."""
    names = {"": "non-private", "flat": "DPSGD", "global_adaptive": "DPSGD-Global-Adapt"}
    colours = {"": CLIPPING_COLOURS["non-private"], "flat": PALETTE[0], "global_adaptive": PALETTE[1]}

    def series(method: str, number: str) -> Series:
        chosen = [
            setting
            for setting in sweep.settings
            if (setting.parameters["clipping.name"] if "epsilon" in setting.numbers else "") == method
        ]
        points = [
            Point(
                setting.numbers["accuracy"].mean,
                setting.numbers[number].mean,
                setting.numbers["accuracy"].ends,
                setting.numbers[number].ends,
            )
            for setting in chosen
        ]
        return Series(names[method], colours[method], points, hollow=method == "")

    shown = {"gap of accuracy": "accuracy_gap", "equalised odds, difference": "equalized_odds_difference"}
    panels = [
        Panel(title, Axis("test accuracy"), Axis(), [series(method, number) for method in names])
        for title, number in shown.items()
    ]
    return chart(panels, height=360)
