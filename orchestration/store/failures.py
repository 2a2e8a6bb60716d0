"""Error texts: the part that may be shown, and private storage of full texts, which may quote the data."""

from __future__ import annotations

from dpsweep.accounting.errors import StorageError, private_text
from dpsweep.accounting.records.sealed import write_private
from dpsweep.accounting.records.trial_files import TrialFiles
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
