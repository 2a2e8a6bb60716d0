"""Numbers as tables write them: other decimal signs, thousands, percent, currency, units, and markers for missing.

A sweep declares how a column writes its numbers, so that reading a value depends on that value alone. `written_numbers`
proposes a declaration for a draft.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
"""Spellings of a missing value in CSV, as in Arrow, unless the sweep declares one as a value."""
_MARKERS: Final = frozenset(
    (*(each.casefold() for each in MISSING_SPELLINGS), "?", "-", "--", "–", "—", ".", "*", "none", "missing", "unknown")
)
"""Spellings of a missing value among numbers, in lower case."""
_CODES: Final = (
    "USD EUR GBP CHF JPY INR DKK SEK NOK PLN CZK HUF RON BGN TRY RUB UAH CNY KRW HKD SGD THB IDR MYR PHP VND ILS AED "
    "SAR ZAR NGN EGP BRL MXN ARS CLP COP CAD AUD NZD"
)
_CURRENCY: Final = rf"(?:[A-Za-z]{{0,3}}[$€£¥₹₽₩₺₪₫₱₴₦฿]|{_CODES.replace(' ', '|')}|kr\.?|Rs\.?|zł|Kč|Ft)"
_NUMBER: Final = re.compile(
    rf"^\s*+(?P<owed>\()?\s*+(?P<sign>[-+−–]?)\s*+(?P<money>{_CURRENCY})?\s*+(?P<again>[-+−–]?)"
    rf"(?P<digits>\d[\d.,'’_\s]*+|[.,]\d+)"
    rf"(?P<power>[eE][-+]?\d+)?(?P<after>[-–—])?\s*+(?P<unit>%|{_CURRENCY}|(?:[^\W\d_]|[µμ°²³/]){{1,6}}\d?)?\s*+(?(owed)\))\s*+$"
)
_GROUPED: Final = {
    "point": re.compile(r"^[1-9]\d{0,2}(?:([,'’_\s])\d{3})(?:\1\d{3})*$|^[1-9]\d?(?:,\d{2})+,\d{3}$"),
    "comma": re.compile(r"^[1-9]\d{0,2}(?:([.'’_\s])\d{3})(?:\1\d{3})*$"),
}
"""Thousands, by one sign throughout, and by commas as in 12,34,567 too. A first group never begins with 0."""
_PLAIN: Final = re.compile(r"^\d*$")
_SIGNS: Final = {"point": ".", "comma": ","}


def parsed(values: pa.ChunkedArray, convention: Convention) -> pa.ChunkedArray:
    """Return the texts as float64; null for a text that is no number by the convention. Numbers keep their values."""
    if not (pa.types.is_string(values.type) or pa.types.is_large_string(values.type)):
        return values
    texts = compute.unique(values).drop_null().to_pylist()
    found = pa.array([number_of(text, convention) for text in texts], pa.float64())
    where = compute.index_in(values, value_set=pa.array(texts, values.type))
    return pa.chunked_array([compute.take(found, where.combine_chunks())])


def number_of(text: str, convention: Convention) -> float | None:
    """Return the number that a text writes by the convention; None if it writes none.

    >>> number_of("1.234,5 kg", "comma"), number_of("$1,234.50", "point"), number_of("(12 %)", "point")
    (1234.5, 1234.5, -12.0)
    >>> [number_of(text, "point") for text in ("1,23", "0,254")]
    [None, None]
    >>> number_of("R$ 1.234,56", "comma"), number_of("CHF 1'234.-", "point"), number_of("12-", "point")
    (1234.56, 1234.0, -12.0)
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
    is_owed = match["after"] and not match["digits"].endswith((".", ","))  # in 12.- the sign stands for no cents
    negative = bool(match["owed"] or is_owed) or (match["sign"] or match["again"]) in ("-", "−", "–")
    return float(f"{'-' if negative else ''}{digits or '0'}{'.' if sign else ''}{fraction}{match['power'] or ''}")


@dataclass(frozen=True)
class Written:
    """How a column of texts writes numbers.

    `unread`: texts that are none and count as missing. `ambiguous`: whether the other convention reads all of them too,
    as 13.440 is 13440 or 13.44. `certain`: whether the other one does not read them.
    """

    convention: Convention
    unread: tuple[str, ...]
    ambiguous: bool
    certain: bool


_MOST_UNREAD: Final = 0.05
"""Largest share of the rows whose text is no number and no known marker, in a column that is taken for numbers."""
_MARKS: Final = 3
"""Number of different texts, such as "refused", that may stand for missing numbers in any share of the rows."""
_FEWEST_NUMBERS: Final = 10
"""Least number of different numbers beside such texts: fewer may be categories, such as 1, 2 and "several"."""


_ORDERS: Final[tuple[tuple[Convention, Convention], ...]] = (("point", "comma"), ("comma", "point"))


def written_numbers(counts: Mapping[str, int]) -> Written | None:
    """Return how these texts write numbers; None unless they are numbers of one unit, or markers of missing values.

    counts: number of rows by text. Other texts without digits are taken for markers, too, where they are rare. Where
    both conventions read all numbers, such as 13,440, ``point`` is taken, and the result says that it is ambiguous.
    """
    known = {text: rows for text, rows in counts.items() if text.strip().casefold() not in _MARKERS}
    for convention, other in _ORDERS:
        read = [text for text in known if number_of(text, convention) is not None]
        strange = known.keys() - {*read}
        if not read or len({_unit(text) for text in read}) > 1 or any(map(_is_code, read)):
            continue
        if strange and (
            len(read) < _FEWEST_NUMBERS
            or any(re.search(r"\d", text) for text in strange)
            or (len(strange) > _MARKS and sum(map(known.__getitem__, strange)) > _MOST_UNREAD * sum(known.values()))
        ):
            continue
        unread = tuple(sorted({*strange, *(text for text in counts if text not in known)} - set(MISSING_SPELLINGS)))
        others = all(number_of(text, other) is not None for text in read)
        differ = any(number_of(text, other) != number_of(text, convention) for text in read)
        return Written(convention, unread, others and differ, not others)
    return None


def written_in_several_ways(texts: Sequence[str]) -> tuple[str, ...]:
    """Return a text for each of several ways in which a column writes its numbers, by unit and decimal sign.

    Nothing for one way, and where hardly any text is a number.
    """
    ways: dict[tuple[str | None, bool, bool], str] = {}
    known = [text for text in texts if text.strip().casefold() not in _MARKERS]
    read = [text for text in known if any(number_of(text, each) is not None for each, _ in _ORDERS)]
    if len(read) < (1.0 - _MOST_UNREAD) * len(known) or any(map(_is_code, read)):
        return ()
    for text in read:
        point, comma = (number_of(text, each) is not None for each, _ in _ORDERS)
        ways.setdefault((_unit(text), point, comma), text)
    several = len({unit for unit, _, _ in ways}) > 1 or {(True, False), (False, True)} <= {way[1:] for way in ways}
    return tuple(ways.values()) if several else ()


def is_list(text: str) -> bool:
    """Return whether the text spells a list of numbers, as tables of embeddings are often exported.

    >>> [is_list(text) for text in ("[0.1, -2e-3]", "[1 2]", "[a]", "1, 2")]
    [True, True, False, False]
    """
    return (
        re.match(r"^\s*\[\s*[-+]?[\d.]+(?:[eE][-+]?\d+)?(?:[\s,;]+[-+]?[\d.]+(?:[eE][-+]?\d+)?)*\s*\]\s*$", text)
        is not None
    )


def is_picture(text: str) -> bool:
    """Return whether the text names a file of a picture.

    >>> [is_picture(text) for text in ("scans/a 1.JPG", "a.tiff", "a.pdf")]
    [True, True, False]
    """
    return re.search(r"\.(?:bmp|gif|jpe?g|png|ppm|tiff?|webp)\s*$", text, re.IGNORECASE) is not None


def is_prose(text: str) -> bool:
    """Return whether a text has several words, or as many letters of a script that needs no blanks between them."""
    return len(text.split()) >= _FEWEST_WORDS or sum(map(_UNSPACED.__le__, text)) >= _FEWEST_SIGNS


_FEWEST_WORDS: Final = 3
_FEWEST_SIGNS: Final = 6
_UNSPACED: Final = "\u2e80"
"""First sign of the scripts of East Asia; Thai and its neighbours put blanks between phrases."""


_MONTHS: Final = (
    "jan feb mar apr may jun jul aug sep oct nov dec mär mrz mai okt dez fév fev avr juin juil aoû déc ene abr ago set "
    "out dic mrt maa mei mag giu lug ott gen"
)
_MONTH: Final = rf"(?:{_MONTHS.replace(' ', '|')})[^\W\d_]*\.?"
_DAY: Final = r"\d{1,2}(?:st|nd|rd|th)?"
_DATE: Final = re.compile(
    rf"^\s*(?:\d{{4}}([-/.])\d{{1,2}}\1\d{{1,2}}|\d{{1,2}}([-/.])\d{{1,2}}\2(?:\d{{2}}|\d{{4}})|{_MONTH}\s+{_DAY},?\s+\d{{4}}"
    rf"|{_DAY}\.?[\s-]*(?:de\s+)?{_MONTH}[\s,-]*(?:de\s+)?(?:\d{{4}}|\d{{2}}))(?:,?[T ]\s*\d{{1,2}}:\d{{2}}.*+)?\s*+$"
    r"|^\s*\d{1,2}:\d{2}(?::\d{2}(?:\.\d+)?)?\s*+(?:[ap]\.?m\.?)?\s*+$",
    re.IGNORECASE,
)


def is_date(text: str) -> bool:
    """Return whether the text spells a date, with or without a time, or a time.

    >>> [is_date(text) for text in ("2020-01-31", "31.1.20 12:05", "1/31/2020", "1.234,5")]
    [True, True, True, False]
    >>> [is_date(text) for text in ("Jan 5, 2020", "5. März 2020 9:30", "05-Oct-20", "9:30 pm", "may 5 people")]
    [True, True, True, True, False]
    """
    return _DATE.match(text) is not None


def are_written_as_thousands(texts: Sequence[str]) -> bool:
    """Return whether these numbers may be whole ones whose thousands are separated by points, such as 13.440.

    >>> are_written_as_thousands(["13.440", "950", "7.200"]), are_written_as_thousands(["13.440", "7.2"])
    (True, False)
    """
    unsigned = [text.strip().lstrip("+-") for text in texts]
    if not all(re.match(r"^[1-9]\d{0,2}(?:\.\d{3})?$", text) for text in unsigned):
        return False  # soon, for most columns of a wide table
    grouped = sum(_GROUPED["comma"].match(text) is not None for text in unsigned)
    return 0 < min(_FEWEST_NUMBERS, len(texts) / 2) <= grouped


def strange_among_numbers(texts: Sequence[str]) -> str:
    """Return a text that is no number where most of the others are; "" if there is none."""
    known = [text for text in texts if text.strip().casefold() not in _MARKERS]
    strange = [text for text in known if all(number_of(text, each) is None for each, _ in _ORDERS)]
    return strange[0] if strange and 2 * len(strange) < len(known) else ""


def _unit(text: str) -> str | None:
    match = _NUMBER.match(text)
    return match and (match["money"] or match["unit"] or "").casefold()


def _is_code(text: str) -> bool:
    """Return whether leading zeros, as in 007, make the text a code, which a number would not keep."""
    return re.match(r"^\s*[-+]?0\d", text) is not None
