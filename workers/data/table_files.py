"""Reads CSV and Parquet files as Arrow tables: encodings, separators, repeated names, markers for missing, embeddings.

How a file is read depends on its first line and on what is declared, never on the values of its rows.
"""

from __future__ import annotations

import codecs
import csv as fields_of
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import charset_normalizer
import numpy as np
import pyarrow as pa
import pyarrow.compute as compute
import pyarrow.csv as csv
import pyarrow.json as arrow_json

from dpsweep.accounting.errors import DataCorruption, InvalidInput
from dpsweep.accounting.records.json_text import parsed_json
from dpsweep.accounting.records.parquet_tables import read_parquet, read_schema
from dpsweep.workers.data.conventions import MISSING_SPELLINGS
from dpsweep.workers.data.source_files import reader_of, reading, require_path
from dpsweep.workers.data.spelling import CellValues, names
from dpsweep.workers.data.tabular import holds_lists

T = TypeVar("T", pa.Array, pa.ChunkedArray)
_BYTE_ORDER_MARKS: Final[Mapping[bytes, str]] = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
"""Encodings by the first bytes of a file; the mark of UTF-32 begins with the mark of UTF-16."""
_PACKED: Final[Mapping[bytes, str]] = {
    b"\x1f\x8b": "it is packed by gzip; unpack it",
    b"\x28\xb5\x2f\xfd": "it is packed by zstd; unpack it",
    b"\xfd7zXZ": "it is packed by xz; unpack it",
    b"PK\x03\x04": "it is a ZIP archive or a spreadsheet; unpack it, or save it as CSV",
    b"\xd0\xcf\x11\xe0": "it is a spreadsheet; save it as CSV",
    b"PAR1": "it is a Parquet file; call it .parquet",
}
"""Cures of files that are no text, by their first bytes."""
_ENCODINGS: Final = (
    "cp1252",
    "cp1251",
    "cp1250",
    "cp1253",
    "cp1254",
    "shift_jis",
    "euc_jp",
    "gb18030",
    "big5",
    "euc_kr",
)
"""Encodings that are tried by the names of columns, common ones first."""
_ESCAPES: Final = frozenset(("idna", "punycode", "raw-unicode-escape", "undefined", "unicode-escape", "utf-7"))
"""Codecs of Python that read plain letters of a row as escapes, such as a backslash and an n as the end of it."""
_HEADER_BYTES: Final = 1 << 20
BYTES_AT_ONCE: Final = 2**22
"""Number of bytes of CSV or JSON in memory at a time. Arrow refuses a row that is longer."""
_DEEPEST: Final = 100
"""Most levels of nested values of JSON; Arrow's parser needs stack for each, and ends the process near 20,000."""
_STRING: Final = re.compile(rb'"(?:[^"\\\n]|\\.)*+"')
_NO_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_BLOCK: Final = 1 << 22
_SEPARATORS: Final = (",", ";", "\t", "|")
_MOST_PLACES: Final = 10_000
_REPEATED: Final = b"repeated names"
"""Key of a table's metadata: names that several columns of the file have."""


@dataclass(frozen=True)
class Dialect:
    """How a CSV file is written. `columns`: names to read it by, where they differ from its header as written.

    `repeated`: names that the header has more than once. `skipped`: lines before what is read."""

    encoding: str
    separator: str
    columns: tuple[str, ...]
    repeated: tuple[str, ...]
    skipped: int

    @property
    def read(self) -> csv.ReadOptions:
        return csv.ReadOptions(encoding=self.encoding, column_names=list(self.columns), skip_rows=self.skipped)

    @property
    def parse(self) -> csv.ParseOptions:
        return csv.ParseOptions(newlines_in_values=True, delimiter=self.separator)


def dialect_of(path: Path, encoding: str | None) -> Dialect:
    """Return the dialect of a CSV file, by its first line. `encoding`: declared; else by a byte order mark, else UTF-8.

    A line ``sep=;``, as spreadsheets write it, names the separator. Otherwise it is the one of comma, semicolon, tab
    and bar that gives the header most fields, and in a .tsv file the tab. Raises: InvalidInput for an unknown encoding.
    """
    with path.open("rb") as file:
        start = file.read(_HEADER_BYTES)
    known = next((each for mark, each in _BYTE_ORDER_MARKS.items() if start.startswith(mark)), "utf8")
    chosen = known if encoding is None else require_encoding(encoding)
    decoded = codecs.getincrementaldecoder(chosen)("replace").decode(start).removeprefix("\ufeff")
    lines = re.split(r"\r\n|\r|\n", decoded)
    skipped = next((place for place, line in enumerate(lines) if line), 0)
    named = re.fullmatch(r"sep=(.)", lines[skipped])
    if named:
        skipped += 1
    separator = named[1] if named else "\t" if path.suffix.lower() == ".tsv" else _separator(lines[skipped:])
    first = _fields(lines[skipped:], separator)
    columns, repeated = different_names([name.strip() for name in first])
    if list(columns) == first:
        return Dialect(chosen, separator, (), (), skipped)
    spanned = 1 + sum(name.count("\n") for name in first)  # a quoted name may hold line breaks
    return Dialect(chosen, separator, columns, repeated, skipped + spanned)


def require_encoding(encoding: str) -> str:
    """Return the encoding, if Python knows it as one of text. Raises: InvalidInput otherwise."""
    try:
        b"text".decode(encoding, "replace")  # no bytes at all would be decoded by any name
        is_of_text = codecs.lookup(encoding).name not in _ESCAPES
    except (LookupError, ValueError):
        is_of_text = False
    if not is_of_text:
        raise InvalidInput(
            f"encoding is {encoding!r}, which Python does not know as one of text; common ones are utf-8, cp1252 "
            "and utf-16"
        )
    return encoding


def refuse_encoding(path: Path, encoding: str | None) -> None:
    """Raise InvalidInput for an encoding of a file that is no CSV."""
    if encoding is not None:
        raise InvalidInput(f"encoding is {encoding!r}, but {path} is no CSV file; leave `encoding` out")


def proposed_encoding(path: Path, named: Sequence[str]) -> str | None:
    """Return an encoding for a draft to declare; None for UTF-8, and for a file that names its encoding.

    Bytes that are not UTF-8 are taken for the first encoding in which the header holds the columns ``named``, if one
    of these has a letter that is not ASCII. Otherwise they are taken for cp1252, the most common one. Where they are
    not of cp1252 either, the likeliest encoding by charset-normalizer is proposed.

    Raises: InvalidInput for a file that is packed, a spreadsheet or a Parquet file.
    """
    content = path.read_bytes()
    if packed := next((cure for mark, cure in _PACKED.items() if content.startswith(mark)), None):
        raise InvalidInput(f"{path} is no table of text: {packed}")
    if content.startswith(tuple(_BYTE_ORDER_MARKS)):
        return None
    start = content[:_HEADER_BYTES]
    if start.count(b"\0") > len(start) // 4:  # letters in two bytes, one of them 0
        return "utf-16-be" if start[:1] == b"\0" else "utf-16-le"
    if _spells(content, "utf-8", ()):
        return None
    candidates = ("cp1252",) if all(map(str.isascii, named)) else _ENCODINGS
    for encoding in candidates:
        if _spells(content, encoding, named):
            return encoding
    if _spells(content, "cp1252", ()):
        return "cp1252"
    likeliest = charset_normalizer.from_bytes(start).best()
    return likeliest.encoding if likeliest else "latin-1"


def _spells(content: bytes, encoding: str, named: Sequence[str]) -> bool:
    """Return whether the bytes are text in an encoding, whose first lines hold these names."""
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError:
        return False
    header = "\n".join(text[:_HEADER_BYTES].splitlines()[:2])  # sep=; may stand above the names
    return all(name in header for name in named)


def _fields(lines: Sequence[str], separator: str) -> list[str]:
    """Return the fields of the first record; none if it is no CSV."""
    try:
        return next(fields_of.reader((f"{line}\n" for line in lines), delimiter=separator), [])
    except fields_of.Error:
        return []


def _separator(lines: Sequence[str]) -> str:
    return max(_SEPARATORS, key=lambda each: len(_fields(lines, each)))


def different_names(given: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return names that are all different, a repeated one with .1, .2, ... as in pandas, and those that were repeated.

    >>> different_names(["x", "y", "x"])
    (('x', 'y', 'x.1'), ('x',))
    """
    counts, taken, found = Counter(given), set(given), list[str]()
    last: dict[str, int] = {}
    for name in given:
        chosen, number = name, last.get(name, 0)
        while name in last and chosen in taken:
            number += 1
            chosen = f"{name}.{number}"
        last[name] = number
        taken.add(chosen)
        found.append(chosen)
    return tuple(found), tuple(name for name, count in counts.items() if count > 1)


def repeated_names(rows: pa.Table) -> frozenset[str]:
    """Return the names that several columns of the file had, from which `read_table_file` has made different ones."""
    return frozenset(parsed_json((rows.schema.metadata or {}).get(_REPEATED, b"[]")))


def _table(columns: Iterable[tuple[str, pa.ChunkedArray]], repeated: Sequence[str]) -> pa.Table:
    listed = list(columns)
    table = pa.Table.from_arrays([values for _, values in listed], names=[name for name, _ in listed])
    return table.replace_schema_metadata({_REPEATED: json.dumps(repeated).encode()})


def _read_csv(path: Path, texts: Mapping[str, CellValues], encoding: str | None) -> pa.Table:
    """Return the table, with the columns ``texts`` read as text: 007 stays 007, and NA if it is among their values."""
    dialect = dialect_of(path, encoding)
    convert = csv.ConvertOptions(
        column_types=dict.fromkeys(texts, pa.string()), null_values=list(MISSING_SPELLINGS), strings_can_be_null=False
    )
    rows = csv.read_csv(path, dialect.read, dialect.parse, convert)
    require_closed_quotes(path, dialect, rows.num_rows)
    if any(map(pa.types.is_binary, rows.schema.types)):  # what Arrow makes of text that is not UTF-8
        raise pa.ArrowInvalid("invalid UTF8 data")
    columns = ((name, without_missing(rows[name], texts.get(name, ()))) for name in rows.column_names)
    return _table(columns, dialect.repeated)


def require_closed_quotes(path: Path, written: Dialect, rows: int) -> None:
    """Check that no quote has joined rows of a CSV file, which has so many ``rows``; one that closes may join lines.

    After a closing quote there must be a separator or the end of a row. A value with both a tab and a line break is
    refused where tabs separate fields: in such files quotes are mostly plain characters.

    Raises: DataCorruption that names the lines.
    """
    if _lines(path) <= written.skipped + (not written.columns) + rows:
        return
    with path.open(encoding=written.encoding, errors="replace", newline="") as file:
        number, record, most = 1, list[str](), fields_of.field_size_limit(sys.maxsize)
        try:
            for _ in fields_of.reader(_noted(file, record), delimiter=written.separator):
                if len(record) > 1 and not _is_closed(record, written.separator):
                    raise DataCorruption(
                        f"cannot read {path}: a quote joins lines {number} to {number + len(record) - 1} to one row; "
                        "close it, or put its whole field into quotes and write each quote in it twice"
                    )
                number += len(record)
                record.clear()
        finally:
            fields_of.field_size_limit(most)


def _lines(path: Path) -> int:
    """Return at least the number of lines of a file."""
    found, last = 0, b""
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            found += block.count(b"\n") + block.count(b"\r") - block.count(b"\r\n")
            last = block[-1:]
    return found + (last not in (b"\n", b"\r"))


def _noted(lines: Iterable[str], record: list[str]) -> Iterator[str]:
    for line in lines:
        record.append(line)
        yield line


def _is_closed(lines: Sequence[str], separator: str) -> bool:
    try:
        (found,) = fields_of.reader(lines, delimiter=separator, strict=True)
    except fields_of.Error:
        return False
    return separator != "\t" or not any("\t" in each and ("\n" in each or "\r" in each) for each in found)


def without_missing(values: pa.Array | pa.ChunkedArray, declared: CellValues) -> pa.Array | pa.ChunkedArray:
    """Return the texts without outer blanks, with null for marks of a missing value that are not declared as values."""
    if not pa.types.is_string(values.type):
        return values
    found = compute.utf8_trim_whitespace(values)
    missing = [each for each in MISSING_SPELLINGS if each not in names(declared)]
    return compute.if_else(compute.is_in(found, value_set=pa.array(missing)), pa.scalar(None, pa.string()), found)


def _read_parquet(path: Path, texts: Mapping[str, CellValues], encoding: str | None) -> pa.Table:
    """Return the table, with a column for each place of lists of equally many numbers, except for columns of texts."""
    refuse_encoding(path, encoding)
    return _with_places(_stored(path), texts)


def _with_places(rows: pa.Table, texts: Mapping[str, CellValues]) -> pa.Table:
    """Return the table with a column for each place of lists of equally many numbers, but of columns ``texts``."""
    given, repeated = different_names(rows.column_names)
    columns: list[tuple[str, pa.ChunkedArray]] = []
    for name, values in zip(given, rows.columns, strict=True):
        columns += (name not in texts and _places(name, values)) or [(name, plain_texts(values))]
    return _table(columns, repeated)


def _stored(path: Path) -> pa.Table:
    """Return all columns. Lists of a fixed size that no row has are null: Arrow writes, but cannot read them."""
    try:
        return read_parquet(path)
    except pa.ArrowInvalid:
        schema, size = read_schema(path)
        if not any(map(pa.types.is_fixed_size_list, schema.types)) or len({*schema.names}) < len(schema):
            raise
        return pa.table({each.name: _alone(path, each, size) for each in schema})


def _alone(path: Path, field: pa.Field, size: int) -> pa.ChunkedArray | pa.Array:
    try:
        return read_parquet(path, [field.name])[field.name]
    except pa.ArrowInvalid:
        if not pa.types.is_fixed_size_list(field.type):
            raise
        return pa.nulls(size, field.type)


def plain_texts(values: T) -> T:
    """Return a column, its texts in one type however the file stores them.

    Raises: ArrowInvalid for texts that are not UTF-8, which Arrow does not notice in Parquet and JSON, lists included.
    """
    values.validate(full=True)
    kind = values.type.value_type if pa.types.is_dictionary(values.type) else values.type
    is_text = pa.types.is_large_string(kind) or pa.types.is_string_view(kind) or pa.types.is_string(kind)
    return values.cast(pa.string()) if is_text else values


def _places(name: str, values: pa.ChunkedArray) -> list[tuple[str, pa.ChunkedArray]]:
    """Return the columns ``name[0]``, ``name[1]``, ... of lists of equally many numbers; none for another column."""
    kind = values.type
    if not holds_lists(kind) or not (pa.types.is_floating(kind.value_type) or pa.types.is_integer(kind.value_type)):
        return []
    lengths = compute.unique(compute.list_value_length(values)).drop_null().to_pylist()
    if len(lengths) != 1 or not 0 < lengths[0] <= _MOST_PLACES:
        return []
    return [(f"{name}[{place}]", compute.list_element(values, place)) for place in range(lengths[0])]


def places_of(columns: Sequence[str]) -> dict[str, list[str]]:
    """Return the columns ``name[0]``, ``name[1]``, ... of each embedding, by its name.

    >>> places_of(["x", "emb[0]", "emb[1]"])
    {'emb': ['emb[0]', 'emb[1]']}
    """
    found: dict[str, list[str]] = {}
    for column in columns:
        if (match := re.fullmatch(r"(.+)\[(\d{1,9})\]", column)) and int(match[2]) == len(found.get(match[1], [])):
            found.setdefault(match[1], []).append(column)
    return {name: places for name, places in found.items() if name not in columns}


def _read_json(path: Path, texts: Mapping[str, CellValues], encoding: str | None) -> pa.Table:
    """Return the table of a file with one object per line, with what looks like a time as it is spelt."""
    refuse_encoding(path, encoding)
    require_shallow_lines(path)
    read = arrow_json.ReadOptions(block_size=BYTES_AT_ONCE)
    rows = arrow_json.read_json(path, read)
    if times := [each.with_type(pa.string()) for each in rows.schema if pa.types.is_timestamp(each.type)]:
        rows = arrow_json.read_json(path, read, arrow_json.ParseOptions(explicit_schema=pa.schema(times)))
    return _with_places(rows, texts)


def require_shallow_lines(path: Path) -> None:
    """Raise ArrowInvalid for values of JSON nested so deeply that Arrow's parser would end the process."""
    depth = 0
    with path.open("rb") as file:
        while block := file.read(BYTES_AT_ONCE) + file.readline(BYTES_AT_ONCE):
            brackets = np.frombuffer(_STRING.sub(b"", block).translate(None, _NO_BRACKETS), np.uint8)
            steps = depth + np.cumsum(np.append(0, np.where(np.isin(brackets, [*b"[{"]), 1, -1)))
            above = steps - np.minimum(np.minimum.accumulate(steps), 0)  # brackets that close nothing count as none
            if above.max() > _DEEPEST:
                raise pa.ArrowInvalid(f"nested more than {_DEEPEST} levels deep in a line")
            depth = int(above[-1])
            if len(block) == 2 * BYTES_AT_ONCE and not block.endswith(b"\n"):
                raise pa.ArrowInvalid("straddling object")  # as Arrow says, which would read all of the file


READERS: Final[Mapping[str, Callable[[Path, Mapping[str, CellValues], str | None], pa.Table]]] = {
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".jsonl": _read_json,
    ".parquet": _read_parquet,
}
"""Readers by file name extension."""


def read_table_file(path: str, texts: Mapping[str, CellValues], encoding: str | None = None) -> pa.Table:
    """Return the rows of a .csv, .tsv, .jsonl or .parquet file.

    Columns of one name get different ones (`different_names`). `texts`: columns of a CSV file to read as text, with
    declared values. `encoding`: of a CSV file.

    Raises: InvalidInput for a missing file, a folder or another file type; DataCorruption for a file that cannot be
    read.
    """
    found = require_path(path)
    reader = reader_of(found, READERS)
    with reading(found):
        return reader(found, texts, encoding)
