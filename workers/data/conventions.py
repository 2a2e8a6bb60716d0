"""Numbers as tables write them: other decimal signs, thousands, percent, currency, units, and markers for missing.

A sweep declares how a column writes its numbers, so that reading a value depends on that value alone. `convention_of`
proposes a declaration for a draft.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Final, Literal

import pyarrow as pa
import pyarrow.compute as compute

Convention = Literal["point", "comma"]
"""``point``: a decimal point; commas, blanks and apostrophes between thousands. ``comma``: a decimal comma; points,
blanks and apostrophes between thousands. Both leave out a currency, a percent sign or a unit around the number."""

MISSING_SPELLINGS: Final = (
    "", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "N/A", "NA", "NULL",
    "NaN", "n/a", "nan", "null",
)  # fmt: skip
"""What stands for a missing value in CSV, as in Arrow; a text that a sweep declares as a value is that value."""
_MARKERS: Final = frozenset(
    (*(each.casefold() for each in MISSING_SPELLINGS), "?", "-", "--", "–", "—", ".", "*", "none", "missing", "unknown")
)
"""What stands for a missing value among numbers, in lower case."""
_CURRENCY: Final = r"(?:[$€£¥₹₽₩₺]|USD|EUR|GBP|CHF|JPY|INR|DKK|SEK|NOK|PLN|CZK|kr\.?|Rs\.?)"
_NUMBER: Final = re.compile(
    rf"^\s*(?P<sign>[-+−]?)\s*(?:{_CURRENCY})?\s*(?P<again>[-+−]?)(?P<digits>\d[\d.,'’_\s]*|[.,]\d+)"
    rf"(?P<power>[eE][-+]?\d+)?\s*(?P<unit>%|{_CURRENCY}|[A-Za-zµ°²³/]{{1,6}}\d?)?\s*$"
)
_GROUPED: Final = {
    "point": re.compile(r"^\d{1,3}(?:[,'’\s]\d{3})*$"),
    "comma": re.compile(r"^\d{1,3}(?:[.'’\s]\d{3})*$"),
}
_PLAIN: Final = re.compile(r"^\d*$")
_SIGNS: Final = {"point": ".", "comma": ","}


def parsed(values: pa.ChunkedArray, convention: Convention) -> pa.ChunkedArray:
    """Texts as float64; null for a text that is no number by the convention. Numbers keep their values."""
    if not (pa.types.is_string(values.type) or pa.types.is_large_string(values.type)):
        return values
    texts = compute.unique(values).drop_null().to_pylist()
    found = pa.array([number_of(text, convention) for text in texts], pa.float64())
    where = compute.index_in(values, value_set=pa.array(texts, values.type))
    return pa.chunked_array([compute.take(found, where.combine_chunks())])


def number_of(text: str, convention: Convention) -> float | None:
    """The number that a text writes by the convention; None if it writes none.

    >>> number_of("1.234,5 kg", "comma"), number_of("$1,234.50", "point"), number_of("12 %", "point")
    (1234.5, 1234.5, 12.0)
    >>> number_of("1,23", "point") is None
    True
    """
    match = _NUMBER.match(text)
    if match is None:
        return None
    whole, sign, fraction = match["digits"].strip().partition(_SIGNS[convention])
    if not (_GROUPED[convention].match(whole) or _PLAIN.match(whole)) or not _PLAIN.match(fraction):
        return None
    digits = re.sub(r"\D", "", whole)
    if not digits and not fraction:
        return None
    negative = (match["sign"] or match["again"]) in ("-", "−")
    return float(f"{'-' if negative else ''}{digits or '0'}{'.' if sign else ''}{fraction}{match['power'] or ''}")


def convention_of(texts: Collection[str]) -> Convention | None:
    """How these texts write numbers, up to markers for missing values; None unless all are numbers of one unit.

    Where both read all of them, such as 13,440, groups of thousands are meant: ``point``.
    """
    known = [text for text in texts if text.strip().casefold() not in _MARKERS]
    if not known or len({_unit(text) for text in known}) > 1 or any(_is_code(text) for text in known):
        return None
    conventions: Sequence[Convention] = ("point", "comma")
    return next((each for each in conventions if all(number_of(text, each) is not None for text in known)), None)


def _unit(text: str) -> str | None:
    match = _NUMBER.match(text)
    return match and (match["unit"] or "").casefold()


def _is_code(text: str) -> bool:
    """Whether leading zeros, as in 007, make the text a code, which a number would not keep."""
    return re.match(r"^\s*[-+]?0\d", text) is not None
