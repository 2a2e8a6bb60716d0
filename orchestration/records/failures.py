"""What is shown of errors, and where the rest goes: text that may quote the data stays in a private folder."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Protocol

from accounting.errors import StorageError, private_text
from accounting.records.files import delete, write_bytes_atomically
from accounting.records.layout import TrialFiles
from orchestration.records.layout import SweepFiles
from orchestration.records.release_modes import Disclosure, release_mode


def shown(error: BaseException, disclosure: Disclosure) -> str:
    """What an error that was just caught says in reports, in MLflow, on the terminal and in Tune's state."""
    return release_mode(disclosure).error_text(error)


def record_failure(error: BaseException, files: TrialFiles, disclosure: Disclosure) -> str:
    """What is shown of the error that ended a trial; text and traceback that this leaves out go to ``files.error``."""
    text, hidden = shown(error, disclosure), private_text(error)
    if hidden is None:
        return text
    try:
        write_bytes_atomically(files.error, hidden.encode(), private=True)
    except StorageError:
        return text  # such as a full disk, which this error tells already
    return f"{text}; see {files.error.removeprefix(files.root.rstrip('/') + '/')} in the trial's folder"


def forget_failure(files: TrialFiles) -> None:
    """What an earlier attempt at the trial left no longer holds."""
    delete(files.error)


class Refused(Protocol):
    """Something that was refused: its key, and the text of the error that is not shown, if any."""

    @property
    def key(self) -> str: ...

    @property
    def hidden(self) -> str | None: ...


def record_refusals(refusals: Sequence[Refused], files: SweepFiles) -> str | None:
    """Where the texts behind the refusals of a plan are, if there are any; those of an earlier plan are deleted."""
    hidden = [f"{refusal.key}\n{refusal.hidden}" for refusal in refusals if refusal.hidden]
    if not hidden:
        with contextlib.suppress(StorageError):
            delete(files.error)
        return None
    files.local_folder.mkdir(parents=True, exist_ok=True)
    write_bytes_atomically(files.error, "\n".join(hidden).encode(), private=True)
    return f"the texts of these errors, which may quote the data, are in {files.error}"
