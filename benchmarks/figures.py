"""The figures of the pages on the papers, each drawn from stored sweeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from benchmarks import beyond
from benchmarks.charts import Axis, Panel, Point, Series, chart
from benchmarks.reproduced import StoredSetting, StoredSweep
from dpsweep.orchestration.report.plot import CLIPPING_COLOURS, PALETTE

Stored = Mapping[str, StoredSweep]


@dataclass(frozen=True)
class Figure:
    """A figure. title: its text alternative. sweeps: names of the sweeps it is drawn from. draw: makes its SVG."""

    title: str
    sweeps: tuple[str, ...]
    draw: Callable[[Stored], str]


def _alone(name: str, title: str, draw: Callable[[StoredSweep], str]) -> Figure:
    """Return a figure of one sweep."""
    return Figure(title, (name,), lambda stored: draw(stored[name]))


_MOST_POINTS: Final = 20
"""Largest number of points of a curve."""


def _curve(name: str, colour: str, values: tuple[float, ...]) -> Series:
    """Values after each epoch, joined; at most `_MOST_POINTS` of them, the last one included."""
    stride = -(-len(values) // _MOST_POINTS)
    shown = range(len(values) - 1, -1, -stride)
    points = [Point(epoch + 1, values[epoch]) for epoch in reversed(shown)]
    return Series(name, colour, points, joined=True)


_SCHEDULES: Final = ("c-table2-uniform", "c-table2", "c-table2-validation")
_NAMES: Final = {"constant": "uniform"}


def _schedules(stored: Stored) -> Iterator[tuple[str, str, StoredSetting]]:
    """Name, colour and numbers of each schedule of paper C's Table II."""
    settings = (setting for sweep in _SCHEDULES for setting in stored[sweep].settings)
    for colour, setting in zip(PALETTE, settings, strict=False):
        schedule = str(setting.parameters["schedule"])
        yield _NAMES.get(schedule, schedule), colour, setting


def _over_epochs(title: str, curve: str) -> Callable[[Stored], str]:
    """Draws one curve of all schedules of Table II; for accuracy also that of the longest non-private run."""

    def draw(stored: Stored) -> str:
        series = [_curve(name, colour, setting.curves[curve]) for name, colour, setting in _schedules(stored)]
        plain = [each.curves for each in stored["c-table2-same-epochs"].settings if "epsilon" not in each.numbers]
        if curve == "accuracy":
            longest = max((each[curve] for each in plain), key=len)
            series.append(_curve("without privacy", CLIPPING_COLOURS["non-private"], longest))
        return chart([Panel(title, Axis("epoch"), Axis(), series)], height=330)

    return draw


def _both_accuracies(stored: Stored) -> str:
    """Paper C, Figure 5: training and test accuracy of each schedule of Table II."""
    schedules = list(_schedules(stored))
    series = [
        beyond.over([(place, setting.numbers[number]) for place, (_, _, setting) in enumerate(schedules)], name, colour)
        for number, name, colour in (("training_accuracy", "training", PALETTE[0]), ("accuracy", "test", PALETTE[1]))
    ]
    axis = Axis("", {place: name for place, (name, _, _) in enumerate(schedules)})
    return chart([Panel("accuracy of each schedule", axis, Axis(), series)], height=330)


def _training_times(stored: Stored) -> str:
    """Paper C, Figure 6: accuracy by the epochs that the budget lasts, for each schedule."""
    by_schedule: dict[str, list[StoredSetting]] = {}
    for setting in stored["c-figure6"].settings:
        by_schedule.setdefault(str(setting.parameters["schedule"]).partition(" (")[0], []).append(setting)
    uniform = stored["c-table2-uniform"].settings[0].numbers

    def panel(title: str, number: str) -> Panel:
        series = [
            beyond.over(
                [(each.numbers["epochs"].mean, each.numbers[number]) for each in settings], name, colour, joined=True
            )
            for colour, (name, settings) in zip(PALETTE, by_schedule.items(), strict=False)
        ]
        return Panel(title, Axis("epochs"), Axis(), series, levels={"uniform": uniform[number].mean})

    return chart([panel("training accuracy", "training_accuracy"), panel("test accuracy", "accuracy")], height=330)


_LEAST_NORM: Final = 1e-6
"""Smaller norms are drawn as it: once a class is certain, they round to 0."""


def _median_norms(sweep: StoredSweep) -> str:
    """Paper A, Figure 3: the median gradient norm of each class over the epochs, with one bound for all."""
    curves = next(each for each in sweep.settings if each.name == "flat · constant").curves
    shown = {
        digit: tuple(max(value, _LEAST_NORM) for value in curves[f"median norm of {digit}"]) for digit in range(10)
    }
    last = {digit: values[-1] for digit, values in shown.items()}
    low, high = min(last, key=last.__getitem__), max(last, key=last.__getitem__)
    colours = dict.fromkeys(range(10), CLIPPING_COLOURS["non-private"]) | {high: PALETTE[1], low: PALETTE[0]}
    series = [
        _curve(f"class {digit}" if digit in (low, high) else "the others", colour, shown[digit])
        for digit, colour in sorted(colours.items(), key=lambda each: each[0] in (low, high))
    ]
    return chart(
        [
            Panel(
                f"median gradient norm of each class, at least {_LEAST_NORM:g}",
                Axis("epoch"),
                Axis(logarithmic=True),
                series,
            )
        ],
        height=330,
    )


_METHODS: Final = {
    "non-private": ("SGD", CLIPPING_COLOURS["non-private"]),
    "flat · constant": ("DPSGD", PALETTE[0]),
    "dpsgd_f · constant": ("DPSGD-F", PALETTE[1]),
}
"""Name and colour of the methods that the figures of paper D compare."""


def _compared(sweep: StoredSweep) -> list[StoredSetting]:
    return [setting for setting in sweep.settings if setting.name in _METHODS]


def _classes(sweep: StoredSweep) -> str:
    """Paper D, Figure 1: accuracy of each class by method."""
    series = []
    for setting in _compared(sweep):
        name, colour = _METHODS[setting.name]
        series.append(
            beyond.over([(digit, setting.numbers[f"by_group.{digit}.accuracy"]) for digit in range(10)], name, colour)
        )
    axis = Axis("class", {digit: str(digit) for digit in range(10)})
    return chart([Panel("test accuracy of each class", axis, Axis(), series)], height=330)


def _class_bounds(sweep: StoredSweep) -> str:
    """Paper D, Figure 2: the clipping bound of each class over the epochs of DPSGD-F."""
    setting = next(each for each in sweep.settings if each.name == "dpsgd_f · constant")
    colours = dict.fromkeys(range(10), CLIPPING_COLOURS["non-private"]) | {2: PALETTE[0], 8: PALETTE[1]}
    names = {2: "class 2", 8: "class 8"}
    series = [
        _curve(names.get(digit, "the others"), colour, setting.curves[f"bound of {digit}"])
        for digit, colour in sorted(colours.items(), key=lambda each: each[0] in names)
    ]
    return chart([Panel("clipping bound of DPSGD-F", Axis("epoch"), Axis(), series)], height=330)


def _change_over_epochs(sweep: StoredSweep) -> str:
    """Paper D, Figure 3(a): change of accuracy against SGD after as many epochs, by class and method."""
    plain, *private = _compared(sweep)

    def series(setting: StoredSetting, digit: int) -> Series:
        pairs = zip(setting.curves[f"accuracy of {digit}"], plain.curves[f"accuracy of {digit}"], strict=True)
        return _curve(f"class {digit}", beyond.CLASSES[str(digit)], tuple(own - other for own, other in pairs))

    panels = [
        Panel(
            f"change of accuracy, {_METHODS[setting.name][0]}",
            Axis("epoch"),
            Axis(),
            [series(setting, digit) for digit in (2, 8)],
        )
        for setting in private
    ]
    return chart(panels, height=330)


def _change_over_noise(sweep: StoredSweep) -> str:
    """Paper D, Figure 3(b): change of accuracy against SGD by noise multiplier, by class and method."""

    def series(method: str, digit: int) -> Series:
        settings = [each for each in sweep.settings if each.name.startswith(f"{method} ")]
        numbers = [
            (each.numbers["noise_multiplier"].mean, each.numbers[f"by_group.{digit}.accuracy_change"])
            for each in settings
        ]
        return beyond.over(numbers, f"class {digit}", beyond.CLASSES[str(digit)], joined=True)

    panels = [
        Panel(
            f"change of accuracy, {name}",
            Axis("noise multiplier", logarithmic=True),
            Axis(),
            [series(method, digit) for digit in (2, 8)],
        )
        for method, name in (("flat", "DPSGD"), ("dpsgd_f", "DPSGD-F"))
    ]
    return chart(panels, height=330)


_FROM_TABLE_2: Final = (*_SCHEDULES, "c-table2-same-epochs")
FIGURES: Final[Mapping[str, Figure]] = {
    "a-mnist": _alone("a-mnist", "Test accuracy of each digit against the mean epsilon of its examples", beyond.digits),
    "a-mnist-cnn": _alone(
        "a-mnist-cnn",
        "Test accuracy of each digit against the mean epsilon of its examples, of a convolutional network",
        beyond.digits,
    ),
    "a-figure3": _alone(
        "a-mnist", "Median gradient norm of each class over the epochs, with one bound for all", _median_norms
    ),
    "c-figure4": Figure(
        "Noise multiplier over the epochs of each schedule of paper C's Table II",
        _FROM_TABLE_2,
        _over_epochs("noise multiplier", "noise_multiplier"),
    ),
    "c-figure5": Figure(
        "Training and test accuracy of each schedule of paper C's Table II", _SCHEDULES, _both_accuracies
    ),
    "c-figure6": Figure(
        "Training and test accuracy against the epochs that the budget lasts, by schedule",
        ("c-figure6", "c-table2-uniform"),
        _training_times,
    ),
    "c-figure12": Figure(
        "Test accuracy over the epochs of each schedule of paper C's Table II, and without privacy",
        _FROM_TABLE_2,
        _over_epochs("test accuracy", "accuracy"),
    ),
    "c-figure13": Figure(
        "rho spent after each epoch by each schedule of paper C's Table II",
        _FROM_TABLE_2,
        _over_epochs("ρ spent, with that of the DP-PCA", "rho"),
    ),
    "d-figure1": _alone("d-mnist", "Test accuracy of each class under SGD, DPSGD and DPSGD-F", _classes),
    "d-figure2": _alone("d-mnist", "Clipping bound of each class over the epochs of DPSGD-F", _class_bounds),
    "d-figure3": _alone(
        "d-mnist", "Change of accuracy of classes 2 and 8 over the epochs of DPSGD and DPSGD-F", _change_over_epochs
    ),
    "d-figure3-noise": _alone(
        "d-figure3",
        "Change of accuracy of classes 2 and 8 against the noise multiplier of DPSGD and DPSGD-F",
        _change_over_noise,
    ),
    "adult-payers": _alone(
        "adult-payers",
        "Accuracy and mean epsilon of single examples by group, for each method and schedule",
        beyond.payers,
    ),
    "mnist-payers": _alone(
        "mnist-payers",
        "Accuracy and mean epsilon of single examples of classes 2 and 8, for each method and schedule",
        lambda sweep: beyond.payers(sweep, beyond.CLASSES),
    ),
    "adult-bounds": _alone(
        "adult-bounds", "Change of accuracy against the clipping bound, for DPSGD and DPSGD-F", beyond.bounds
    ),
    "adult-filter": _alone(
        "adult-filter", "Test accuracy of flat clipping and of filters with less noise", beyond.filters
    ),
    "adult-tuning": _alone(
        "adult-tuning",
        "Accuracy against gaps between the groups for all choices of bound and learning rate",
        beyond.tuning,
    ),
}
"""All figures, by the name of their file in docs/images."""
