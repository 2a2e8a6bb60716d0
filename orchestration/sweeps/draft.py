"""Drafts a commented sweep file from the columns of a table. The draft quotes values from the rows, so it is private
data until the owner has confirmed that these values are public."""

from __future__ import annotations

import bisect
import json
import math
import re
import shlex
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from dpsweep.accounting.errors import InvalidInput, count_of
from dpsweep.orchestration.sweeps.column_names import may_name_people
from dpsweep.orchestration.sweeps.draft_columns import MOST_VALUES, are_codes, is_too_long, may_be_amounts, unusable
from dpsweep.orchestration.sweeps.draft_scale import (
    HIDDEN,
    PLACES,
    Scale,
    drafted_batch_size,
    outward,
    scale_of,
    too_few_to_count,
    two_digits,
)
from dpsweep.orchestration.sweeps.read_column import ReadColumn, rows_lacking
from dpsweep.orchestration.sweeps.schema import parse_sweep
from dpsweep.orchestration.sweeps.text_column import quoted
from dpsweep.workers.data import FEW_ROWS, ColumnProfile, TableProfile, TableTask, load_source, profile_table
from dpsweep.workers.tasks import task_called

_FEWEST_ROWS = 50
_FEWEST_COMPLETE: Final = 0.5
"""Share of the rows with a label and a group that lack no feature, below which a draft has fewer features."""
_FEW = 10
"""Up to this many distinct whole numbers, a column may hold codes of categories."""
_FREQUENT: Final = 0.9
"""Share of a class from which on a model that predicts nothing else is seldom beaten by its accuracy."""
_NARROW: Final = 0.05
"""Deviation of targets over their range below which few of them are far from the others, and all gradients small."""
_FLAGS: Final = frozenset(("0", "1", "false", "true"))
_TASKS: Final[Mapping[TableTask, str]] = {
    "regression": "the label is an amount; if its numbers are codes of classes, set classes in its place",
    "multi_label": "a row has several of the labels, or none",
}
_LOSSES: Final[Mapping[TableTask, str]] = {"regression": "mse", "multi_label": "binary_cross_entropy"}
_MODELS: Final[Mapping[TableTask, str]] = {
    "classification": "from zero",
    "regression": "for numbers a linear model, from zero",
    "multi_label": "from zero",
}


@dataclass(frozen=True)
class _Subject:
    """The table and columns of a draft. task: decided by the labels. groups: profile of the group column, if any. user:
    the column that names the owner of each row, if any. hashed: a column of texts that was asked for."""

    path: Path
    labels: tuple[ColumnProfile, ...]
    task: TableTask
    group: str | None
    groups: ColumnProfile | None
    user: str | None
    read: ReadColumn | None
    hashed: str | None
    encoding: str | None

    @property
    def roles(self) -> tuple[ColumnProfile, ...]:
        """Return the profiles of labels and group."""
        return self.labels if self.groups is None else (*self.labels, self.groups)

    @property
    def outputs(self) -> int:
        """Number of outputs of a model: classes, or labels."""
        return len(self.labels[0].values or ()) if self.task == "classification" else len(self.labels)

    @property
    def deviation(self) -> float | None:
        """Root mean square of the deviations of a regression's targets, each over its range."""
        if self.task != "regression":
            return None
        ranges = (outward(*(label.span or (0.0, 1.0))) for label in self.labels)
        shares = [label.deviation / (high - low) for label, (low, high) in zip(self.labels, ranges, strict=True)]
        return math.sqrt(math.fsum(share**2 for share in shares) / len(shares))

    @property
    def command(self) -> str:
        given: list[tuple[str, str | None]] = [("label", each.name) for each in self.labels]
        given += [("group", self.group), ("user", self.user), ("text", self.hashed)]
        if self.read is not None:
            given += self.read.options
        flags = [word for role, name in given if name is not None for word in (f"--{role}", name)]
        return shlex.join(["dpsweep", "init", self.path.name, *flags])


def draft_sweep(
    path: Path,
    labels: Sequence[str],
    group: str | None,
    user: str | None = None,
    read: ReadColumn | None = None,
    hashed: str | None = None,
) -> str:
    """Return the YAML text of a sweep over the table ``path``: its columns with proposed ranges and categories, a
    model, a baseline, two clipping methods, and a privacy target.

    `labels`: one column of classes or numbers, or several columns of numbers or of 0 and 1; they decide the task.
    `group`: the column whose values are compared; by default the classes of the label. `user`: the column that names
    the owner of each row. `read`: a column of texts or pictures that the model reads in place of features. `hashed`:
    one of texts that is read as counts of letters beside features, as columns of several words are by themselves.
    Comments in the draft mark what was read off the data.
    Raises: InvalidInput for an unknown column, a label named twice, and labels that fit no task. Also for a group with
    one value or more than `MOST_VALUES`, and a table with fewer than 50 rows or without a usable feature;
    DataCorruption for a file that cannot be read.
    """
    table, subject = _profiled(path, labels, group, user, read, hashed)
    roles = {*labels, group, user, *([read.name] if read else [])}
    features = [column for column in table.columns if column.name not in roles]
    left_out = [(each.name, why) for each in features if (why := unusable(each))]
    used = [column for column in features if column.name not in dict(left_out)]
    used.sort(key=lambda column: column.span is None)  # numbers first, as robust_ranges takes them
    if not used and read is None:
        named = " and ".join(map(repr, filter(None, (*labels, group, user))))
        reasons = "; ".join(f"{name!r}, {why}" for name, why in left_out)
        raise InvalidInput(
            f"no column of {path} besides {named} can be a feature of a model; for a column of texts, add --text "
            f"COLUMN, for one of pictures --image COLUMN. Left out: {reasons or 'nothing'}"
        )
    draft = _Draft(table, subject, tuple(used), () if read else tuple(left_out))
    if read is not None or not any(column.missing for column in (*used, *subject.roles)):
        return draft.text(table.rows)
    draft = draft.with_enough_rows()
    rows, notes = draft.complete_rows()
    return draft.text(rows or table.rows, notes)


@dataclass(frozen=True)
class _Draft:
    """The columns that a draft uses, and those that it leaves out, each with the reason."""

    table: TableProfile
    subject: _Subject
    used: tuple[ColumnProfile, ...]
    left_out: tuple[tuple[str, str], ...]

    def with_enough_rows(self) -> _Draft:
        """Return the draft without as many of the features that lack most values as leave too few rows complete."""
        lacking = sorted((each for each in self.used if each.missing), key=lambda each: each.missing, reverse=True)
        enough = _FEWEST_COMPLETE * self.table.rows * math.prod(1.0 - each.missing for each in self.subject.roles)

        def has_enough(count: int) -> bool:
            return self._without(lacking[:count]).complete_rows()[0] >= enough

        counts = range(len(lacking) + (len(lacking) < len(self.used)))
        least = 0 if has_enough(0) else bisect.bisect_left(counts, True, key=has_enough)
        return self._without(lacking[:least]) if least in counts else self

    def _without(self, features: Sequence[ColumnProfile]) -> _Draft:
        why = "of its values: with it, less than half of the rows would be complete"
        left_out = ((each.name, f"which lacks {each.missing:.0%} {why}") for each in features)
        used = tuple(each for each in self.used if each not in features)
        return replace(self, used=used, left_out=(*self.left_out, *left_out))

    def complete_rows(self) -> tuple[int, Sequence[str]]:
        """Return how many rows lack no value, and notes on the others; 0 if the sweep cannot be read as drafted."""
        try:
            source = load_source(parse_sweep(self.text(self.table.rows)).data[0])
        except InvalidInput as error:
            return 0, (f"as drafted, this cannot be read: {error}",)
        return len(source.train), source.notes

    def text(self, rows: int, notes: Sequence[str] = ()) -> str:
        """Return the sweep for so many complete rows. notes: of rows left out. No name from the table ends a line."""
        subject = self.subject
        read, sizes = subject.read, (rows, subject.task, subject.outputs, subject.deviation)
        scale = scale_of(self.used, *sizes) if read is None else read.scale(*sizes)
        has_private_ranges = scale.preprocessing == "robust_ranges"
        by_columns = _features(subject, self.used, has_private_ranges)
        lines = (
            *_header(subject, has_private_ranges, self.table.has_values_as_names),
            *_data_section(subject),
            *_may_name_users(self.table, subject),
            *(by_columns if read is None else (*_ranges(_targets(subject)), *read.section(self.table))),
            "  test_fraction: 0.2    # held out for evaluation",
            "  # public_fraction: 0.1    # of the rest, for tune: rows that you declare public",
            *(f"  # {note}" for note in notes),
            *(f"  # left out: {json.dumps(name)}, {why}" for name, why in self.left_out),
            "",
            *_model(subject, scale.has_hidden_layer),
            *_preparation(scale),
            *_training_section(rows, subject, scale),
        )
        return "\n".join("".join(sign if sign.isprintable() else " " for sign in line) for line in lines) + "\n"


def _profiled(
    path: Path,
    labels: Sequence[str],
    group: str | None,
    user: str | None,
    read: ReadColumn | None,
    hashed: str | None,
) -> tuple[TableProfile, _Subject]:
    """Profile the table, and choose its label, group, user and text columns. Raises: as `draft_sweep`."""
    if repeat := next((name for name in labels if labels.count(name) > 1), None):
        raise InvalidInput(f"the label {repeat!r} is named more than once; name each label once")
    named = tuple(labels)
    as_text = tuple(name for name in (group, hashed) if name is not None and name not in named)
    roles = (*named, *(name for name in (group, user, read.name if read else None, hashed) if name is not None))
    table = profile_table(str(path), as_text, MOST_VALUES, roles)
    for kind, name in (("text", hashed), (read.kind, read.name) if read else ("", None)):
        if name in (*named, group, user) and name is not None:
            raise InvalidInput(f"the {kind} column {name!r} is also a label, group or user; name another with --{kind}")
    if repeat := next((name for name in roles if name in table.repeated), None):
        raise InvalidInput(f"the table {path} has more than one column called {repeat!r}; rename the others")
    if lists := next((each.name for each in table.columns if each.name in roles and each.places), None):
        raise InvalidInput(f"the column {lists!r} holds lists, and can only be a feature; name another one")
    plain = [each for each in table.columns if each.name in roles and (read is None or not read.accepts(each))]
    if nested := next((each for each in plain if each.unreadable is not None), None):
        raise InvalidInput(f"the column {nested.name!r} holds values of type {nested.unreadable}; name another one")
    if huge := next((each.name for each in table.columns if each.name in named and math.isinf(each.deviation)), None):
        raise InvalidInput(f"the numbers of {huge!r} are too large to be a label; write them in another unit")
    if table.rows < _FEWEST_ROWS:
        raise InvalidInput(f"the table {path} has {count_of(table.rows, 'row')}; a sweep needs at least {_FEWEST_ROWS}")
    if read is not None:
        table.column(read.name, read.kind)
    if hashed is not None:
        table.column(hashed, "text")
    if user is not None:
        table.column(user, "user")
    task = _task_of(tuple(table.column(name, "label") for name in named))
    if task == "regression" and (long := next(filter(is_too_long, named), None)):
        raise InvalidInput(
            f"the name of the label {long[:20]!r}... has {len(long):,} characters; shorten it in the table"
        )
    classes = named[0] if task == "classification" else None
    codes = tuple(each.name for each in table.columns if are_codes(each) and each.name not in roles)
    if classes is not None or codes:
        as_text = tuple(dict.fromkeys((*(named if classes is not None else ()), *as_text, *codes)))
        table = profile_table(str(path), as_text, MOST_VALUES, roles, classes)
    if hashed is not None:
        table = table.with_prose(hashed)
    found = tuple(table.column(name, "label") for name in named)
    if task == "classification":
        _named(found[0], "label")
    of_group = None if group is None or group in named else table.column(group, "group")
    if of_group is not None:
        _named(of_group, "group")
    return table, _Subject(
        path, found, task, None if of_group is None else group, of_group, user, read, hashed, table.encoding
    )


def _task_of(labels: tuple[ColumnProfile, ...]) -> TableTask:
    """Return regression for many distinct numbers, multi_label for columns of 0 and 1, else classification."""
    if all(label.span is not None and label.distinct > (MOST_VALUES if label.whole else _FEW) for label in labels):
        return "regression"
    if len(labels) == 1:
        return "classification"
    if all({each.lower() for each in label.values or ("",)} <= _FLAGS for label in labels):
        return "multi_label"
    raise InvalidInput(
        f"the label columns {', '.join(repr(label.name) for label in labels)} are neither all of 0 and 1 (or false and "
        f"true) nor all of more than {MOST_VALUES} numbers; name columns that are alike, or one of classes"
    )


def _named(column: ColumnProfile, role: str) -> tuple[str, ...]:
    """Return the values of the label or group column. Raises: InvalidInput for one value, or too many."""
    if column.values is None or len(column.values) < 2:
        lacking = f", and {column.missing:.0%} of the rows lack one" if column.missing else ""
        marked = f": {' and '.join(map(quoted, column.markers))} counts as missing" if column.markers else ""
        cure = "; write such a value otherwise in the table, or" if marked else ";"
        found = f"{count_of(column.distinct, 'distinct value')}{lacking}{marked}"
        raise InvalidInput(
            f"the {role} column {column.name!r} has {found}{cure} name a column with 2 to {MOST_VALUES}, for instance "
            "one that sorts the rows into a few classes"
        )
    return column.values


def _number(value: float) -> str:
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)


def _listed(values: tuple[str, ...]) -> str:
    return f"[{', '.join(quoted(value) for value in values)}]"


def _name(path: Path) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", path.stem).strip("-._") or "sweep"


def _header(subject: _Subject, has_private_ranges: bool, has_values_as_names: bool) -> Iterator[str]:
    yield f"# Drafted by `{subject.command}`"
    yield "#"
    if has_values_as_names:
        yield "# IS THE LINE OF NAMES MISSING? The first line of the table, which is read as names, looks like a row of"
        yield "# values. If it is one, write a line of names above it, and draft again."
        yield "#"
    read_off = "Categories, classes and groups" if has_private_ranges else "Ranges, categories, classes and groups"
    yield f"# CONFIRM BEFORE YOU RUN IT. {read_off} were read off the rows, but a sweep"
    yield "# treats them as public: no epsilon covers them. Replace them by what is known without these data."
    if has_private_ranges:
        yield "# Ranges of features need no confirmation: every trial finds them privately, inside its epsilon."
    yield "# Until then this file is private data."
    yield "#"
    yield "#   dpsweep plan FILE      what would run: noise, steps, epsilon of every trial; trains nothing"
    yield "#   dpsweep run FILE       run it"
    yield "#"
    yield "# Every key is explained in docs/sweep.md. A list is an axis: one trial for each value."
    yield f"name: {quoted(_name(subject.path))}"
    yield "drafted: true    # delete this line when all that is marked CONFIRM is: no ε of a run before is a guarantee"
    yield ""


def _data_section(subject: _Subject) -> Iterator[str]:
    labels = [label.name for label in subject.labels]
    form = "parquet" if subject.path.suffix.lower() == ".parquet" else "csv"
    yield "data:"
    yield f"  name: {form if subject.read is None else subject.read.source}"
    yield f"  path: {quoted(str(subject.path.resolve()))}"
    if subject.encoding is not None:
        others = "cp1251, gb18030, shift_jis"
        yield f"  encoding: {subject.encoding}    # CONFIRM: not UTF-8; is all spelt right? Others: {others}"
    yield f"  label: {quoted(labels[0]) if len(labels) == 1 else _listed(tuple(labels))}"
    if subject.task == "classification":
        (label,) = subject.labels
        lacking = _lacking(label)
        yield f"  classes: {_listed(label.values or ())}    # CONFIRM: the values of the label that can occur{lacking}"
        yield from _alike(label)
        yield from _too_few(label)
        yield from _unequal(label)
        if len(label.values or ()) > 2 and all(each.lstrip("-").isdecimal() for each in label.values or ()):
            yield "  # counts and other amounts are learnt by task: regression, without classes, with loss: mse"
    else:
        yield f"  task: {subject.task}    # CONFIRM: {_TASKS[subject.task]}"
        for label in (each for each in subject.labels if each.is_order):
            yield f"  # {quoted(label.name)} has whole numbers that only count the rows, as an identifier does"
    if subject.group is not None and subject.groups is not None:
        yield f"  group: {quoted(subject.group)}    # whose quality and privacy are compared; it is not a feature here"
        yield f"  groups: {_listed(subject.groups.values or ())}    # CONFIRM{_lacking(subject.groups)}"
        yield from _alike(subject.groups)
        yield from _too_few(subject.groups)
    if subject.user is not None:
        yield f"  user: {quoted(subject.user)}    # whose row it is; a user's rows stay together in all splits"
        yield "  # every epsilon is that of one row; for those of a user with all rows see privacy, below"


def _may_name_users(table: TableProfile, subject: _Subject) -> Iterator[str]:
    """Yield a comment on each column whose name says that it may hold the owner of each row, and whose values recur."""
    if subject.user is not None:
        return
    roles = {*(label.name for label in subject.labels), subject.group, subject.read and subject.read.name}
    for column in table.columns:
        recurs = _FEW < column.distinct < round(table.rows * (1.0 - column.missing))
        if column.name not in roles and recurs and may_name_people(column.name):
            yield f"  # {quoted(column.name)}: if it says whose row it is, draft again with --user, as an epsilon of"
            yield "  # one row protects nobody who has several"


def _features(subject: _Subject, features: Sequence[ColumnProfile], has_private_ranges: bool) -> Iterator[str]:
    yield f"  features: {_listed(tuple(column.name for column in features))}"
    for column in features:
        if column.tells_class:
            yield f"  # CONFIRM: {quoted(column.name)} alone tells the class of nearly every row. Leave it out if it is"
            yield "  # filled in after the outcome: then every model looks perfect, and privacy seems to cost nothing."
    targets = _targets(subject)
    numeric = [column for column in features if column.span is not None]
    if any(column.written for column in (*targets, *numeric)):
        yield "  numbers:    # CONFIRM: the decimal sign of columns that write numbers otherwise than 1234.5"
    for column in (*targets, *numeric):
        if column.written:
            sign = column.written.convention
            doubt = "; these may be the other one, too" if column.written.ambiguous else ""
            yield f"    {quoted(column.name)}: {sign}    # {_SIGNS[sign]}{doubt}"
    if has_private_ranges:
        yield "  # taken as they are, whatever their range; see preprocessing"
        yield f"  unscaled: {_listed(tuple(column.name for column in numeric))}"
        yield from _remarks(numeric)
    yield from _ranges(targets if has_private_ranges else [*targets, *numeric])
    prose = [column for column in features if column.span is None and column.values is None]
    if prose:
        yield "  # texts: counts of letter triples, hashed to so many features; nothing is read off other rows"
        yield f"  hashed: {{{', '.join(f'{quoted(column.name)}: {PLACES}' for column in prose)}}}"
    for column in prose:
        if column.missing:
            yield f"  # {quoted(column.name)}:{_lacking(column)[1:]}"
    texts = [column for column in features if column.span is None and column.values is not None]
    if texts:
        yield "  categories:    # CONFIRM: one feature for each value; a value that is not listed becomes all zeros"
    for column in texts:
        why = "; codes by its name: if they are amounts, give a range instead" if may_be_amounts(column) else ""
        yield f"    {quoted(column.name)}: {_listed(column.values or ())}    # read off the data{_lacking(column)}{why}"
        yield from _alike(column)


def _targets(subject: _Subject) -> list[ColumnProfile]:
    regressed = subject.labels if subject.task == "regression" else ()
    return [replace(label, all_different=False) for label in regressed]  # which is no sign of an identifier


def _ranges(columns: Sequence[ColumnProfile]) -> Iterator[str]:
    if columns:
        yield "  ranges:    # CONFIRM: numbers are scaled to [0, 1] by their range, and cut at its ends"
    for column in columns:
        low, high = map(_number, outward(*(column.span or (0.0, 1.0))))
        yield f"    {quoted(column.name)}: [{low}, {high}]    # read off the data, rounded outwards{_lacking(column)}"
    yield from _remarks([replace(column, missing=0.0) for column in columns])


def _remarks(columns: Sequence[ColumnProfile]) -> Iterator[str]:
    """Comments on columns of numbers."""
    for column in columns:
        if column.missing:
            yield f"  # {quoted(column.name)}:{_lacking(column)[1:]}"
        if column.places:
            yield f"  # {quoted(column.name)} is a list of {count_of(column.places, 'number')}, a feature each"
        if column.apart is not None:
            far = f"{_number(column.apart)} in many rows, far from all other numbers"
            yield f"  # {quoted(column.name)} has {far}; if it stands for a missing value, leave these fields empty"
        if column.may_be_thousands:
            cure = f"if points separate thousands, add numbers: {{{quoted(column.name)}: comma}}"
            yield f"  # {quoted(column.name)} has three digits after each point: {cure}"
        if column.whole and 2 < column.distinct <= _FEW:
            codes = "whole numbers; if they are codes, list them under categories"
            yield f"  # {quoted(column.name)} has {column.distinct} different {codes}"
        if column.whole and column.all_different:
            yield f"  # {quoted(column.name)} is different in every row; if it is an identifier, leave it out"


_SIGNS: Final = {
    "point": "1,234.5: a decimal point; thousands, currency, percent and units are left out",
    "comma": "1.234,5: a decimal comma; thousands, currency, percent and units are left out",
}


def _lacking(column: ColumnProfile) -> str:
    """Return how many rows are left out because this column lacks a value, and what a sweep takes for none."""
    if not column.missing:
        return ""
    listed = "" if column.span is not None else ", unless you list it as a value"
    known = f" ({', '.join(map(quoted, column.markers))} too{listed})" if column.markers else ""
    return f"; {rows_lacking(column)}{known}"


def _alike(column: ColumnProfile) -> Iterator[str]:
    """Yield a comment on values that differ only by case or blanks, or by how Unicode spells a letter."""
    by_letters: dict[str, list[str]] = {}
    for value in column.values or ():
        by_letters.setdefault(_letters(unicodedata.normalize("NFKC", value)), []).append(value)
    for values in by_letters.values():
        if len(values) > 1:
            named = " and ".join(map(quoted, values))
            by = "case or blanks" if len(set(map(_letters, values))) == 1 else "how Unicode spells a letter"
            yield f"  # {named} differ only by {by}: the same class? If so, {_cure(column, by_letters)}"


def _letters(value: str) -> str:
    return "".join(sign for sign in value.casefold() if sign.isprintable() and not sign.isspace())


def _too_few(column: ColumnProfile) -> Iterator[str]:
    """Yield a comment on classes or groups that too few rows have for a model to learn them, or for a test."""
    if column.rare:
        named = ", ".join(map(quoted, column.rare))
        yield f"  # fewer than {FEW_ROWS} rows each: {named}; too few to learn or to test, so join them with others"


def _unequal(label: ColumnProfile) -> Iterator[str]:
    """Yield a comment on classes so unequal that accuracy does not tell whether the rare ones are found."""
    if label.largest >= _FREQUENT:
        yield f"  # {label.largest:.1%} of the rows have one class: a model that names no other is right as often. Look"
        yield "  # at balanced accuracy (dpsweep best DIR --by balanced_accuracy) and at the recall of each class. If"
        yield "  # the rare ones are not found, leave out rows of the frequent class at random, in a copy of the table."


def _cure(column: ColumnProfile, by_letters: Mapping[str, Sequence[str]]) -> str:
    """Return how a sweep takes values that differ only by case for the same one."""
    if set(by_letters) == {"false", "true"}:
        return "list [false, true] without quotes, which stand for every spelling"
    if any(len({value.lower() for value in values}) > 1 for values in by_letters.values()):
        return "spell them alike in the table"
    lower = _listed(tuple(sorted({value.lower() for value in column.values or ()})))
    return f"add ignore_case: [{quoted(column.name)}], and list {lower}"


def _model(subject: _Subject, has_hidden_layer: bool) -> Iterator[str]:
    layer = f"{{name: mlp, hidden: [{HIDDEN}]}}"
    if subject.read is not None:
        yield from subject.read.model(_MODELS[subject.task])
    elif has_hidden_layer:
        yield "model:    # rows enough to try two: more weights learn what is not linear, and have more noise"
        yield f"  - logistic    # {_MODELS[subject.task]}"
        yield f"  - {layer}    # or a function of your own"
    else:
        yield f"model: logistic    # {_MODELS[subject.task]}; too few rows for {layer}; or a function of your own"


def _preparation(scale: Scale) -> Iterator[str]:
    """Yield the preprocessing, and why."""
    noise, columns = _number(scale.noise_multiplier), count_of(scale.numbers, "column")
    match scale.preprocessing:
        case "robust_ranges":
            yield "# Finds the ranges that hold 90 % of the numbers, with noise: a release inside the target. By them"
            yield "# numbers are centred and scaled; beyond, the scale is logarithmic, and heavy tails do no harm."
        case "standardised":
            yield f"# Too few rows for private ranges of {columns}. In the ranges above, numbers are centred and"
            yield "# divided by their deviation, with noise: a release inside the target. Narrow ranges learn better."
        case None:
            if scale.numbers:
                yield f"# Too few rows for a private scale of {columns}: narrow the ranges above if you can."
            return
    yield f"preprocessing: {{name: {scale.preprocessing}, columns: {scale.numbers}, noise_multiplier: {noise}}}"


def _training_section(rows: int, subject: _Subject, scale: Scale) -> Iterator[str]:
    delta = 10.0 ** -math.ceil(math.log10(10.0 * rows))
    if subject.task != "classification":
        yield f"loss: {_LOSSES[subject.task]}"
    rate, bound = scale.learning_rate, scale.bound
    norm = f"{math.sqrt(scale.squared_norm):.2g}"
    yield f"# Gradients grow with the norm of a row, about {norm} here: the bound grows with it, the rate falls."
    if subject.deviation is not None:
        far = "; few are large: narrow it, or take logarithms" if subject.deviation < _NARROW else ""
        spread = f"{subject.deviation:.1g} of their range{far}"
        yield f"# The bound also falls with the deviation of the targets, {spread}. CONFIRM: read off the data."
    yield f"optimizer: {{name: sgd, learning_rate: {_number(rate)}, momentum: 0.9}}"
    yield "learning_rate_schedule: cosine    # to 0, so that the noise of the last steps averages out"
    batch, trained = drafted_batch_size(rows), 0.8 * rows
    why = f"{batch / trained:.0%} of the rows: noise costs large batches less"
    yield f"sampling: {{method: poisson, batch_size: {batch}}}    # {why}"
    steps = float(f"{30 * trained / batch:.1g}")
    yield f"epochs: 30    # about {steps:,.0f} steps: fewer learn less, and more have more noise each"
    yield ""
    yield "clipping:"
    yield "  - none    # the non-private baseline"
    yield f"  - {{name: flat, bound: {_number(bound)}}}    # DP-SGD; gradients are longer at first, shorter later"
    has_groups = subject.task == "classification" or subject.group is not None
    name, follows = ("dpsgd_f", "bounds follow the groups") if has_groups else ("quantile", "bound follows the norms")
    if few := too_few_to_count(rows, (subject.groups or subject.labels[0]).least if has_groups else rows):
        yield f"  # {name}, whose {follows}, counts examples: too few {few} for the noise of these counts"
    elif has_groups:
        yield f"  - {{name: dpsgd_f, bound: {_number(bound)}, count_memory: 0.9}}    # larger for groups clipped more"
    else:
        yield f"  - {{name: quantile, bound: {_number(bound)}}}    # a bound that half of the gradients keep"
    yield "# Bound and learning rate matter most. To let each setting choose its own, by public_fraction in data:"
    bounds, rates = (", ".join(_number(two_digits(each * by)) for by in (0.3, 1.0, 3.0)) for each in (bound, rate))
    places = f"clipping.bound: [{bounds}], optimizer.learning_rate: [{rates}]"
    is_unequal = subject.task == "classification" and subject.labels[0].largest >= _FREQUENT
    main = "worst_group_balanced_accuracy" if is_unequal else task_called(subject.task).main
    by = "" if main == "accuracy" else f" select_by: {main},"
    yield f"# tune: {{parameters: {{{places}}},{by} privacy: unaccounted}}"
    if subject.read is None:
        yield "reference: true    # a rule on one column and a linear model beside the baseline: is it as good?"
    yield "noise: constant"
    yield "seeds: [0, 1, 2]    # of training; differences smaller than between seeds mean nothing"
    yield ""
    yield "privacy:"
    if subject.user is not None:
        yield "  # unit: user    # a user with all rows: without dpsgd_f, release, tune; docs/users.md"
        yield "  # user_sampling: els"
        yield "  # max_records_per_user: 4    # how many rows each user keeps at most; more need more noise"
    yield "  target_epsilon: [1, 8]    # of every private trial, with everything that it releases"
    yield f"  delta: {delta:.0e}    # well below 1 / n"
    yield ""
    yield "norms: {refreshes_per_epoch: auto}    # for epsilons of single examples; off: none, and a bit faster"
    yield "noise_source: seeded    # research mode; os_entropy for a model that will be released"
    yield "release: none    # what may be told about the training rows: none, private (noisy statistics) or raw"
