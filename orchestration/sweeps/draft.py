"""Drafts a commented sweep file from the columns of a table. What it proposes is read off the rows: private data until
the owner has confirmed that it is public."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

from accounting.errors import InvalidInput
from workers.data import ColumnProfile, TableProfile, profile_table

MOST_VALUES = 50
"""Most distinct values of a category, a class or a group that a draft lists."""
_MOST_MISSING = 0.5
"""Largest share of missing values of a feature; rows that lack a value of any feature are left out."""
_FEWEST_ROWS = 50
_FEW = 10
"""Different whole numbers up to which a column may hold codes."""


def draft_sweep(path: Path, label: str, group: str | None) -> str:
    """The YAML text of a sweep over the table ``path``: its columns with proposed ranges and categories, a model, a
    baseline, two clipping methods, and a privacy target.

    group: the column whose values are compared; by default the classes of the label. The text says where it was read
    off the data. Raises: InvalidInput for an unknown column, a label or group with one value or more than
    `MOST_VALUES`, and a table with fewer than 50 rows or without a usable feature; DataCorruption for a file
    that cannot be read.
    """
    roles = tuple(dict.fromkeys((label, group or label)))
    table = profile_table(str(path), roles, MOST_VALUES)
    if table.rows < _FEWEST_ROWS:
        raise InvalidInput(f"the table {path} has {table.rows} rows; a sweep needs at least {_FEWEST_ROWS}")
    classes = _named(table.column(label, "label"), "label")
    groups = classes if group in (None, label) else _named(table.column(group or label, "group"), "group")
    features = [column for column in table.columns if column.name not in roles]
    used = [column for column in features if _unusable(column, table) is None]
    if not used:
        raise InvalidInput(f"no column of {path} besides {' and '.join(map(repr, roles))} can be a feature of a model")
    lines = (
        *_header(path, label, group),
        *_data_section(path, label, group, classes, groups, used),
        *(f"  # left out: {json.dumps(each.name)}, {why}" for each in features if (why := _unusable(each, table))),
        *_training_section(table.rows),
    )
    return "\n".join(lines) + "\n"


def _named(column: ColumnProfile, role: str) -> tuple[str, ...]:
    """The values of the label or group column. Raises: InvalidInput for one value, or too many."""
    if column.values is None or len(column.values) < 2:
        amount = f"more than {MOST_VALUES}" if column.distinct > MOST_VALUES else "fewer than two"
        raise InvalidInput(
            f"the {role} column {column.name!r} has {amount} distinct values; name a column with 2 to {MOST_VALUES}, "
            "for instance one that sorts the rows into a few classes"
        )
    return column.values


def _unusable(column: ColumnProfile, table: TableProfile) -> str | None:
    """Why the column is no feature of the draft; None if it is one."""
    if column.distinct == 0:
        return "which has no values"
    if column.distinct == 1:
        return "which has the same value in every row"
    if column.missing > _MOST_MISSING:
        return f"which lacks {column.missing:.0%} of its values: rows without a value are left out of training"
    if column.whole and column.distinct == table.rows:
        return "whose whole numbers are all different, as those of an identifier are"
    if column.span is None and column.values is None:
        return f"which has more than {MOST_VALUES} different texts or dates; declare its categories to use it"
    if column.span is not None and not math.isfinite(_outward(*column.span)[1] - _outward(*column.span)[0]):
        return "whose numbers are too large for a range"
    return None


def _outward(low: float, high: float) -> tuple[float, float]:
    """A range with round ends that holds both numbers, so that the ends are not those of two people."""
    unit = 0.5 * 10.0 ** math.floor(math.log10(max(high - low, 1e-300)))
    ends = math.floor(low / unit) * unit, math.ceil(high / unit) * unit
    return (float(f"{ends[0]:.12g}"), float(f"{ends[1]:.12g}")) if ends[0] < ends[1] else (low, low + 1.0)


def _number(value: float) -> str:
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)


def _listed(values: tuple[str, ...]) -> str:
    return f"[{', '.join(_text(value) for value in values)}]"


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False) if value.isprintable() else json.dumps(value)


def _name(path: Path) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", path.stem).strip("-._") or "sweep"


def _header(path: Path, label: str, group: str | None) -> Iterator[str]:
    chosen = f" --group {group}" if group else ""
    yield f"# Drafted by `dpsweep init {path.name} --label {label}{chosen}`".replace("\n", " ")
    yield "#"
    yield "# CONFIRM BEFORE YOU RUN IT. Ranges, categories, classes and groups were read off the rows, but a sweep"
    yield "# treats them as public: no epsilon covers them. Replace them by what is known without these data."
    yield "# Until then this file is private data."
    yield "#"
    yield "#   dpsweep plan FILE      what would run: noise, steps, epsilon of every trial; trains nothing"
    yield "#   dpsweep run FILE       run it"
    yield "#"
    yield "# Every key is explained in docs/sweep.md. A list is an axis: one trial for each value."
    yield f"name: {_text(_name(path))}"
    yield ""


def _data_section(
    path: Path,
    label: str,
    group: str | None,
    classes: tuple[str, ...],
    groups: tuple[str, ...],
    features: list[ColumnProfile],
) -> Iterator[str]:
    yield "data:"
    yield f"  name: {'parquet' if path.suffix.lower() == '.parquet' else 'csv'}"
    yield f"  path: {_text(str(path.resolve()))}"
    yield f"  label: {_text(label)}"
    yield f"  classes: {_listed(classes)}    # CONFIRM: the values of the label that can occur"
    if group is not None and group != label:
        yield f"  group: {_text(group)}    # whose accuracy and privacy are compared; it is not a feature here"
        yield f"  groups: {_listed(groups)}    # CONFIRM"
    yield f"  features: {_listed(tuple(column.name for column in features))}"
    numeric = [column for column in features if column.span is not None]
    if numeric:
        yield "  ranges:    # CONFIRM: numbers are scaled to [0, 1] by their range, and cut at its ends"
    for column in numeric:
        low, high = map(_number, _outward(*(column.span or (0.0, 1.0))))
        yield f"    {_text(column.name)}: [{low}, {high}]    #{_lacking(column)} read off the data, rounded outwards"
        if column.whole and 2 < column.distinct <= _FEW:
            yield f"    # {column.distinct} different whole numbers; if they are codes, list them under categories"
    texts = [column for column in features if column.span is None]
    if texts:
        yield "  categories:    # CONFIRM: one feature for each value; a value that is not listed becomes all zeros"
    for column in texts:
        yield f"    {_text(column.name)}: {_listed(column.values or ())}    #{_lacking(column)} read off the data"
    yield "  test_fraction: 0.2    # held out for evaluation"


def _lacking(column: ColumnProfile) -> str:
    return f" missing in {column.missing:.1%} of the rows, which are left out;" if column.missing else ""


def _training_section(rows: int) -> Iterator[str]:
    train = max(1, round(0.8 * rows))
    batch = max(16, min(4096, round(0.05 * train)))
    delta = 10.0 ** -math.ceil(math.log10(10.0 * rows))
    yield ""
    yield "model: logistic    # or {name: mlp, hidden: [64]}, or a function of your own"
    yield "optimizer: {name: sgd, learning_rate: 1.0}"
    yield f"sampling: {{method: poisson, batch_size: {batch}}}    # each row joins a batch with probability {batch} / n"
    yield "epochs: 20"
    yield ""
    yield "clipping:"
    yield "  - none    # the non-private baseline"
    yield "  - {name: flat, bound: 0.5}    # DP-SGD; compare several bounds before you compare methods"
    yield "  - {name: dpsgd_f, bound: 0.5, count_memory: 0.9}    # larger bounds for groups that are clipped more"
    yield "noise: constant"
    yield "seeds: [0, 1, 2]    # of training; differences smaller than between seeds mean nothing"
    yield ""
    yield "privacy:"
    yield "  target_epsilon: [1, 8]    # of every private trial, with everything that it releases"
    yield f"  delta: {delta:.0e}    # well below 1 / n"
    yield ""
    yield "noise_source: seeded    # research mode; os_entropy for a model that will be released"
    yield "release: none    # what may be told about the training rows: none, private (noisy statistics) or raw"
