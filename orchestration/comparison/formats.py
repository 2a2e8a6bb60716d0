"""Numbers and untrusted text as the report, the terminal and messages show them. Pure; every result is plain text."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Final

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement, measure_renderables
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from dpsweep.accounting.mechanism.estimates import Kind
from dpsweep.accounting.mechanism.units import EXAMPLE
from dpsweep.orchestration.comparison.statistics import Spread

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_MARKDOWN = re.compile(r"([\\`*_\[\]<>!#|~&])")


def for_terminal(text: str) -> str:
    """Return the text with terminal control characters and characters that change the writing direction escaped."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def name_for_terminal(name: str) -> str:
    """Return the name of a file on one line, with bytes that are no text spelt out; else as `for_terminal`.

    >>> print(name_for_terminal("a\\nerror: none"))
    a\\nerror: none
    """
    text = for_terminal(name.encode(errors="backslashreplace").decode())
    return text.replace("\n", r"\n").replace("\t", r"\t")


def for_markdown(text: str) -> str:
    """Return the text escaped for Markdown: it is shown literally, without images, links or HTML."""
    return _MARKDOWN.sub(r"\\\1", for_terminal(text))


MISSING = "–"
"""Shown in place of an unknown number."""

KINDS: Mapping[Kind, str] = {
    "guarantee": "guarantees",
    "output_specific": "output-specific",
    "estimate": "estimates",
    "lower_bound": "lower bounds",
}
"""Plural words for epsilons of each kind, as in "they are guarantees"."""


def in_one_word(kind: Kind) -> str:
    """Return the word for a kind beside a number.

    >>> in_one_word("output_specific"), in_one_word("estimate")
    ('output-specific', 'estimate')
    """
    return kind.replace("_", "-")


@dataclass(frozen=True)
class Format:
    """Format of one kind of number: ``one`` value, and the mean of ``several`` with their deviation if that is shown.

    `possible`: the smallest and the largest possible value. `is_share`: whether it is a share, or a difference of
    shares; differences are then percentage points.
    """

    one: Callable[[float | None], str]
    several: Callable[[Spread], str] | None = None
    possible: tuple[float, float] = (0.0, math.inf)
    is_share: bool = False

    def over_seeds(self, found: Spread) -> str:
        """Return the mean over seeds, with the standard deviation if the format has one and there are several seeds."""
        return self.one(found.mean) if found.count == 1 or self.several is None else self.several(found)

    @property
    def of_differences(self) -> Format:
        """Return the format of signed differences of such numbers: of shares in percentage points.

        >>> PERCENT.of_differences.one(-0.0213), NUMBER.of_differences.one(0.0213)
        ('−2.1', '+0.0213')
        """
        least, most = self.possible
        return Format(points if self.is_share else signed, None, (min(least, -most), most), self.is_share)

    @property
    def points(self) -> str:
        """Return the unit of differences as words behind a number; "" if they have none."""
        return " points" if self.is_share else ""


def per_unit(unit: str) -> str:
    """Return whose epsilon it is, where it is not that of a single example.

    >>> per_unit("example"), per_unit("user")
    ('', ' per user')
    """
    return "" if unit == EXAMPLE.name else f" per {unit}"


_SPELT_OUT: Final = 1e12
"""Numbers from which on digits would fill a table, such as errors of a model that diverged."""


def number(value: float | None, digits: int = 3) -> str:
    """Return a number with ``digits`` significant digits; ∞ for infinity, `MISSING` for None and NaN.

    >>> number(0.12345), number(12345.6), number(2.4e70), number(math.inf), number(None)
    ('0.123', '12,346', '2.4e+70', '∞', '–')
    """
    if value is None or math.isnan(value):
        return MISSING
    if math.isinf(value):
        return "∞"
    if abs(value) >= _SPELT_OUT:
        return f"{value:.{digits}g}"
    return f"{value:,.0f}" if abs(value) >= 10**digits else f"{value:#.{digits}g}".rstrip(".")


def at_most(value: float | None, digits: int = 3) -> str:
    """Return `number` of an upper bound, rounded up.

    >>> at_most(1.2809), at_most(3.2), at_most(12345.2), at_most(None)
    ('1.29', '3.20', '12,346', '–')
    """
    return _rounded(value, digits, math.ceil)


def at_least(value: float | None, digits: int = 3) -> str:
    """Return `number` of a lower bound, rounded down.

    >>> at_least(0.71799), at_least(4.9999), at_least(0.0)
    ('0.717', '4.99', '0.00')
    """
    return _rounded(value, digits, math.floor)


def _rounded(value: float | None, digits: int, towards: Callable[[Decimal], int]) -> str:
    if not value or not math.isfinite(value):
        return number(value, digits)
    exact = Decimal(repr(value))  # as JSON has it: 3.2 is not above 3.2
    unit = Decimal(1).scaleb(min(0, exact.adjusted() - digits + 1))
    return number(float(towards(exact / unit) * unit), digits)


def _of_finite(text: Callable[[float], str]) -> Callable[[float | None], str]:
    """Return a function that shows a finite number as ``text`` with a minus sign, and any other as `MISSING`.

    >>> percent(0.9876), points(-0.0213), gap(0.0213), correlation(-0.456)
    ('98.8%', '−2.1', '2.1', '−0.46')
    >>> signed(-0.02), signed(12345.6), signed(math.nan)
    ('−0.0200', '+12,346', '–')
    >>> _fit(-0.0213), _fit(-3412.506), _fit(-1.88e45)
    ('−0.021', '−3412.506', '−1.88e+45')
    """

    def shown(value: float | None) -> str:
        return MISSING if value is None or not math.isfinite(value) else text(value).replace("-", "−")

    return shown


percent: Final = _of_finite(lambda value: f"{100 * value:.1f}%")
"""A fraction in percent, with one decimal."""
points: Final = _of_finite(lambda value: f"{100 * value:+z.1f}")
"""A signed difference of two fractions, in percentage points."""
gap: Final = _of_finite(lambda value: f"{100 * value:.1f}")
"""An unsigned difference of two fractions, in percentage points."""
correlation: Final = _of_finite(lambda value: f"{value:.2f}")
"""A correlation coefficient, with two decimals."""
signed: Final = _of_finite(lambda value: f"{'-' if value < 0.0 else '+'}{number(abs(value))}")
"""A signed difference with three significant digits."""
_fit: Final = _of_finite(lambda value: f"{value:.3f}" if abs(value) < 1e6 else f"{value:.3g}")
"""A score with three decimals; far from 0, where a model diverged, with three significant digits."""


def at_most_share(value: float | None) -> str:
    """Return an upper bound on a share, in percent, rounded up to three significant digits.

    >>> at_most_share(0.07), at_most_share(0.00012341), at_most_share(1.0)
    ('7.00%', '0.0124%', '100%')
    """
    return _share(value, math.ceil)


def at_least_share(value: float | None) -> str:
    """Return a lower bound on a share, in percent, rounded down to three significant digits."""
    return _share(value, math.floor)


def _share(value: float | None, towards: Callable[[Decimal], int]) -> str:
    if value is None or not math.isfinite(value):
        return MISSING
    if value <= 0.0:
        return "0%"
    exact = 100 * Decimal(repr(value))  # as JSON has it: 7% is not above 7%
    unit = Decimal(1).scaleb(min(0, exact.adjusted() - 2))
    return f"{towards(exact / unit) * unit:f}%"


def file_size(count: int) -> str:
    """Return a number of bytes in the largest unit that is not larger.

    >>> file_size(0), file_size(300), file_size(5 * 2**20)
    ('0 B', '300 B', '5.0 MiB')
    """
    if count < 1024:
        return f"{count} B"
    power = min((count.bit_length() - 1) // 10, 4)
    return f"{count / 1024**power:.1f} {('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}"


def seconds(value: float | None) -> str:
    """Return a duration given in seconds, in its largest two units.

    >>> seconds(7500.0), seconds(75.0), seconds(7.5)
    ('2 h 5 min', '1 min 15 s', '7.5 s')
    """
    if value is None or not math.isfinite(value):
        return MISSING
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{value:.1f} s"


def no_progress(quiet: float | None) -> str:
    """Return how long a trial has shown no progress; "" for None, where that is nothing unusual.

    >>> no_progress(420.0), no_progress(None)
    ('no progress for 7 min 0 s', '')
    """
    return "" if quiet is None else f"no progress for {seconds(quiet)}"


def clock(value: float) -> str:
    """Return a duration given in seconds, as h:mm:ss or m:ss.

    >>> clock(245.0), clock(3845.0)
    ('4:05', '1:04:05')
    """
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


_SHARE = (0.0, 1.0)
EPSILON = Format(at_most)
"""Format of upper bounds on epsilon."""
NUMBER = Format(number)
PRECISE = Format(lambda value: number(value, 4))
PERCENT = Format(percent, lambda found: f"{100 * found.mean:.1f} ± {100 * found.deviation:.1f}%", _SHARE, is_share=True)
AT_MOST = Format(at_most_share, lambda found: at_most_share(found.high), _SHARE)
POINTS = Format(points, lambda found: f"{points(found.mean)} ± {100 * found.deviation:.1f}", (-1.0, 1.0), is_share=True)
CORRELATION = Format(correlation, possible=_SHARE)
GAP = Format(gap, possible=_SHARE, is_share=True)
FIT = Format(_fit, lambda found: f"{_fit(found.mean)} ± {_fit(found.deviation)}", (-math.inf, 1.0))
"""Format of goodness-of-fit scores such as r2: at most 1, and possibly negative."""
CHANGE = Format(signed, possible=(-math.inf, math.inf))
SECONDS = Format(seconds)
COUNT = Format(lambda value: MISSING if value is None else f"{value:,.0f}")


def amount(value: float, shown: Format) -> str:
    """Return the size of a difference of two numbers of one format: of shares in percentage points.

    >>> amount(-0.0213, PERCENT), amount(0.0213, NUMBER)
    ('2.1 points', '0.0213')
    """
    return f"{abs(100 * value):.1f} points" if shown.is_share else f"{abs(value):.3g}"


def is_shown(change: float, shown: Format) -> bool:
    """Return whether a difference is another than 0 with the digits that are shown."""
    return amount(change, shown) != amount(0.0, shown)


def reason_of(error: Exception) -> str:
    """Return the text of an error in one line, at most 300 characters; where it holds a traceback, its last line.

    >>> reason_of(RuntimeError("status 500: Traceback (most recent call last):\\n  File ...\\nOSError: disk full\\n."))
    'OSError: disk full'
    """
    lines = [line for line in str(error).splitlines() if line.strip(" .")]
    return " ".join(" ".join(lines[-1:] if "Traceback (most recent" in str(error) else lines).split())[:300]


def shortened(names: Sequence[str]) -> Sequence[str]:
    """Return names; the first three of more than five, and how many more there are.

    >>> shortened(list("abcdefgh"))
    ['a', 'b', 'c', '5 more']
    """
    return names if len(names) <= 5 else [*names[:3], f"{len(names) - 3} more"]


def first_few(names: Sequence[str]) -> str:
    """Return names as `listed`, `shortened`.

    >>> first_few(list("abcdefgh"))
    'a, b, c and 5 more'
    """
    return listed(shortened(names))


def listed(names: Sequence[str]) -> str:
    """Return names as a sentence lists them; at least one.

    >>> listed(["flat", "naive", "dpsgd_f"])
    'flat, naive and dpsgd_f'
    """
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def sentence_start(words: str) -> str:
    """Return words as a sentence begins with them; names such as TPR and F1 keep their letters.

    >>> sentence_start("macro F1"), sentence_start("accuracy")
    ('Macro F1', 'Accuracy')
    """
    return words[:1].upper() + words[1:]


def in_a_sentence(heading: str) -> str:
    """Return the heading of a metric inside a sentence, without its unit.

    >>> in_a_sentence("Token accuracy gap, points"), in_a_sentence("FPR, difference")
    ('token accuracy gap', 'FPR, difference')
    """
    return uncapitalised(without_unit(heading))


def without_unit(heading: str) -> str:
    """Return the heading of a metric without the unit of differences of shares."""
    return heading.removesuffix(", points")


def uncapitalised(words: str) -> str:
    """Return words as a sentence goes on with them; names such as TPR and R² keep their letters.

    >>> uncapitalised("Worst TPR"), uncapitalised("TPR at 1% FPR at most"), uncapitalised("R²")
    ('worst TPR', 'TPR at 1% FPR at most', 'R²')
    """
    first = words.partition(" ")[0].rstrip(",")
    return words if first.isupper() else words[:1].lower() + words[1:]


UNBOUNDED = 100_000
"""A width, in characters, that no output reaches."""


def plain_text(text: str, style: str = "") -> Text:
    """Return foreign text for a console, whose markup it is not, as by `for_terminal`.

    Further lines are indented, so that none looks like a line of dpsweep's own.
    """
    return Text(for_terminal(text).replace("\n", "\n  "), style)


def dim_table(*columns: str) -> Table:
    """Return a table without lines, whose columns are as wide as their widest entry."""
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, header_style="dim", no_wrap=True)
    return table


def print_line(console: Console, text: str | Text, style: str = "") -> None:
    """Print one line; on a terminal it is broken between words, unless that would break a long path."""
    shown = plain_text(text, style) if isinstance(text, str) else text
    is_long = any(len(word) > console.width for word in shown.plain.split())
    console.print(shown, soft_wrap=is_long or not console.is_terminal)


@dataclass(frozen=True)
class Fitting:
    """A table that, where it is wider than the terminal, is printed as its first column with the others below."""

    table: Table

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        widest = max((cell_len(_words(cell)) for cell in self.table.columns[0].cells), default=0)
        return Measurement(widest, Measurement.get(console, options, self.table).maximum)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        spare = self._share_out(console, options)
        if spare >= 0:
            yield self.table
            return
        if self.table.title:
            yield self.table.title
        first, *others = self.table.columns
        for place, (name, row) in enumerate(zip(first.cells, self.table.rows, strict=True)):
            cells = ((_words(column.header), _words(list(column.cells)[place])) for column in others)
            words = "; ".join(f"{heading} {cell}".strip() for heading, cell in cells if cell not in ("", MISSING))
            yield Text(_words(name), style=row.style or "bold", no_wrap=True, overflow="ignore")
            yield Padding(Text(words, style=row.style or "", overflow="fold"), (0, 0, 0, 2))

    def _share_out(self, console: Console, options: ConsoleOptions) -> int:
        """Give each column its longest word, the first columns more where there is room; return the room that is left,
        negative where the table does not fit.

        Rich itself squeezes columns below their words before it widens others.
        """
        unbounded = options.update(width=UNBOUNDED)
        columns = self.table.columns
        for column in columns:
            column.width = None  # of a narrower or wider terminal
        needed = [measure_renderables(console, unbounded, [column.header, *column.cells]) for column in columns]
        around = Measurement.get(console, unbounded, self.table).maximum - sum(each.maximum for each in needed)
        for column, each in zip(columns, needed, strict=True):
            column.width = each.maximum if column.no_wrap else each.minimum
        spare = options.max_width - around - sum(column.width or 0 for column in columns)
        for column, each in zip(columns, needed, strict=True):
            wider = max(0, min(spare, each.maximum - (column.width or 0)))
            column.width, spare = (column.width or 0) + wider, spare - wider
        return spare


def _words(cell: RenderableType) -> str:
    """Return the text of a cell; "" for a picture such as a progress bar."""
    return cell.plain if isinstance(cell, Text) else cell if isinstance(cell, str) else ""
