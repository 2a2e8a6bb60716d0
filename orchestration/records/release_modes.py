"""The release modes: what of the training examples' statistics leaves ``private/``, as ``release`` of a sweep says.

A new mode is one entry of `RELEASE_MODES`, which plans, trials, errors, the report and MLflow read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator

from accounting.errors import full_text, public_text
from accounting.registry import build, lookup
from accounting.release import ReleaseSpec


@dataclass(frozen=True)
class ReleaseMode:
    """How statistics of the training examples' epsilons are shown.

    statistics: ``released`` with differential privacy, ``exact``, or None where they are withheld.
    release: from the parameters of the mode to the mechanisms of a release; None where nothing is released.
    error_text: what is shown of an error. origin: how shown statistics came to be, in words.
    missing: what the report says where it has no statistics.
    """

    statistics: Literal["released", "exact"] | None
    release: Callable[..., ReleaseSpec | None]
    error_text: Callable[[BaseException], str]
    origin: str
    missing: str

    @property
    def is_sensitive(self) -> bool:
        """Whether what is shown is covered by no differential-privacy guarantee."""
        return self.statistics == "exact"


def _nothing() -> None:
    """No mechanism, and no parameters."""


RELEASE_MODES: Final[Mapping[str, ReleaseMode]] = {
    "none": ReleaseMode(
        statistics=None,
        release=_nothing,
        error_text=public_text,
        origin="withheld",
        missing="Withheld. What training examples paid follows from their gradients, so even an average over a group "
        "of them is private data. The owner of the data finds the exact numbers in private/report.html beside this "
        "page. To show them here, write “release: private” in the sweep (statistics with calibrated noise, their cost "
        "inside the target) or “release: raw” (exact; the report and its MLflow runs become sensitive), and run it "
        "again.",
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
"""The mode whose statistics carry the noise of a release."""
EXACT: Final = "raw"
"""The mode of exact statistics, which the owner's own report shows whatever the sweep says."""


def release_mode(name: str) -> ReleaseMode:
    """The mode called ``name``, or `InvalidInput` naming the nearest valid one."""
    return lookup(RELEASE_MODES, name, "release")


def release_spec(name: str, params: Mapping[str, Any]) -> ReleaseSpec | None:
    """How statistics of the training examples' epsilons are released; None where none are, or exact ones."""
    factories = {each: mode.release for each, mode in RELEASE_MODES.items()}
    return build(factories, name, params, "release")


def _known(name: str) -> str:
    release_mode(name)
    return name


Disclosure = Annotated[str, AfterValidator(_known)]
"""The name of a release mode."""
