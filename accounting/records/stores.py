"""Connects to the file systems that addresses name: local paths, ``s3://``, ``gs://``."""

from __future__ import annotations

import functools
import os
from typing import Final
from urllib.parse import urlsplit

import pyarrow as pa
from pyarrow import fs

from dpsweep.accounting.errors import InvalidInput, StorageError

_CONNECT_WITHIN: Final = 5.0
"""Seconds in which an object store takes a connection."""
_ANSWER_WITHIN: Final = 30.0
"""Seconds in which an object store answers the first request; pyarrow itself tries for two minutes."""
_OPTIONS: Final = {"s3": "?allow_delayed_open=true"}
"""Options of a file system by scheme: a file smaller than a part of an upload (10 MB) takes one request, not three."""


@functools.lru_cache(maxsize=32)
def connected(scheme: str, host: str) -> tuple[fs.FileSystem, str]:
    """Return the file system of ``scheme://host``, and the path of that host in it.

    One object for each is cached for the life of the process, because connecting is slow. Raises: InvalidInput for a
    scheme that pyarrow does not know; StorageError if a store does not answer, or the region of a bucket is not found.
    """
    uri = f"{scheme}://{host}/"
    if scheme == "s3":
        _require_answer(uri, host)
    try:
        filesystem, base = fs.FileSystem.from_uri(f"{uri}{_OPTIONS.get(scheme, '')}")
    except pa.ArrowInvalid as error:
        raise InvalidInput(f"cannot open {uri!r}: {error}; use a local path, s3:// or gs://") from error
    except OSError as error:
        raise StorageError(
            f"cannot reach {uri}: {error}; check the bucket's name, the network and the region"
        ) from error
    return filesystem, str(base)


def _require_answer(uri: str, bucket: str) -> None:
    """Raise `StorageError` unless an S3 store answers, whatever it says: refusals show when files are read."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    place = urlsplit(endpoint)
    store = fs.S3FileSystem(
        connect_timeout=_CONNECT_WITHIN,
        request_timeout=_ANSWER_WITHIN,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=1),
        endpoint_override=place.netloc or None,
        scheme=place.scheme or None,
    )
    try:
        store.get_file_info(bucket)
    except OSError as error:
        if "NETWORK_CONNECTION" not in str(error):
            return
        raise StorageError(
            f"{uri}: no object store answers at {endpoint or 'Amazon S3'} ({str(error).rpartition('Details: ')[2]}); "
            "check the network, the bucket's name and AWS_ENDPOINT_URL"
        ) from error
