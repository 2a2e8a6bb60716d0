"""Texts of a CSV, Parquet or JSON Lines file as tokens, read and encoded block by block."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as compute
import pyarrow.csv as csv
import pyarrow.json as arrow_json
import torch
from pydantic import Field

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.records.parquet_tables import parquet_batches, read_schema
from dpsweep.workers.data.base import Source, Split, repeated
from dpsweep.workers.data.conventions import MISSING_SPELLINGS
from dpsweep.workers.data.encoder import Block, TextEncoder, token_called
from dpsweep.workers.data.label_columns import TableTask, label_columns
from dpsweep.workers.data.mapped import RowBlocks, RowForm, cached_columns, digest_of_parts
from dpsweep.workers.data.owner_columns import OwnerColumns, UserColumns
from dpsweep.workers.data.preparations import Tokens
from dpsweep.workers.data.source_files import reader_of, reading, require_path
from dpsweep.workers.data.spelling import CellValues, declared_groups
from dpsweep.workers.data.table import (
    Declared,
    Encoding,
    Range,
    Roles,
    encoding_of,
    owned,
    read_alike,
    refuse_repeated,
    require_columns,
    require_other,
    rows_left_out,
    used_columns,
    user_names,
)
from dpsweep.workers.data.table_files import (
    BYTES_AT_ONCE,
    dialect_of,
    plain_texts,
    refuse_encoding,
    require_closed_quotes,
    require_shallow_lines,
    without_missing,
)
from dpsweep.workers.data.tabular import attributes, complete_rows, kind_of
from dpsweep.workers.tasks import IGNORED

Objective = Literal["label", "masked_lm", "causal_lm"]
_CAUSAL: Final[Mapping[Objective, bool | None]] = {"label": None, "masked_lm": False, "causal_lm": True}
"""Whether a position may only depend on earlier ones; None where both are allowed."""
_MASKED: Final = 0.8
_REPLACED: Final = 0.9
"""80% of the predicted tokens become the mask token, 10% a random one, 10% stay (Devlin et al. 2019)."""
_TARGETS_AT_ONCE: Final = 4096
_WORDS_PER_COUNTER: Final = 4
"""Number of 64-bit words that Philox4x64 makes from one counter."""


def masked_tokens(
    block: Block, first: int, mask: int, vocabulary: int, fraction: float, seed: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Return tokens [n, t] with some masked, and labels [n, t]: the original token where predicted, `IGNORED`
    elsewhere.

    Every own token of a row is predicted with probability ``fraction``, and at least one. The draws for a row depend
    only on ``seed`` and its position; first: position of the first row. mask: id of the mask token.
    """
    ids, labels = block.ids.copy(), np.full(block.ids.shape, IGNORED, dtype=np.int32)
    for start in range(0, len(ids), _TARGETS_AT_ONCE):
        rows = slice(start, start + _TARGETS_AT_ONCE)
        own, tokens = block.own[rows], block.ids[rows]
        chance, action, other = _draws(seed, first + start, *tokens.shape)
        least = np.where(own, chance, np.inf).min(1, initial=np.inf)
        chosen = own & (chance <= np.maximum(fraction, least)[:, None])
        labels[rows][chosen] = tokens[chosen]
        replaced = np.where(action < _MASKED, mask, np.floor(other * vocabulary).astype(np.int32))
        ids[rows] = np.where(chosen & (action < _REPLACED), replaced, tokens)
    return ids, labels


def _draws(seed: int, first: int, rows: int, length: int) -> npt.NDArray[np.float64]:
    """[3, rows, length] uniform numbers in [0, 1); each row has its own section of one random stream."""
    counters = -(-3 * length // _WORDS_PER_COUNTER)
    stream = np.random.Generator(np.random.Philox(key=seed, counter=first * counters))
    drawn = stream.random((rows, counters * _WORDS_PER_COUNTER))[:, : 3 * length]
    return drawn.reshape(rows, 3, length).transpose(1, 0, 2)


def next_tokens(block: Block, padding: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Return the tokens [n, t], and labels [n, t]: the next token at each position, or `IGNORED` if that is padding.

    The last position has no next token and is `IGNORED` too.
    """
    labels = np.full(block.ids.shape, IGNORED, dtype=np.int32)
    following = block.ids[:, 1:]
    labels[:, :-1] = np.where(following == padding, IGNORED, following)
    return block.ids, labels


_ROWS_AT_ONCE: Final = 1024
"""Number of texts in memory at a time."""
Length = Annotated[int, Field(ge=2, le=65_536)]


def text(
    path: str,
    text: str,
    tokenizer: str,
    max_length: Length = 128,
    objective: Objective = "label",
    label: str | Sequence[str] | None = None,
    task: TableTask = "classification",
    group: str | Sequence[str] | None = None,
    user: UserColumns = None,
    user_separator: str | None = None,
    test_path: str | None = None,
    classes: CellValues | None = None,
    groups: CellValues | Mapping[str, CellValues] | None = None,
    ranges: Mapping[str, Range] | None = None,
    padding_token: str | None = None,
    mask_token: str = "[MASK]",
    mask_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.15,
    mask_seed: Annotated[int, Field(ge=0, lt=2**63)] = 0,
    cache: str | None = None,
    encoding: str | None = None,
) -> Source:
    """Return the column ``text`` of a .csv, .tsv (with a header), .parquet or .jsonl file, as token ids.

    `tokenizer`: a file of the package tokenizers (tokenizer.json). Texts are cut to ``max_length`` tokens, and shorter
    ones are filled with ``padding_token``, by default the tokenizer's own. `objective`: ``label`` learns the column
    ``label`` (several columns for ``task`` regression or multi_label, as in tables). ``masked_lm`` predicts a random
    share ``mask_fraction`` of the tokens; ``causal_lm`` predicts each token from those before it. The masked tokens of
    a row depend only on ``mask_seed`` and the position of the row. group, user, user_separator, test_path, classes,
    groups, encoding, and ranges, of the labels of a regression: as in tables. Rows with a missing value are left out,
    and notes count them. `cache`: a folder of this node for memory-mapped files of tokens, made once and read batch by
    batch, for texts that exceed memory. They are as private as the texts.

    Raises: InvalidInput for unknown columns and tokens, and undeclared values; DataCorruption for unreadable files.
    """
    for each in (path,) if test_path is None else (path, test_path):
        require_path(each)  # before the tokenizer, as whoever has neither would correct its path alone
    encoder = TextEncoder.of_file(tokenizer, max_length, padding_token)
    labels = _labels(objective, label, task)
    kind = task if objective == "label" else "language_modelling"
    by = () if group is None and kind != "classification" else attributes("text", labels if group is None else group)
    declared = Declared(kind, ranges or {}, {}, classes, declared_groups(by, groups))
    owners = OwnerColumns.of(user, user_separator)
    roles = Roles(labels, by, owners.column, (), frozenset((text,)))
    if text in (*roles.used, *owners.names):
        raise InvalidInput(f"the column {text!r} is the text, and also a label, group or user; name another of both")
    if test_path is not None:
        require_other(test_path, path)
    flags: dict[str, CellValues] = dict.fromkeys(labels if kind == "multi_label" else (), ())
    texts = flags | declared.texts(labels, by, owners.names)
    columns = _Columns(text, [name for name in labels if name not in texts], texts)
    files = [_File.read(each, columns, roles, owners, encoding) for each in (path, test_path) if each is not None]
    encoded = encoding_of(files[0].columns, roles, declared)
    learner = _Learner(
        encoder,
        _targets(objective, encoder, mask_token, mask_fraction, mask_seed),
        1 if objective == "label" else 2,
        cache,
        json.dumps([max_length, encoder.padding, objective, mask_token, mask_fraction, mask_seed]),
    )
    splits = learner.splits(files, encoded, owners.column)
    return Source(
        Path(path).stem,
        splits[0],
        splits[1] if len(splits) > 1 else None,
        encoded.group_names,
        encoded.labels.names if objective == "label" else encoder.tokens,
        preparation=Tokens(len(encoder.tokens), encoder.padding, _CAUSAL[objective]),
        notes=rows_left_out([(each.counted, each.rows) for each in files], encoded),
        reasons=encoded.reasons,
        task=kind,
        columns=None
        if objective != "label"
        else {  # of `new_texts.Texts`
            "text": text,
            "tokenizer": encoder.content.decode(),
            "max_length": max_length,
            "padding_token": padding_token,
            **read_alike(encoded, declared, encoding),
        },
    )


def _labels(objective: Objective, label: str | Sequence[str] | None, task: TableTask) -> tuple[str, ...]:
    if objective != "label":
        if label is not None:
            raise InvalidInput(
                f"objective {objective} predicts tokens, not the column {label!r}; leave out one of both"
            )
        if task != "classification":
            raise InvalidInput(f"task {task} is of `label`, but objective {objective} predicts tokens; leave it out")
        return ()
    if label is None:
        raise InvalidInput("objective label needs `label`, a column; or set objective: masked_lm or causal_lm")
    return label_columns(label, task)


@dataclass(frozen=True)
class _Columns:
    """Names of columns to read: of the texts, of numbers to predict, and of all others, with their declared values."""

    text: str
    numbers: Sequence[str] = ()
    others: Mapping[str, CellValues] = field(default_factory=dict)

    @property
    def used(self) -> list[str]:
        return list(dict.fromkeys((self.text, *self.numbers, *self.others)))


@dataclass(frozen=True)
class _File:
    """A file without its texts. `columns`: all rows of the columns with a role. `has_text`: which rows have one.

    `rows`: indices of the complete rows."""

    path: Path
    text: str
    columns: pa.Table
    has_text: npt.NDArray[np.bool_]
    rows: npt.NDArray[np.int64]
    encoding: str | None

    @classmethod
    def read(cls, path: str, named: _Columns, roles: Roles, owners: OwnerColumns, encoding: str | None) -> _File:
        found, kept, given = require_path(path), [], []
        for rows in _stream(found, named, encoding):
            given.append(_strings(rows, named.text, found).is_valid().to_numpy(zero_copy_only=False))
            kept.append(rows.select(named.used[1:]))
        if not given:
            raise InvalidInput(f"the table {found} has no rows; give a file with at least one")
        has_text = np.concatenate(given)
        columns = pa.table({"": pa.array(np.zeros(len(has_text), dtype=np.int8))})  # rows, where no column has a role
        if roles.used:
            columns = used_columns(owned(pa.Table.from_batches(kept), owners, path), roles, named.others, path)
        is_complete = np.zeros(len(has_text), dtype=bool)
        is_complete[complete_rows(columns)] = True
        return cls(found, named.text, columns, has_text, np.flatnonzero(is_complete & has_text), encoding)

    @property
    def counted(self) -> pa.Table:
        """The columns, and for the text one that is null where a row has none."""
        return self.columns.append_column(self.text, pa.array(self.has_text, mask=~self.has_text))

    def blocks(self, encoder: TextEncoder, learn: Learn, first: int) -> RowBlocks:
        """Yield features, any labels made from tokens, and flaws of the complete rows. `first`: id of the first row."""
        start = 0
        for texts in texts_of(self.path, self.text, self.encoding, encoder.at_once):
            block, flaws = encoder.encode([each or "" for each in texts])
            low, high = np.searchsorted(self.rows, (start, start + len(texts)))
            complete = self.rows[low:high] - start
            yield tuple(column[complete] for column in (*learn(block, first + start), flaws))
            start += len(texts)


def texts_of(path: Path, name: str, encoding: str | None, size: int) -> Iterator[list[str | None]]:
    """Yield the texts of column ``name``, at most ``size`` at a time; None where a row has none."""
    for batch in _stream(path, _Columns(name), encoding):
        for at in range(0, batch.num_rows, size):
            yield _strings(batch.slice(at, size), name, path).to_pylist()


def _stream(path: Path, columns: _Columns, encoding: str | None) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file in blocks; one block is in memory at a time.

    Raises: InvalidInput for a column that is missing or repeated.
    """
    stream = reader_of(path, _STREAMS)
    with reading(path):
        for batch in stream(path, columns, encoding):
            require_columns(columns.used, path, batch.schema.names)
            if repeat := repeated(batch.schema.names):
                refuse_repeated(repeat, path)
            plain = pa.record_batch(list(map(plain_texts, batch.columns)), batch.schema.names)
            for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
                yield plain.slice(start, _ROWS_AT_ONCE)


def _strings(rows: pa.RecordBatch, name: str, path: Path) -> pa.Array:
    values = rows.column(rows.schema.names.index(name))
    if not (pa.types.is_string(values.type) or pa.types.is_null(values.type)):
        raise InvalidInput(
            f"column {name!r} of {path} holds {kind_of(values)}, but must hold text; name another by `text`"
        )
    return values


def _csv_batches(path: Path, columns: _Columns, encoding: str | None) -> Iterator[pa.RecordBatch]:
    """Batches of the columns used; others are not converted, as only the whole file would determine their types."""
    types = dict.fromkeys(columns.used, pa.string()) | dict.fromkeys(columns.numbers, pa.float64())
    written = dialect_of(path, encoding)
    if twice := [name for name in written.repeated if name in columns.used]:
        refuse_repeated(twice[0], path)
    read = written.read
    read.block_size = BYTES_AT_ONCE
    with csv.open_csv(path, read, written.parse) as reader:
        only = _only(columns.used, reader.schema.names)
    options = csv.ConvertOptions(column_types=types, null_values=list(MISSING_SPELLINGS), include_columns=only)
    rows = 0
    with csv.open_csv(path, read, written.parse, options) as reader:
        for batch in reader:
            rows += batch.num_rows
            named = zip(batch.schema.names, batch.columns, strict=True)
            yield pa.record_batch([_as_in_tables(values, name, columns) for name, values in named], batch.schema.names)
    require_closed_quotes(path, written, rows)


def _as_in_tables(values: pa.Array, name: str, columns: _Columns) -> pa.Array:
    """Return a column of a CSV file as tables read it, but for the blanks around a text."""
    if name == columns.text:
        return compute.if_else(compute.is_in(values, pa.array(MISSING_SPELLINGS)), None, values)
    return without_missing(values, columns.others.get(name, ()))


def _parquet_batches(path: Path, columns: _Columns, encoding: str | None) -> Iterator[pa.RecordBatch]:
    refuse_encoding(path, encoding)
    only = _only(columns.used, read_schema(path)[0].names)
    yield from parquet_batches(path, _ROWS_AT_ONCE, only)


def _only(used: Sequence[str], there: Sequence[str]) -> list[str] | None:
    """Return the columns to read; None (all) if one is missing or repeated, which `_stream` reports."""
    return [*used] if set(used) <= set(there) and len(set(there)) == len(there) else None


def _json_batches(path: Path, columns: _Columns, encoding: str | None) -> Iterator[pa.RecordBatch]:
    """Batches of the columns used, of the types that Arrow finds in the first block but for `_type_to_read`."""
    refuse_encoding(path, encoding)
    require_shallow_lines(path)
    read = arrow_json.ReadOptions(block_size=BYTES_AT_ONCE)
    with arrow_json.open_json(path, read) as reader:
        found = reader.schema
    only = _only(columns.used, found.names)
    types = [
        found.field(name).with_type(_type_to_read(found.field(name).type, name in columns.numbers))
        for name in only or ()
    ]
    others = "infer" if only is None else "ignore"
    options = arrow_json.ParseOptions(explicit_schema=pa.schema(types), unexpected_field_behavior=others)
    with arrow_json.open_json(path, read, options) as reader:
        yield from reader


def _type_to_read(kind: pa.DataType, is_number: bool) -> pa.DataType:
    """Return the type of a column of JSON lines, given that of its first rows.

    Texts that look like times stay texts, and whole numbers to predict may be followed by others.
    """
    if pa.types.is_list(kind):
        return pa.list_(_type_to_read(kind.value_type, is_number))
    if is_number and (pa.types.is_integer(kind) or pa.types.is_null(kind)):
        return pa.float64()
    return pa.string() if pa.types.is_timestamp(kind) or pa.types.is_null(kind) else kind


_STREAMS: Final[Mapping[str, Callable[[Path, _Columns, str | None], Iterator[pa.RecordBatch]]]] = {
    ".csv": _csv_batches,
    ".tsv": _csv_batches,
    ".jsonl": _json_batches,
    ".parquet": _parquet_batches,
}
"""Functions that stream a file, by file name extension."""
Learn = Callable[[Block, int], tuple[npt.NDArray[Any], ...]]
"""(block of rows, position of its first row) -> features, and labels if they are made from tokens."""


def _targets(objective: Objective, encoder: TextEncoder, mask: str, fraction: float, seed: int) -> Learn:
    """Return the function that makes features and labels from tokens."""
    if objective == "masked_lm":
        token = token_called(encoder.tokenizer, encoder.place, mask, "mask_token")
        return lambda block, first: masked_tokens(block, first, token, len(encoder.tokens), fraction, seed)
    if objective == "causal_lm":
        return lambda block, first: next_tokens(block, encoder.padding)
    return lambda block, first: (block.ids,)


@dataclass(frozen=True)
class _Learner:
    """Converts the rows of files to splits.

    `columns`: number of arrays that ``learn`` returns. `cache`: folder for memory-mapped tokens, or None. `settings`:
    all settings that tokens depend on, besides file and position; part of the hash that names the cached files.
    """

    encoder: TextEncoder
    learn: Learn
    columns: int
    cache: str | None
    settings: str

    def splits(self, files: Sequence[_File], encoding: Encoding, user: str | None) -> list[Split]:
        """Return the split of each file; ids count the rows of one file after another. `user`: the column of users."""
        users = user_names([each.columns for each in files], user)
        starts = itertools.accumulate((each.columns.num_rows for each in files), initial=0)
        return [self._split(each, encoding, users, first) for each, first in zip(files, starts, strict=False)]

    def _split(self, each: _File, encoding: Encoding, users: tuple[str, ...], first: int) -> Split:
        """Return the split of the complete rows of a file. `first`: id of its first row."""
        if len(each.rows) == 0:
            raise InvalidInput("no row has a text and all other values; correct the column `text`, or choose others")
        complete = each.columns.take(each.rows)
        found, place = cached_columns(
            self.cache,
            lambda: self._key(each, first),
            [*[RowForm(torch.int32, (self.encoder.length,))] * self.columns, RowForm(torch.bool, (2,))],
            len(each.rows),
            lambda: each.blocks(self.encoder, self.learn, first),
        )
        labels = found[1].numpy() if self.columns > 1 else encoding.labels.encode(complete)
        split = encoding.joined(found[0], complete, each.rows + first, users, labels)
        return replace(split, place=place, flaws=found[-1])

    def _key(self, each: _File, first: int) -> str:
        """Return a hash of everything that the tokens are made from."""
        with each.path.open("rb") as table:
            content = hashlib.file_digest(table, "sha256").hexdigest()
        parts = (content, each.text, self.settings, str(first), self.encoder.content, each.rows.data)
        return digest_of_parts(*parts)
