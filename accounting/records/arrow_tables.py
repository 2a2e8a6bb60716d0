"""Encodes Arrow tables, and reads them from untrusted bytes.

The expanded size of compressed buffers is checked before decompression. A kilobyte of zstd may expand to a gigabyte.
Arrow stores the expanded length before every compressed buffer, and the places of the buffers in the metadata of each
message (Arrow's IPC format, a flatbuffer; see Message.fbs).
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator, Sequence

import pyarrow as pa

from dpsweep.accounting.records.memory_limits import half_of_memory

_START = 8
"""Bytes before the messages of an Arrow file; the messages form an Arrow stream."""
LARGEST_RATIO = 1_000
"""Largest accepted ratio of expanded to stored size: rows differ by their ids, which compress by less than 100."""
ALWAYS_ALLOWED = 2**22
"""Expanded size in bytes that is accepted for a file of any size."""
MOST_METADATA = 2**24
"""Largest description of a message in bytes: a schema has about a hundred for each column."""
_HEADER, _LENGTH, _BUFFERS, _COMPRESSION = 2, 0, 2, 3
"""Numbers of flatbuffer fields: the header of a Message; length, buffers and compression of a RecordBatch."""


class Oversized(ValueError):
    """A file that expands to more than its rows can need."""


def encode_table(table: pa.Table, compression: pa.Codec | str | None = "zstd") -> bytes:
    """Return the table as an Arrow IPC file."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue().to_pybytes())


def read_table(data: bytes, columns: Sequence[str] | None = None) -> pa.Table:
    """Return the table of an Arrow IPC file, read as the stream of messages that it contains.

    columns: those to decode; all by default. Rows of a type that takes no bytes, such as null, may be more than fit
    into memory: who makes other values of them looks at the types first.

    Raises: Oversized before anything is expanded, pyarrow's errors for bytes that are no such file, or whose lengths
    and offsets lead out of their buffers.
    """
    table = _read(data, columns)
    table.validate(full=True)
    return table


def _read(data: bytes, columns: Sequence[str] | None) -> pa.Table:
    stream = pa.py_buffer(data)[_START:]
    allowed, expanded = min(max(LARGEST_RATIO * len(data), ALWAYS_ALLOWED), half_of_memory()), 0
    for message in _messages(stream):
        if message.metadata.size > MOST_METADATA:
            raise Oversized(f"its columns are described in more than {MOST_METADATA} bytes")
        expanded += sum(_expanded_lengths(message))
        if expanded > allowed:
            raise Oversized(f"its {len(data)} bytes would expand to more than {allowed}")
    with pa.ipc.open_stream(stream) as reader:
        if columns is None:
            return reader.read_all()
        wanted = [place for place, name in enumerate(reader.schema.names) if name in columns]
    alone = pa.ipc.IpcReadOptions(included_fields=wanted, use_threads=False)  # a few columns are not worth a thread
    with pa.ipc.open_stream(stream, options=alone) as reader:
        return reader.read_all()


def _messages(stream: pa.Buffer) -> Iterator[pa.Message]:
    reader = pa.BufferReader(stream)
    while True:
        try:
            yield pa.ipc.read_message(reader)
        except EOFError:
            return


def stored_column(data: bytes, place: int) -> tuple[bytes, ...]:
    """Return the stored bytes of the column with index ``place`` in an Arrow IPC file whose columns are all numeric.

    For each batch of rows: the number of rows, then validity and values, both possibly compressed. Equal bytes decode
    to equal columns. Raises: pyarrow's errors for bytes that are no such file.
    """
    found: list[bytes] = []
    for message in _messages(pa.py_buffer(data)[_START:]):
        if message.type == "record batch":
            buffers, body = _buffers(message), message.body
            found.append(_row_count(message))
            for offset, length in buffers[2 * place : 2 * place + 2]:
                found.append(body[offset : offset + length].to_pybytes())
    return tuple(found)


def _expanded_lengths(message: pa.Message) -> Iterator[int]:
    """Yield the uncompressed length of every buffer of a message with rows, where they are compressed."""
    if message.type not in ("record batch", "dictionary"):
        return
    metadata = message.metadata.to_pybytes()
    with _named_damage():
        if not _field(metadata, _batch(message, metadata), _COMPRESSION):
            return
        for offset, length in _buffers(message):
            if length > 8:
                (expanded,) = struct.unpack_from("<q", message.body, offset)
                yield max(expanded, 0)  # -1: stored as it is


def _buffers(message: pa.Message) -> list[tuple[int, int]]:
    """Return offset and length of every buffer of a message with rows; each column of numbers has two."""
    metadata = message.metadata.to_pybytes()
    with _named_damage():
        vector = _table_at(metadata, _field(metadata, _batch(message, metadata), _BUFFERS))
        (count,) = struct.unpack_from("<I", metadata, vector)
        return [struct.unpack_from("<qq", metadata, vector + 4 + 16 * place) for place in range(count)]


def _row_count(message: pa.Message) -> bytes:
    """Return the stored bytes of a batch's number of rows."""
    metadata = message.metadata.to_pybytes()
    with _named_damage():
        at = _field(metadata, _batch(message, metadata), _LENGTH)
        return metadata[at : at + 8] if at else b""


def _batch(message: pa.Message, metadata: bytes) -> int:
    """Return the position of the RecordBatch in the metadata of a message."""
    batch = _table_at(metadata, _field(metadata, _table_at(metadata, 0), _HEADER))
    return _table_at(metadata, _field(metadata, batch, 1)) if message.type == "dictionary" else batch


@contextlib.contextmanager
def _named_damage() -> Iterator[None]:
    try:
        yield
    except struct.error as error:
        raise pa.ArrowInvalid(f"a message is cut or altered ({error})") from error


def _table_at(metadata: bytes, position: int) -> int:
    """Return the position to which the offset at ``position`` points."""
    (offset,) = struct.unpack_from("<I", metadata, position)
    return position + int(offset)


def _field(metadata: bytes, table: int, number: int) -> int:
    """Return the position of a field of a table; 0 if the table lacks it."""
    (back,) = struct.unpack_from("<i", metadata, table)
    (size,) = struct.unpack_from("<H", metadata, table - back)
    entry = 4 + 2 * number
    if entry >= size:
        return 0
    (offset,) = struct.unpack_from("<H", metadata, table - back + entry)
    return table + offset if offset else 0
