"""Judges each table and figure of the papers by a rule, from the intervals of stored results."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Final, Literal

from benchmarks.experiments import EXPERIMENTS
from benchmarks.printed import Item
from benchmarks.reproduced import Number, StoredSweep

Verdict = Literal["inside", "outside", "no interval", "not measured"]
"""Of one printed number."""

Outcome = Literal["reproduced", "in shape", "not", "cannot be told", "cannot be tried", "not judged"]
"""Of a table or figure, by `Judged.outcome`."""

RULE: Final = (
    "**Verdicts follow a rule.**\n\n"
    "- *Reproduced*: every printed number that we have an interval for lies inside it.\n\n"
    "- *In shape*: not that, but wherever our intervals separate two printed numbers of one kind, ours have the "
    "printed order, and there is at least one such pair.\n\n"
    "- *Not*: our intervals show another order, or separate no two numbers.\n\n"
    "- *Cannot be tried*: nothing was trained."
)


@dataclass(frozen=True)
class Result:
    """A table or figure of a paper.

    `sweep`: the stored sweep that tries it.
    `items`: the start of the names of its numbers there.
    `headline`: the name of the number that the scorecard shows.
    `why`: the reason of the verdict, as far as it is known.
    """

    item: str
    sweep: str
    headline: str
    why: str
    items: str | tuple[str, ...] = ""

    def of(self) -> tuple[Item, ...]:
        """Return the numbers of the sweep that belong to it."""
        return tuple(each for each in EXPERIMENTS[self.sweep].items if each.item.startswith(self.items))


@dataclass(frozen=True)
class Missing:
    """A table or figure that no sweep tries, and why."""

    item: str
    why: str


_SMALL_NET: Final = "small network (ResNet20 needs a GPU)"
_TWO_LAYERS: Final = "our noise is scaled to both layers together, the paper's most likely 4σ a layer"

RESULTS: Final[Mapping[str, tuple[Result, ...]]] = {
    "Paper A: individual accounting": (
        Result("Table 2, MNIST", "a-mnist", "Table 2: mean epsilon_i", _SMALL_NET, "Table 2"),
        Result("Table 3, MNIST", "a-mnist", "Table 3: test accuracy, maximum clipping", _SMALL_NET, "Table 3"),
        Result(
            "Table 3, another network",
            "a-mnist-cnn",
            "Table 3: test accuracy, maximum clipping",
            "two convolutions, nearer",
            "Table 3",
        ),
        Result(
            "Figure 4, r of estimates",
            "a-mnist",
            "Figure 4: r of estimated and exact epsilon_i",
            "above .99 from one refresh an epoch",
            "Figure 4",
        ),
        Result(
            "Figures 5 and 7, r with loss",
            "a-mnist",
            "Figure 5: r of epsilon_i and log loss",
            "rises with the network (next line); .94 on Adult",
            ("Figure 5", "Figure 7"),
        ),
        Result(
            "Figures 5 and 7, another network",
            "a-mnist-cnn",
            "Figure 5: r of epsilon_i and log loss",
            "two convolutions, nearer",
            ("Figure 5", "Figure 7"),
        ),
        Result(
            "Appendix F, hinge loss",
            "a-mnist-hinge",
            "Hinge loss: r of estimates at 1 refresh per epoch",
            "on MNIST, small network; above .99, as printed",
        ),
        Result(
            "Appendices C and E, bounds",
            "a-thresholds",
            "1 M: share within 1 % of the worst case",
            "on MNIST, not CIFAR-10: fewer pay the worst case at higher bounds, as printed",
        ),
        Result(
            "Appendix D, membership",
            "a-mnist",
            "Appendix D: membership inference",
            "guessing, as printed: the network hardly overfits",
            "Appendix D",
        ),
        Result(
            "Figure 14, CIFAR-10",
            "a-cifar-small",
            "mean epsilon_i of cats",
            "30 epochs in place of 300: nearly all pay the worst case",
        ),
        Result("Figures 1, 2, 12, CIFAR-10", "a-cifar", "", "300 epochs of a WRN16-4 need a GPU"),
    ),
    "Paper C: model publishing": (
        Result(
            "Table II, schedules",
            "c-table2",
            "Time, test accuracy",
            f"every schedule is above uniform noise, as printed, at a lower level: {_TWO_LAYERS}",
        ),
        Result("Table II, uniform", "c-table2-uniform", "Uniform, test accuracy", "as above"),
        Result(
            "Table II, noise 4σ a layer",
            "c-table2-layers",
            "Time, test accuracy",
            "with 4σ on each layer, at twice the printed ρ; uniform noise is two points short",
        ),
        Result(
            "Table II, validation",
            "c-table2-validation",
            "Validation, test accuracy",
            "as Table II, schedules",
            "Validation",
        ),
        Result(
            "Table II, equal epochs",
            "c-table2-same-epochs",
            "38 epochs as Time, uniform: test accuracy",
            "fewer epochs of uniform noise are better, as printed",
        ),
        Result(
            "Table II, 64 and 100 epochs",
            "c-table2-longer",
            "64 epochs as Validation, uniform: test accuracy",
            "as Table II, schedules",
        ),
        Result(
            "Figure 4, validation",
            "c-table2-validation",
            "Figure 4: epochs at noise multiplier 10",
            "checks without a gain begin at epoch 20, in print at 29",
            "Figure 4",
        ),
        Result(
            "Table IV, hidden layers",
            "c-table4",
            "3 hidden: test accuracy",
            "more layers cost more than printed: the noise grows with the root of their number",
        ),
        Result(
            "Figure 6, training times",
            "c-figure6",
            "time, 30 epochs: test accuracy",
            "30 epochs are best and 100 near uniform, as printed; no rise to 60",
        ),
        Result(
            "Figure 7, decay rates",
            "c-figure7",
            "decay 0.05: test accuracy",
            "a maximum between, at .05, not .2",
        ),
        Result(
            "Figure 8, validation factors",
            "c-figure8",
            "factor 0.7: test accuracy",
            ".3 to .7 are equal, .9 is worse; the longer training costs more than the schedule gains",
        ),
        Result(
            "Figure 9, learning rates",
            "c-figure9",
            "end 0.05: test accuracy",
            "too large a rate costs accuracy, as printed; too small a one does not",
        ),
        Result(
            "Figure 10, hidden units",
            "c-figure10",
            "800 units: test accuracy",
            "1600 units lose 1.7 points of 200, none in print",
        ),
        Result(
            "Figure 11(a), initial noise",
            "c-figure11",
            "initial noise 10: test accuracy",
            "a point at most from 7 to 20, as printed",
        ),
        Result(
            "Figure 11(b), one decay",
            "c-figure11-decay",
            "initial noise 20: test accuracy",
            "a fall, as printed, by the longer training",
        ),
        Result(
            "Figure 14, Cancer",
            "c-cancer-exponential",
            "exponential, test accuracy",
            "no gain over uniform noise",
        ),
    ),
    "Paper D: disparate impact": (
        Result(
            "Table 1, Adult, drawn splits",
            "d-adult",
            "DPSGD-F, all",
            "at C₀ = .5 DPSGD-F changes accuracy by half of what is printed; DPSGD and Naive predict one class",
            ("SGD", "DPSGD", "Naive"),
        ),
        Result(
            "Table 1, Adult, UCI's split",
            "d-adult-uci",
            "DPSGD-F, all",
            "C₀ is not printed: .5 was chosen of three because it came closest, at noise multiplier 1.05",
            ("SGD", "DPSGD", "Naive"),
        ),
        Result(
            "Table 1, Dutch",
            "d-dutch",
            "DPSGD-F, all",
            "prepared otherwise: SGD serves women better; at C₀ = .1 both groups get one bound",
            ("SGD", "DPSGD", "Naive"),
        ),
        Result(
            "Table 1, MNIST",
            "d-mnist",
            "DPSGD-F, 8",
            "layer sizes and count noise are not printed; class 8 has 2.3 examples a batch",
            ("SGD", "DPSGD", "Naive"),
        ),
        Result(
            "Table 1, MNIST, 20 epochs",
            "d-mnist-short",
            "DPSGD-F, 8",
            "Naive changes class 8 as printed; DPSGD-F loses more of it, not so in print",
            ("SGD", "DPSGD", "Naive"),
        ),
        Result(
            "Table 2, Adult",
            "d-adult",
            "Table 2: DPSGD, norm of mean gradient, Male",
            "fits in order of size for DPSGD, not for SGD",
            "Table 2",
        ),
        Result(
            "Table 2, Adult, UCI's split",
            "d-adult-uci",
            "Table 2: DPSGD, norm of mean gradient, Male",
            "as on drawn splits",
            "Table 2",
        ),
        Result(
            "Table 2, Dutch",
            "d-dutch",
            "Table 2: DPSGD, norm of mean gradient, male",
            "as Table 1",
            "Table 2",
        ),
        Result(
            "Table 2, MNIST",
            "d-mnist",
            "Table 2: DPSGD, norm of mean gradient, 8",
            "for DPSGD-F and class 8 it is 97, in print 2.53",
            "Table 2",
        ),
        Result(
            "Table 2, MNIST, 20 epochs",
            "d-mnist-short",
            "Table 2: DPSGD, norm of mean gradient, 8",
            "norms of Naive and DPSGD-F are far above the printed ones",
            "Table 2",
        ),
        Result(
            "Table 3, bounds",
            "d-table3",
            "C = 5, 8",
            "higher bounds lose less, class 8 most, as printed, at a lower level: 20 epochs, small network",
        ),
        Result(
            "Table 1, search for C₀",
            "d-mnist-search",
            "DPSGD-F, bound 1, count noise 2, memory 0.95, 8",
            "nothing tried brings class 8 to the printed value; six epochs",
        ),
        Result(
            "Figure 3(b), noise",
            "d-figure3",
            "DPSGD-F, σ 3.2, 8",
            "under DPSGD-F the distance grows up to a noise of 3.2, less than seeds vary; DPSGD loses class 8 at any",
        ),
    ),
}

MISSING: Final = (
    Missing("A, CIFAR-10: Table 2 and Figures 9 to 11", "300 epochs of a WRN16-4 need a GPU"),
    Missing("A, UTKFace", "the photographs are not at hand; `a-utkface` is ready"),
    Missing("C, Table I and Figure 1", "they explain the method and print nothing that training could change"),
    Missing("C, CIFAR-10", "the weights of VGG16 are not at hand"),
)


def verdict(item: Item, number: Number | None) -> Verdict | None:
    """Return whether a printed number lies inside our interval; None where none is printed.

    ``inside``: the printed number, plus or minus half a unit of its last digit, meets the 95 % interval of our mean. A
    printed lower limit, as in "> .99", is one side of that. ``no interval``: a single run, whose difference may be
    chance.

    >>> item = Item("accuracy", "flat", "accuracy", ".93")
    >>> verdict(item, Number((0.92, 0.94), 0.9251, 0.94)), verdict(item, Number((0.94,), 0.936, 0.944))
    ('inside', 'outside')
    """
    value = printed_value(item)
    if value is None:
        return None
    if number is None:
        return "not measured"
    if number.ends is None:
        return "no interval"
    printed, half = value
    low, high = number.ends
    is_limit = item.printed.startswith(">")
    return "inside" if float(printed - half) <= high and (is_limit or float(printed + half) >= low) else "outside"


def printed_value(item: Item) -> tuple[Decimal, Decimal] | None:
    """Return the printed number and half a unit of its last digit; None where the paper prints none."""
    found = re.fullmatch(r"(?:> )?([-+]?\d*\.?\d+)", item.printed)
    if found is None:
        return None
    printed = Decimal(found[1])
    return printed, Decimal(1).scaleb(int(printed.as_tuple().exponent)) / 2


def number_of(sweep: StoredSweep, item: Item) -> Number | None:
    """Return our number for a printed one; None where it was not measured."""
    setting = next((each for each in sweep.settings if each.name == item.setting), None)
    return None if setting is None else setting.numbers.get(item.number)


@dataclass(frozen=True)
class Judged:
    """A table or figure, judged. `said`: verdicts of its printed numbers. `orders`: for any two of one kind that our
    intervals tell apart, whether ours stand as printed. `is_tried`: whether anything was trained for it.
    """

    said: tuple[Verdict, ...]
    orders: tuple[bool, ...]
    is_tried: bool = True

    @property
    def outcome(self) -> Outcome:
        """Return the verdict by `RULE`."""
        if not self.is_tried:
            return "cannot be tried"
        if not self.said:
            return "not judged"
        if not {"inside", "outside"} & set(self.said):
            return "cannot be told"
        if "outside" not in self.said:
            return "reproduced"
        return "in shape" if self.orders and all(self.orders) else "not"


def judged(items: Sequence[Item], sweep: StoredSweep | None) -> Judged:
    """Judge printed numbers by a stored sweep; None is one that was not trained."""
    if sweep is None:
        return Judged((), (), is_tried=False)
    measured = [(item, number_of(sweep, item)) for item in items]
    said = tuple(found for item, number in measured if (found := verdict(item, number)) is not None)
    return Judged(said, tuple(_orders([(item, number) for item, number in measured if number is not None])))


def _orders(measured: Sequence[tuple[Item, Number]]) -> Iterator[bool]:
    for (one, ours), (other, theirs) in itertools.combinations(measured, 2):
        printed, against = printed_value(one), printed_value(other)
        if printed is None or against is None or ours.ends is None or theirs.ends is None:
            continue
        if _kind(one) != _kind(other) or abs(printed[0] - against[0]) <= printed[1] + against[1]:
            continue
        if ours.ends[0] > theirs.ends[1] or theirs.ends[0] > ours.ends[1]:
            yield (ours.mean > theirs.mean) == (printed[0] > against[0])


def _kind(item: Item) -> str:
    """Return what is measured, for all examples or a group.

    >>> [_kind(Item("", "", number)) for number in ("by_group.8.accuracy_change", "mean_gradient.8", "accuracy")]
    ['accuracy_change', 'mean_gradient', 'accuracy']
    """
    parts = item.number.split(".")
    return parts[-1] if parts[0] == "by_group" else parts[0]
