"""Check that an object store answers and that its packages are installed, before anything is written to it."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

from dpsweep.accounting.errors import InvalidInput, StorageError
from dpsweep.accounting.records import is_local, open_filesystem

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
    if is_local(uri):
        return
    try:
        open_filesystem(uri)
    except StorageError as error:
        raise InvalidInput(str(error)) from error


def abort_uploads(folder: str) -> None:
    """End the uploads below a folder of an S3 store that were cut off, such as that of a checkpoint with its key.

    A process that is killed while it stores a large file leaves the parts that it had sent: no object, but the store
    keeps them, and they can be completed. Google's stores drop them after a week. Nothing may be written meanwhile.
    Raises: InvalidInput without boto3, with the command to use instead; StorageError.
    """
    if not folder.startswith("s3://"):
        return
    bucket, _, path = folder.removeprefix("s3://").partition("/")
    prefix = f"{path.strip('/')}/" if path.strip("/") else ""  # a sweep may be a whole bucket
    if not _is_installed("boto3"):
        raise InvalidInput(
            f"{folder}: what was cut off while it was sent may still lie in the store, and is deleted with the package "
            "boto3, which is not installed; pip install 'dpsweep[s3]' and repeat the command"
        )
    import boto3
    from botocore.exceptions import BotoCoreError, ClientError

    client = boto3.client("s3")
    try:
        for page in client.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=prefix):
            for upload in page.get("Uploads", ()):
                client.abort_multipart_upload(Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])
    except (BotoCoreError, ClientError) as error:
        raise StorageError(
            f"{folder}: uploads that were cut off could not be ended ({error}); they may hold keys of noise: allow "
            "s3:ListBucketMultipartUploads and s3:AbortMultipartUpload, and repeat the command"
        ) from error


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a package above it is missing
        return False
