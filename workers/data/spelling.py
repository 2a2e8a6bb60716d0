"""Matches values declared in a sweep with their spellings in a table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Annotated

import pyarrow as pa
import pyarrow.compute as compute
from pydantic import BeforeValidator

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.registry import nearest
from dpsweep.workers.data.tabular import as_text

CellValue = str | bool | int | float

_BOOLEANS = ("false", "true")


def _value(value: object) -> object:
    """Return a declared value; YAML types other than text, numbers and booleans, such as dates, become text."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        raise InvalidInput("write null and NaN in quotes, as the table spells them")
    return value if isinstance(value, CellValue) else as_text(pa.array([value]), "it")[0].as_py()


CellValues = Sequence[Annotated[CellValue, BeforeValidator(_value)]]


def names(values: CellValues) -> tuple[str, ...]:
    """Return declared values as text: whole numbers without a decimal point, booleans as true and false.

    >>> names([1, 2.0, True, "x"])
    ('1', '2', 'true', 'x')
    """
    return tuple(value if isinstance(value, str) else _text(value) for value in values)


def _text(value: bool | int | float) -> str:
    return str(as_text(pa.array([value]), "it")[0]) if isinstance(value, bool | float) else str(value)


def as_declared(column: pa.ChunkedArray, values: CellValues, what: str) -> pa.ChunkedArray:
    """Return ``column`` as text, in which every spelling of a declared value is replaced by its name.

    A number or boolean declared without quotes matches all its spellings: 0 also matches 0.0, and true also True. In
    quotes it matches only that text, except in a column of booleans, whose values have only one spelling.

    Raises: InvalidInput when the column holds booleans and another value is declared.
    """
    texts, is_boolean = as_text(column, what), pa.types.is_boolean(column.type)
    if is_boolean and (strange := next((value for value in values if _key(value) not in _BOOLEANS), None)) is not None:
        raise InvalidInput(f"{what} holds booleans, but {strange!r} is declared; {nearest(str(strange), _BOOLEANS)}")
    meant = {
        _key(value): name
        for value, name in zip(values, names(values), strict=True)
        if is_boolean or not isinstance(value, str)
    }
    if not meant:
        return texts
    known = set(names(values))
    others = [text for text in compute.unique(texts).drop_null().to_pylist() if text not in known]
    spelt = {text: meant[_key(text)] for text in others if _key(text) in meant}
    where = compute.index_in(texts, value_set=pa.array(list(spelt), pa.string()))
    return compute.coalesce(compute.take(pa.array(list(spelt.values()), pa.string()), where), texts)


def _key(value: CellValue) -> Decimal | str:
    """Return a key that is equal for all spellings of a number or boolean."""
    text = str(value)
    try:
        number = Decimal(text)
    except InvalidOperation:
        return text.casefold()
    return text.casefold() if number.is_nan() else number


def declared_groups(
    by: Sequence[str], groups: CellValues | Mapping[str, CellValues] | None
) -> Mapping[str, CellValues]:
    """Return declared values by group column. Raises: InvalidInput for unknown columns, or one list for several
    columns.
    """
    if groups is None:
        return {}
    if not by:
        raise InvalidInput("`groups` declares values of groups, but no column is named by `group`; name it")
    if isinstance(groups, Mapping):
        for name in groups:
            if name not in by:
                raise InvalidInput(
                    f"`groups` declares values of {name!r}, which is no group column; {nearest(name, by)}"
                )
        return groups
    if len(by) > 1:
        raise InvalidInput(
            f"`groups` lists values of one group column, but there are {len(by)}; give them by column, such as "
            f"{{{by[0]}: [...], {by[1]}: [...]}}"
        )
    return {by[0]: groups}
