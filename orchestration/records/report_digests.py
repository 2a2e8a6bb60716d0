"""The files that a report consists of, and their digests, by which `dpsweep verify` finds damage in them."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping

from dpsweep.accounting.errors import DataCorruption
from dpsweep.accounting.records.files import digest_of, exists, write_bytes_atomically
from dpsweep.accounting.records.json_text import parsed_json
from dpsweep.accounting.records.sealed import (
    read_private_sealed,
    read_sealed,
    write_private,
    write_private_sealed,
    write_sealed,
)
from dpsweep.orchestration.records.layout import SweepFiles


def write_public_reports(files: SweepFiles, contents: Mapping[str, bytes], sensitive: bool) -> None:
    """Write files of the report, given by path, and note the sha256 of each beside those noted before.

    `sensitive`: whether the files show exact statistics; then they and their digests are readable by their owner only.
    Raises: StorageError.
    """
    for uri, content in contents.items():
        write_bytes_atomically(uri, content, sensitive)
    digests = _noted(files) | {_name(files, uri): _sha256(content) for uri, content in contents.items()}
    write_sealed(files.report_digests, json.dumps(digests).encode(), sensitive)


def write_private_report(files: SweepFiles, content: bytes) -> None:
    """Write the private report, and note its sha256 in ``private/``. Raises: StorageError."""
    stored = write_private(files.private_report, content)
    digests = {_name(files, files.private_report): _sha256(stored)}
    write_private_sealed(files.private_report_digests, json.dumps(digests).encode())


def _noted(files: SweepFiles) -> dict[str, str]:
    """Return the digests of public files noted before; empty if they are damaged, which writing mends."""
    with contextlib.suppress(DataCorruption):
        return dict(parsed_json(read_sealed(files.report_digests, "") or b"{}"))
    return {}


def changed_report_files(files: SweepFiles) -> Iterator[str]:
    """Yield one line for each file of the report that is missing or has changed."""
    again = f"`dpsweep report {files.root}` writes it again"
    for read, uri in ((read_sealed, files.report_digests), (read_private_sealed, files.private_report_digests)):
        try:
            content = read(uri, again)
        except DataCorruption as error:
            yield str(error)
            continue
        for name, noted in parsed_json(content or b"{}").items():
            found = f"{files.root}/{name}"
            if not exists(found):
                yield f"{found}: it is missing; {again}"
            elif digest_of(found) != noted:
                yield f"{found}: its sha256 differs from the one noted when it was written; {again}"


def _sha256(content: bytes | memoryview) -> str:
    return hashlib.sha256(content).hexdigest()


def _name(files: SweepFiles, uri: str) -> str:
    return uri.removeprefix(f"{files.root}/")
