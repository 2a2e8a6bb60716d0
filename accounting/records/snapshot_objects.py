"""Objects: many parts of one snapshot in one immutable file, from which each part is read by its range of bytes.

An object is an Arrow IPC file with a batch of rows for each part, compressed by zstd. It is stored as pieces, one for
each part, one after the other: its batch, with what precedes all batches for the first part, and with what follows them
for the last. Every piece has its own sha256 and, where there is a key, is encrypted on its own, under its own name.
Every byte belongs to one part, so that damage is found by whoever reads it, and named. Without a key the pieces
together are an Arrow file that other tools read.

Lengths and hashes depend on the rows without noise: they are private, and messages omit them.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import pyarrow as pa

from dpsweep.accounting.records.arrow_parts import RepeatedIds, corrupt, decoded
from dpsweep.accounting.records.encryption import decrypted, encrypted, is_encrypting
from dpsweep.accounting.records.files import read_range

DIGEST = 32
"""Bytes of a sha256."""
_MAGIC = b"ARROW1\0\0"


@dataclass(frozen=True)
class ObjectRecord:
    """The pieces of an object as they are stored: their bytes, and their sha256 one after the other."""

    sizes: tuple[int, ...]
    digests: bytes

    @property
    def parts(self) -> int:
        """Number of batches of the object."""
        return len(self.sizes)

    def digest(self, piece: int) -> bytes:
        """Return sha256 of a piece."""
        return self.digests[DIGEST * piece : DIGEST * (piece + 1)]


@dataclass(frozen=True)
class Piece:
    """A piece of an object: its place, its name in messages, its sha256. whole: size of the object in bytes."""

    uri: str
    name: str
    start: int
    size: int
    whole: int
    digest: bytes


def make_pieces(uri: str, batches: Sequence[pa.RecordBatch]) -> tuple[ObjectRecord, list[memoryview]]:
    """Return the record and the pieces, to be stored one after the other, of the object ``uri`` with these batches: at
    least one, all of one schema.
    """
    is_secret = is_encrypting()
    stored = [
        memoryview(encrypted(f"{uri}#{number}", piece)) if is_secret else piece
        for number, piece in enumerate(_pieces(_arrow_file(batches)))
    ]
    digests = b"".join(hashlib.sha256(piece).digest() for piece in stored)
    return ObjectRecord(tuple(len(piece) for piece in stored), digests), stored


def read_piece(place: Piece) -> bytes:
    """Return a piece as it is stored, verified by bytes and sha256.

    Raises: DataCorruption when the object is missing, cut or altered there.
    """
    try:
        data, whole = read_range(place.uri, place.start, place.size)
    except FileNotFoundError:
        raise corrupt(place.uri, "the manifest lists it, but it is missing") from None
    if whole != place.whole:
        raise corrupt(place.uri, "its length differs from the manifest")
    if hashlib.sha256(data).digest() != place.digest:
        raise corrupt(f"{place.uri}: {place.name}", "its sha256 differs from the manifest")
    return data


def batch_of(
    place: Piece,
    piece: bytes,
    schema: pa.Schema,
    columns: Sequence[str] | None = None,
    ids: RepeatedIds | None = None,
) -> pa.Table:
    """Return the rows of a piece that was read, decoded as by `parts.decoded`. Raises: DataCorruption."""
    content = decrypted(place.uri, piece)
    file = content if content.startswith(_MAGIC) else _MAGIC + schema.serialize().to_pybytes() + content
    return decoded(f"{place.uri}: {place.name}", file, schema, columns, ids)


def _arrow_file(batches: Sequence[pa.RecordBatch]) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd"))
    with pa.ipc.new_file(sink, batches[0].schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue()


def _pieces(content: pa.Buffer) -> Iterator[memoryview]:
    """Yield the pieces of an Arrow file: a message for its schema, one for each batch, and its footer."""
    reader, ends = pa.BufferReader(content), list[int]()
    reader.seek(len(_MAGIC))
    with contextlib.suppress(EOFError):
        while pa.ipc.read_message(reader):
            ends.append(reader.tell())
    for start, end in pairwise((0, *ends[1:-1], content.size)):
        yield memoryview(content).cast("B")[start:end]
