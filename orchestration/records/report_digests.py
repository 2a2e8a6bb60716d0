"""Digests of the files that a report consists of, by which `dpsweep verify` finds damage in them."""

from __future__ import annotations

import json
from collections.abc import Iterator

from accounting.errors import DataCorruption
from accounting.records import (
    exists,
    read_private_sealed,
    read_sealed,
    write_private_sealed,
    write_sealed,
)
from orchestration.records.layout import SweepFiles
from workers.digests import digest


def note_reports(files: SweepFiles, sensitive: bool) -> None:
    """Store the sha256 of the report's files, each time they are written; that of the private report in ``private/``.

    sensitive: whether the report shows exact statistics, whose digests are private too. Raises: StorageError.
    """
    public = {_name(files, uri): digest(uri) for uri in _public(files) if exists(uri)}
    write_sealed(files.report_digests, json.dumps(public).encode(), sensitive)
    if exists(files.private_report):
        private = {_name(files, files.private_report): digest(files.private_report)}
        write_private_sealed(files.private_report_digests, json.dumps(private).encode())


def changed_report_files(files: SweepFiles) -> Iterator[str]:
    """One line for each file of the report that is missing or has changed; none for sweeps of earlier versions."""
    again = f"`dpsweep report {files.root}` writes it again"
    for read, uri in ((read_sealed, files.report_digests), (read_private_sealed, files.private_report_digests)):
        try:
            content = read(uri, again)
        except DataCorruption as error:
            yield str(error)
            continue
        for name, noted in json.loads(content or b"{}").items():
            found = f"{files.root}/{name}"
            if not exists(found):
                yield f"{found}: it is missing; {again}"
            elif digest(found) != noted:
                yield f"{found}: its sha256 differs from the one noted when it was written; {again}"


def _public(files: SweepFiles) -> tuple[str, ...]:
    return files.report, files.comparison, files.results


def _name(files: SweepFiles, uri: str) -> str:
    return uri.removeprefix(f"{files.root}/")
