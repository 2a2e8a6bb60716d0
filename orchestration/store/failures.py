"""Error texts: the part that may be shown, and private storage of full texts, which may quote the data."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Protocol

from dpsweep.accounting.errors import StorageError, private_text
from dpsweep.accounting.records.files import delete
from dpsweep.accounting.records.local_files import make_folders
from dpsweep.accounting.records.sealed import write_private
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.store.release_modes import Disclosure, release_mode


def shown(error: BaseException, disclosure: Disclosure) -> str:
    """Return the text of a caught error as shown in reports, in MLflow, on the terminal and in Tune's state."""
    return release_mode(disclosure).error_text(error)


def record_failure(error: BaseException, files: TrialFiles, disclosure: Disclosure) -> str:
    """Return the publishable text of the error that ended a trial; write the withheld rest to ``files.error``."""
    text, hidden = shown(error, disclosure), private_text(error)
    if hidden is None:
        return text
    try:
        write_private(files.error, hidden.encode())
    except StorageError:
        return text  # if the disk is full, ``error`` most likely says so already
    return f"{text}; see {files.error.removeprefix(files.root.rstrip('/') + '/')} in the trial's folder"


def forget_failure(files: TrialFiles) -> None:
    """Delete the error text that an earlier attempt at the trial stored."""
    delete(files.error)


class Refused(Protocol):
    """A refused trial."""

    @property
    def key(self) -> str:
        """Key of the trial."""

    @property
    def hidden(self) -> str | None:
        """Withheld text of the error, if any."""


def record_refusals(refusals: Sequence[Refused], files: SweepFiles) -> str | None:
    """Write the withheld error texts of a plan to ``files.error``; replaces the texts of an earlier plan.

    Returns: a line that names the file, or None if nothing was withheld.
    """
    hidden = [f"{refusal.key}\n{refusal.hidden}" for refusal in refusals if refusal.hidden]
    if not hidden:
        with contextlib.suppress(StorageError):
            delete(files.error)
        return None
    make_folders(str(files.local_folder), 0o755)
    write_private(files.error, "\n".join(hidden).encode())
    return f"the texts of these errors, which may quote the data, are in {files.error}"
