"""Check that an object store answers and that its packages are installed, before anything is written to it."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

from accounting.errors import InvalidInput, StorageError
from accounting.records import open_filesystem

_CLIENTS: Mapping[str, tuple[str, str]] = {
    "s3": ("boto3", "dpsweep[s3]"),
    "gs": ("google.cloud.storage", "dpsweep[gs]"),
}
"""By URI scheme: the module that MLflow needs to store figures and reports, and the extra that installs it. Files of
trials are written by pyarrow, which needs neither."""


def require_client(uri: str) -> None:
    """Refuse an output in an object store that MLflow cannot write artifacts to.

    Raises: InvalidInput with the missing package and the command that installs it.
    """
    scheme = uri.partition("://")[0] if "://" in uri else ""
    module, extra = _CLIENTS.get(scheme, ("", ""))
    if module and not _is_installed(module):
        raise InvalidInput(
            f"{uri}: MLflow writes figures and reports to {scheme}:// with the package {module}, which is not "
            f"installed; pip install '{extra}', or name an MLflow server with --tracking-uri"
        )


def require_answer(uri: str) -> None:
    """Refuse an output in a store that cannot be reached. Raises: InvalidInput with the address and the reason."""
    try:
        open_filesystem(uri)
    except StorageError as error:
        raise InvalidInput(str(error)) from error


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a package above it is missing
        return False
