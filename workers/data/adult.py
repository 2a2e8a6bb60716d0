"""Adult (UCI census income 1994): does a person earn more than 50,000 dollars a year? Groups by sex."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.compute as compute
import pyarrow.csv as csv

from dpsweep.workers.data.base import Source, Split, make_split
from dpsweep.workers.data.source_files import downloads, locate, reading, require_row_count
from dpsweep.workers.data.tabular import (
    Categorical,
    Column,
    Numeric,
    choose_groups,
    complete_rows,
    encoded_columns,
    indices,
    intersected,
    intersected_indices,
    without,
)


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_CLASSES = ("<=50K", ">50K")
_GROUPS = {
    "sex": ("Female", "Male"),
    "race": ("Amer-Indian-Eskimo", "Asian-Pac-Islander", "Black", "Other", "White"),
    "income": _CLASSES,
}
_category = functools.partial(Categorical, closed=True)
_COLUMNS: tuple[Column, ...] = (
    Numeric("age", 17, 90),
    _category(
        "workclass",
        _words("Federal-gov Local-gov Private Self-emp-inc Self-emp-not-inc State-gov Without-pay"),
    ),
    Numeric("fnlwgt", 0, 1_500_000),
    _category(
        "education",
        _words(
            "Preschool 1st-4th 5th-6th 7th-8th 9th 10th 11th 12th HS-grad Some-college "
            "Assoc-voc Assoc-acdm Bachelors Masters Prof-school Doctorate"
        ),
    ),
    Numeric("education-num", 1, 16),
    _category(
        "marital-status",
        _words("Divorced Married-AF-spouse Married-civ-spouse Married-spouse-absent Never-married Separated Widowed"),
    ),
    _category(
        "occupation",
        _words(
            "Adm-clerical Armed-Forces Craft-repair Exec-managerial Farming-fishing Handlers-cleaners "
            "Machine-op-inspct Other-service Priv-house-serv Prof-specialty Protective-serv Sales "
            "Tech-support Transport-moving"
        ),
    ),
    _category("relationship", ("Husband", "Not-in-family", "Other-relative", "Own-child", "Unmarried", "Wife")),
    _category("race", _GROUPS["race"]),
    Numeric("capital-gain", 0, 99_999),
    Numeric("capital-loss", 0, 5_000),
    Numeric("hours-per-week", 1, 99),
    _category(
        "native-country",
        _words(
            "Cambodia Canada China Columbia Cuba Dominican-Republic Ecuador El-Salvador England France Germany "
            "Greece Guatemala Haiti Holand-Netherlands Honduras Hong Hungary India Iran Ireland Italy Jamaica "
            "Japan Laos Mexico Nicaragua Outlying-US(Guam-USVI-etc) Peru Philippines Poland Portugal Puerto-Rico "
            "Scotland South Taiwan Thailand Trinadad&Tobago United-States Vietnam Yugoslavia"
        ),
    ),
)
"""Ranges and categories as listed in the data set's documentation.

The work class "Never-worked" is left out, because none of its rows is complete. The protected attribute sex is used for
groups, not as a feature.
"""
_DOWNLOAD = downloads(
    "https://archive.ics.uci.edu/ml/machine-learning-databases/adult/",
    "adult",
    {"adult.data": "5d7c39d7b8804f071cdd1f2a7c460872", "adult.test": "35238206dfdf7f1fe215bbb874adecdc"},
)
_FIELDS = _words(
    "age workclass fnlwgt education education-num marital-status occupation relationship race sex capital-gain "
    "capital-loss hours-per-week native-country income"
)


def adult(
    root: str | None = None,
    group: str | Sequence[str] = "sex",
    exclude: Sequence[str] = ("education", "race", "native-country"),
    split: Literal["published", "drawn"] = "published",
) -> Source:
    """Return the 45,222 complete rows of adult.data (training) and adult.test (test).

    `exclude`: attributes left out; by default 40 features remain, as in Xu et al. (2021) (education-num repeats
    education as a number). `group`: sex, race or income; or several, such as ["sex", "race"], whose intersections are
    the groups. `split`: "published" uses the published test set; "drawn" draws ``test_fraction`` of all rows as the
    test set. Example ids are the same for both.
    """
    values = choose_groups("adult", group, _GROUPS)
    columns = without(_COLUMNS, exclude, "adult")
    train = _read(locate("adult", ("adult/adult.data", "adult.data"), root, _DOWNLOAD), 0, 32_561)
    test = _read(locate("adult", ("adult/adult.test", "adult.test"), root, _DOWNLOAD), 1, 16_281)
    if split == "drawn":
        first, second = _split(pa.concat_tables([train, test]), columns, values, 0), None
    else:
        first, second = _split(train, columns, values, 0), _split(test, columns, values, train.num_rows)
    note = "rows with an unknown value are left out"
    return Source("adult", first, second, intersected(values), _CLASSES, notes=(note,))


def _read(path: Path, skip_rows: int, published_rows: int) -> pa.Table:
    """Return all rows as trimmed strings, null for unknown values ("?"), without the dot after labels in adult.test."""
    with reading(path):
        table = csv.read_csv(
            path,
            read_options=csv.ReadOptions(column_names=_FIELDS, skip_rows=skip_rows),
            convert_options=csv.ConvertOptions(
                column_types=dict.fromkeys(_FIELDS, pa.string()),
                null_values=["?", " ?"],
                strings_can_be_null=True,
            ),
        )
    require_row_count(path, table.num_rows, published_rows)
    trimmed = {name: compute.utf8_trim_whitespace(table[name]) for name in _FIELDS}
    trimmed["income"] = compute.utf8_rtrim(trimmed["income"], ".")
    return pa.table(trimmed)


def _split(table: pa.Table, columns: list[Column], groups: Mapping[str, tuple[str, ...]], first_id: int) -> Split:
    rows = complete_rows(table)
    complete = table.take(rows)
    return make_split(
        encoded_columns(complete, columns),
        indices(complete["income"], _CLASSES, "income"),
        intersected_indices(complete, groups),
        example_ids=rows + first_id,
    )
