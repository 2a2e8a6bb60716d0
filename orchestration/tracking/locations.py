"""Where MLflow keeps the files of runs and models, as a server names it."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Final
from urllib.parse import unquote, urlsplit

from dpsweep.orchestration.tracking.tracker import TrackingUnavailable

_ID: Final = re.compile(r"(m-)?[0-9a-f]{32}")
"""Id of a run, or of a logged model, as MLflow makes it."""
MOST_PAGES: Final = 1000
"""Most pages of an answer that are asked for; the runs of the largest sweep fill about a hundred."""


def require_location(uri: str, owner: str) -> None:
    """Check the location of the files of a run or model before MLflow's client writes there.

    A server may name a folder of this machine. It has to be one that MLflow made for this ``owner``, a run or a model,
    lest the server choose which files of this user are replaced. Raises: TrackingUnavailable.
    """
    parts = urlsplit(uri)
    if parts.scheme not in ("", "file"):
        return
    names = PurePosixPath(unquote(parts.path)).parts
    if not _ID.fullmatch(owner) or names[-2:] != (owner, "artifacts") or ".." in names:
        raise TrackingUnavailable(
            f"MLflow keeps the files of {owner} in {uri} on this machine, but there MLflow itself has only folders "
            "ID/artifacts, so nothing was written; look at what server it is, or start it with --serve-artifacts"
        )
