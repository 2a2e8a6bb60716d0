"""The file names of a sweep, defined only here, and whether its folder is safe. A trial has `TrialFiles`."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote, urlsplit

from dpsweep.accounting.errors import InvalidInput, StorageError
from dpsweep.accounting.records.local_files import (
    UnsafeFile,
    require_library_files,
    require_no_mounts,
    require_own_folder,
    require_own_folders,
    require_plain,
    require_plain_folder,
)
from dpsweep.accounting.records.trial_files import Below, TrialFiles
from dpsweep.workers.machine.folders import at_home

_DIGITS: Final = 8
"""Digits of the digest in the name of a local folder."""
_LONGEST_STEM: Final = 100
"""Most characters of the last part of a URI in the name of a local folder."""
_LONGEST_NAME: Final = 255
"""Most bytes of the name of a file or folder, on all common file systems."""


def absolute(location: str) -> str:
    """Return ``location`` as an absolute path, because workers run in other directories; an object-store URI is
    unchanged.

    The links on the way are the user's own and are followed here, once: below a sweep's folder none is.

    >>> absolute("s3://bucket/runs/a"), absolute("/data/../runs/a"), absolute("file:///runs/a%20b")
    ('s3://bucket/runs/a', '/runs/a', 'file:///runs/a%20b')

    Raises: InvalidInput for an empty location, which would be the working directory, and one with a null character or a
    name that is too long, which no file may have.
    """
    if not location:
        raise InvalidInput("a path is empty, as of a variable that is not set; name a folder or a file")
    if "\0" in location:
        raise InvalidInput(f"{location!r} holds a null character, which no file name may; give another path")
    if "://" not in location and any(len(os.fsencode(name)) > _LONGEST_NAME for name in Path(location).parts):
        raise InvalidInput(f"{location} holds a name of more than {_LONGEST_NAME} bytes; give another path")
    if location.startswith("file://"):
        return f"file://{quote(os.path.realpath(unquote(urlsplit(location).path)))}"
    return location if "://" in location else str(at_home(location).resolve())


def default_output(name: str) -> str:
    """Return the default output folder of a sweep, relative to the working directory.

    >>> default_output("quickstart")
    'runs/quickstart'
    """
    return f"runs/{name}"


def output_files(output: str | None, name: str) -> SweepFiles:
    """Return the files of a sweep called ``name`` that is written to ``output``, or to its default folder.

    Raises: InvalidInput as `absolute`, and for a path that is no UTF-8, which neither Ray nor MLflow stores. Also for a
    local path that is a file or leads through one, or that is too long.
    """
    root = absolute(default_output(name) if output is None else output)
    if any("\ud800" <= character <= "\udfff" for character in root):
        raise InvalidInput(
            f"--output {ascii(root)[1:-1]}: its name is no UTF-8, or the locale is of another encoding; name another "
            "folder, or set LC_ALL=C.UTF-8"
        )
    if "://" not in root:
        try:
            os.stat(root)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            raise InvalidInput(f"--output {root}: {error.strerror}; name another folder with --output") from error
        if file := _no_folder(root):
            raise InvalidInput(f"--output {root}: {file} is a file, not a folder; name another folder with --output")
    return SweepFiles(root)


def _no_folder(root: str) -> str:
    """Return what is no folder on the way to a local path, its end included; "" if there is nothing."""
    levels = (root, *map(str, Path(root).parents)) if "://" not in root else ()
    return next((level for level in levels if os.path.exists(level) and not os.path.isdir(level)), "")


def folder_at(location: str, wanted: str = "the folder of a sweep, which `dpsweep run` wrote") -> str:
    """Return `absolute` of a folder that a user names; it need not be there. wanted: for the message.

    Raises: InvalidInput as `absolute`, and for a local path that is no folder or leads through a file.
    """
    root = absolute(location)
    if file := _no_folder(root):
        raise InvalidInput(f"{file} is a file, not a folder; name {wanted}")
    return root


def file_at(location: str) -> str:
    """Return `absolute` of a file that a user names; it need not be there.

    Raises: InvalidInput as `absolute`, and for a local folder or device, or a path that leads through a file.
    """
    uri = absolute(location)
    folder_at(os.path.dirname(uri), "a file")
    if "://" not in uri and os.path.exists(uri) and not os.path.isfile(uri):
        raise InvalidInput(f"{uri} is {'a folder' if os.path.isdir(uri) else 'a device'}, not a file; name a file")
    return uri


def sweep_at(location: str) -> SweepFiles:
    """Return the files of a stored sweep that a user names. Raises: as `folder_at`."""
    return SweepFiles(folder_at(location))


def trial_at(location: str) -> TrialFiles:
    """Return the files of a stored trial that a user names. Raises: as `folder_at`."""
    return TrialFiles(folder_at(location, "the folder of a trial, below trials/ of its sweep"))


LOCK: Final = ".lock"
"""Name of the file that the process locks which changes a sweep in a local folder."""
DATABASE: Final = "mlflow.db"
"""Name of the embedded MLflow store."""
_TRIALS: Final = "trials"
"""Name of the folder of the trials."""


@dataclass(frozen=True)
class SweepFiles:
    """Paths of a sweep's files. ``root``: an absolute local path or an object-store URI.

    >>> SweepFiles("s3://bucket/runs/a").report
    's3://bucket/runs/a/report.html'
    """

    root: str

    def trial(self, key: str) -> TrialFiles:
        """Return the files of the trial called ``key``."""
        return TrialFiles(f"{self.trials}/{key}")

    def folders_of(self, keys: Iterable[str]) -> Iterator[str]:
        """Yield the folders that go with the trials of these keys when they are deleted: their files and audits."""
        for key in keys:
            yield self.trial(key).root
            yield self.audits(key)

    def attempts(self, key: str) -> str:
        """Return the folder of the attempts at a trial (`AttemptLog`). Nothing deletes it: released results stay
        released.
        """
        return f"{self.attempts_of_all}/{key}"

    trials = Below("The trials.", _TRIALS)
    private = Below("Files that only the owner of the data may read.", "private")
    manifest = Below("The submitted sweep, versions, git state, hardware, places of your code (JSON).", "sweep.json")
    results = Below("All trials as JSON, as ``dpsweep run --json`` prints them.", "results.json")
    comparison = Below("Settings with intervals, differences with verdicts, and warnings (JSON).", "comparison.json")
    report = Below("The report that may be shared under the sweep's release mode.", "report.html")
    private_report = Below("The report with exact statistics of the training examples.", "private/report.html")
    report_digests = Below("sha256 of the report, `comparison` and `results`, as private as these are.", "digests.json")
    private_report_digests = Below("sha256 of `private_report`.", "private/digests.json")

    def audits(self, key: str) -> str:
        """Return the folder of the audits of a trial by `dpsweep audit` (private)."""
        return f"{self.every_audit}/{key}"

    every_audit = Below("The audits of all trials.", "private/audits")
    audited_copy = Below(
        "The copy of a trial that `dpsweep audit` trains and deletes.", "private/audited-copy", "local_folder"
    )
    all_given = Below("Copies of the data that Python code gave, while a sweep runs.", "private/given")

    def given(self, name: str) -> str:
        """Return one of these copies."""
        return f"{self.all_given}/{name}.npz"

    pages = Below("Report and figures while MLflow gets them.", "pages", "local_folder")
    error = Below("Withheld texts and tracebacks of errors of the plan.", "private/error.txt", "local_folder")
    tune = Below("Ray Tune's own state, a local folder not needed to resume.", "tune", "local_folder")

    @property
    def local_folder(self) -> Path:
        """Local folder of files that only the driver uses: its log and the embedded MLflow store.

        For an object store it is named by the last part of the URI and a digest of the whole, which tells
        ``s3://a/exp1`` from ``s3://b/exp1``.
        """
        if "://" not in self.root:
            return Path(self.root)
        whole = self.root.rstrip("/")
        digest = hashlib.sha256(whole.encode()).hexdigest()[:_DIGITS]
        return Path("runs", f"{Path(whole).name[:_LONGEST_STEM]}-{digest}").resolve()

    @property
    def log(self) -> Path:
        """Log of Ray and Tune, kept off the terminal."""
        return self.local_folder / "dpsweep.log"

    @property
    def database(self) -> Path:
        """The embedded MLflow store (SQLite)."""
        return self.local_folder / DATABASE

    artifacts = Below("Figures and reports of the embedded MLflow store.", "mlflow-artifacts")
    tuning = Below("The tuning sweep.", "tuning")
    selection = Below("The candidates of a private selection, until it is made.", "private/selection")

    @property
    def of_tuning(self) -> SweepFiles:
        """The files of the tuning sweep, which may not be there."""
        return SweepFiles(self.tuning)

    @property
    def of_selection(self) -> SweepFiles:
        """The files of the candidates of a private selection, which may not be there."""
        return SweepFiles(self.selection)

    claim = Below("The claim of the driver that runs the sweep; object stores only.", "driver.json")
    status = Below("Progress of the sweep (JSON); it may be shown like the report.", "status.json")
    probe = Below("File by which nodes check that the storage is shared.", "storage-probe")

    lock = Below("Local file that the process locks which changes the sweep.", LOCK, "local_folder")
    attempts_of_all = Below("The attempts at all trials.", "attempts")

    @property
    def in_place(self) -> tuple[str, ...]:
        """Local files that libraries open by their paths and change in place."""
        journals = (f"{self.database}{suffix}" for suffix in ("", "-journal", "-wal", "-shm"))
        return (str(self.log), *journals)

    @property
    def top_files(self) -> tuple[str, ...]:
        """The files of a sweep outside its folders, except its manifest; and those in its folder ``private/``."""
        reports = (self.report, self.private_report, self.comparison, self.results, self.status, self.error)
        digests = (self.report_digests, self.private_report_digests)
        return (*reports, *digests, self.probe, *self.in_place)

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders that a sweep fills; folders of other sweeps in it, such as the tuning, are among them."""
        own = (self.trials, self.attempts_of_all, self.private, self.tuning, self.artifacts)
        return (*own, self.tune, self.pages, str(self.local_folder / "private"))


def no_sweep(files: SweepFiles) -> InvalidInput:
    """Return the error for a folder without a sweep."""
    return InvalidInput(f"{files.root} holds no sweep; name the folder that `dpsweep run` wrote")


def sweep_of(trial: TrialFiles) -> tuple[SweepFiles, str] | None:
    """Return the sweep that a trial's folder lies in, and the trial's key; None for a folder outside a sweep."""
    sweep, _, key = trial.root.rstrip("/").rpartition(f"/{_TRIALS}/")
    return (SweepFiles(sweep), key) if sweep else None


def require_safe(files: SweepFiles) -> None:
    """Refuse to fill a folder in which links, pipes or devices lie, or that other users own or can change.

    Only what a sweep writes is looked at: other files in the folder are the user's own. A folder that is not there is
    safe. Raises: InvalidInput with what was found, and how to get a folder that is safe.
    """
    plain, folders, in_place = _plain(files), _local(files.folders), files.in_place
    try:
        require_own_folder(str(files.local_folder))
        require_plain(*plain)
        for folder in folders:
            require_plain_folder(folder)
            require_own_folders(folder)
        require_library_files(in_place)
    except (UnsafeFile, OSError) as error:
        reason = f"cannot look into {files.root}: {error.strerror}" if isinstance(error, OSError) else error
        raise InvalidInput(f"{reason}; another --output is a new folder, which only you can change") from error


def require_no_links(files: SweepFiles) -> None:
    """Refuse a folder in which a link, a pipe or a device stands for a file or folder of a sweep or its candidates, or
    below which something is mounted.

    Raises: UnsafeFile naming the first; StorageError for a folder that may not be read.
    """
    try:
        require_plain(*_plain(files))
        for folder in _local((files.root,)):
            require_no_mounts(folder)
    except OSError as error:
        raise StorageError(
            f"cannot look at every file in {files.root}: {error.strerror}; only the user who ran the sweep can"
        ) from error


def with_candidates(files: SweepFiles) -> tuple[SweepFiles, SweepFiles, SweepFiles]:
    """Return the files of a sweep, of its tuning, and of its private selection, which may not be there."""
    return files, files.of_tuning, files.of_selection


def _plain(files: SweepFiles) -> tuple[list[str], list[str]]:
    """Return the local paths of all files of a sweep and its candidates outside their folders, and of these folders."""
    sweeps = with_candidates(files)
    own = [path for each in sweeps for path in (*each.top_files, each.manifest, each.lock)]
    return _local(own), _local(folder for each in sweeps for folder in each.folders)


def require_safe_tracking(files: SweepFiles) -> None:
    """Check what MLflow opens by its path: the database in the sweep's folder, and the artifacts beside it.

    Raises: InvalidInput with what was found.
    """
    try:
        require_library_files(files.in_place)
        for folder in _local((files.artifacts,)):
            require_plain_folder(folder)
    except (UnsafeFile, OSError) as error:
        raise InvalidInput(f"{error}; --tracking-uri names another store, or `none`") from error


def _local(uris: Iterable[str]) -> list[str]:
    return [uri for uri in uris if "://" not in uri]
