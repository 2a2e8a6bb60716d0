"""The private copy of data that Python code gave, from which workers of Ray read them while a sweep runs."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from dataclasses import replace

from dpsweep.accounting.records.files import delete, delete_folder, is_local, list_files
from dpsweep.accounting.records.local_files import make_folders
from dpsweep.accounting.records.sealed import write_private
from dpsweep.orchestration.execution.environment import IN_PROCESS
from dpsweep.orchestration.store.layout import SweepFiles, require_safe
from dpsweep.workers.own_code.imports import GivenData, UserCode


@contextlib.contextmanager
def shared_data(code: UserCode, files: SweepFiles, address: str) -> Iterator[UserCode]:
    """Store the data that ``code`` holds in the sweep's private folder for the ``with`` block; yield code that names
    the copies.

    A run in this process needs no copy, and neither does a later run, which is given the data again.
    """
    if not code.data or address == IN_PROCESS:
        yield code
        return
    require_safe(files)
    if is_local(files.root):
        make_folders(str(files.local_folder), 0o777)  # a private folder makes those above it private too
    copies = [GivenData(each.called, path=files.given(uuid.uuid4().hex)) for each in code.data]
    try:
        for each, copied in zip(code.data, copies, strict=True):
            write_private(str(copied.path), each.content)
        yield replace(code, data=tuple(copies))
    finally:
        for copied in copies:
            delete(str(copied.path))


def delete_left_copies(code: UserCode, files: SweepFiles) -> None:
    """Delete the copies that killed drivers left in the sweep's folder, all but those that ``code`` names.

    Call it while no other driver can run in the folder.
    """
    names = {data.path.rpartition("/")[2] for data in code.data if data.path}
    if not names:
        delete_folder(files.all_given)  # with what a killed driver had half written
        return
    for name in set(list_files(files.all_given)) - names:
        delete(f"{files.all_given}/{name}")
