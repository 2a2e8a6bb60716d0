"""Check that an object store answers and that its packages are installed, before anything is written to it."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from urllib.parse import urlsplit

from pyarrow import fs

from accounting.errors import InvalidInput

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


_TIMEOUT = 5.0
"""Seconds to wait for an object store to take a connection; pyarrow itself tries for up to a minute."""


def require_answer(uri: str) -> None:
    """Refuse an output in an S3 store that cannot be reached; other stores and refusals show when files are read.

    Raises: InvalidInput with the address and the reason.
    """
    parts = urlsplit(uri)
    if parts.scheme != "s3":
        return
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    place = urlsplit(endpoint)
    store = fs.S3FileSystem(
        connect_timeout=_TIMEOUT,
        request_timeout=_TIMEOUT,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=1),
        endpoint_override=place.netloc or None,
        scheme=place.scheme or None,
    )
    try:
        store.get_file_info(parts.netloc)
    except OSError as error:
        if "NETWORK_CONNECTION" not in str(error):  # such as a refusal to list the bucket, which nothing here needs
            return
        raise InvalidInput(
            f"{uri}: no object store answers at {endpoint or 'Amazon S3'} ({str(error).rpartition('Details: ')[2]}); "
            "check the network, the bucket's name and AWS_ENDPOINT_URL"
        ) from error


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a package above it is missing
        return False
