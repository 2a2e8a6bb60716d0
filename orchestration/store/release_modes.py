"""Release modes (``release`` in a sweep file): what leaves ``private/`` of statistics of examples, and of error texts.

To add a mode, add one entry to `RELEASE_MODES`; plans, trials, errors, the report and MLflow read that table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator

from dpsweep.accounting.errors import StorageError, full_text, private_text, public_text
from dpsweep.accounting.jobs.release import ReleaseSpec
from dpsweep.accounting.records.sealed import write_private
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.accounting.registry import build, lookup


@dataclass(frozen=True)
class ReleaseMode:
    """How statistics of the training examples' epsilons are shown.

    `statistics`: ``released`` with differential privacy, ``exact``, or None if withheld.
    `release`: builds the release from the mode's parameters; returns None if nothing is released.
    `error_text`: returns the part of an error's text that is shown.
    `origin`: how the statistics were obtained, in words.
    `missing`: text of the report in place of absent statistics.
    """

    statistics: Literal["released", "exact"] | None
    release: Callable[..., ReleaseSpec | None]
    error_text: Callable[[BaseException], str]
    origin: str
    missing: str

    @property
    def is_sensitive(self) -> bool:
        """Return whether the mode shows statistics that no differential privacy guarantee covers."""
        return self.statistics == "exact"


def _nothing() -> None:
    """Release of a mode that has no mechanism and takes no parameters."""


RELEASE_MODES: Final[Mapping[str, ReleaseMode]] = {
    "none": ReleaseMode(
        statistics=None,
        release=_nothing,
        error_text=public_text,
        origin="withheld",
        missing="Withheld. The epsilons of training examples depend on their gradients, so even an average over a "
        "group of them is private data. The owner of the data finds the exact numbers in private/report.html beside "
        "this page. To show them here, write “release: private” in the sweep (statistics with calibrated noise, their "
        "cost inside the target) or “release: raw” (exact; the report and its MLflow runs become sensitive), and run "
        "it again.",
    ),
    "private": ReleaseMode(
        statistics="released",
        release=ReleaseSpec,
        error_text=public_text,
        origin="released with differential privacy",
        missing="Not released. No finished trial of this sweep published these statistics.",
    ),
    "raw": ReleaseMode(
        statistics="exact",
        release=_nothing,
        error_text=full_text,
        origin="exact",
        missing="Not available. No finished trial of this sweep has these statistics.",
    ),
}
RELEASED: Final = "private"
"""The mode whose statistics are released with noise."""
EXACT: Final = "raw"
"""The mode of exact statistics; the owner's private report always uses it."""


def release_mode(name: str) -> ReleaseMode:
    """Return the mode called ``name``. Raises: InvalidInput naming the nearest valid one.

    >>> release_mode("raw").is_sensitive, release_mode("private").is_sensitive
    (True, False)
    """
    return lookup(RELEASE_MODES, name, "release")


def release_spec(name: str, params: Mapping[str, Any]) -> ReleaseSpec | None:
    """Return the DP release of the mode called ``name``; None for modes without one (``none``, ``raw``).

    Raises: InvalidInput for an unknown mode, an unknown parameter or a value out of range.
    """
    factories = {each: mode.release for each, mode in RELEASE_MODES.items()}
    return build(factories, name, params, "release")


def _known(name: str) -> str:
    release_mode(name)
    return name


Disclosure = Annotated[str, AfterValidator(_known)]
"""The name of a release mode."""


def shown_error(error: BaseException, disclosure: Disclosure) -> str:
    """Return the text of a caught error as shown in reports, in MLflow, on the terminal and in Tune's state."""
    return release_mode(disclosure).error_text(error)


def record_failure(error: BaseException, files: TrialFiles, disclosure: Disclosure) -> str:
    """Return the publishable text of the error that ended a trial; write the withheld rest to ``files.error``."""
    text, hidden = shown_error(error, disclosure), private_text(error)
    if hidden is None:
        return text
    try:
        write_private(files.error, hidden.encode())
    except StorageError:
        return text  # if the disk is full, ``error`` most likely says so already
    return f"{text}; see {files.error.removeprefix(files.root.rstrip('/') + '/')} in the trial's folder"
