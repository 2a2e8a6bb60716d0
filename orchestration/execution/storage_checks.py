"""Check the sweep's storage before any trial starts, and wait for it where it fails later."""

from __future__ import annotations

import functools
import importlib.util
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Self, TypeVar

from dpsweep.accounting.errors import InvalidInput, StorageError, UnfitNode
from dpsweep.accounting.jobs.examples import Part, PartwiseJob, Result
from dpsweep.accounting.records.files import exists, is_local, open_filesystem, read_bytes, write_bytes_atomically
from dpsweep.orchestration.comparison.formats import reason_of
from dpsweep.orchestration.execution.versions import SAME, differences, versions_here
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.sweeps.planned import Plan, PlannedTrial
from dpsweep.workers.own_code.imports import UserCode
from dpsweep.workers.training.history import Progress

REPORTS_AND_TRACKING = 64 * 2**20
"""Bytes reserved for the two reports, MLflow and logs; the quickstart sweep needs about half of this."""
MODELS_AND_CHECKPOINTS = 4 * 2**20
"""Bytes reserved per trial for a small model and its checkpoints, in addition to norm shards."""


def require_space(files: SweepFiles, plan: Plan) -> None:
    """Refuse a sweep whose remaining trials do not fit on the disk of its folder; object stores are not checked.

    Shards are counted at their size before compression, an upper bound; the rest is a rough estimate.
    Raises: InvalidInput with the needed and the free space, and what to do.
    """
    if "://" in files.root:
        return
    pending = [trial for trial in plan.trials if not exists(files.trial(trial.key).result)]
    if not pending:
        return
    needed = REPORTS_AND_TRACKING + sum(MODELS_AND_CHECKPOINTS + trial.shard_bytes for trial in pending)
    folder = Path(files.root)
    free = shutil.disk_usage(next(parent for parent in (folder, *folder.parents) if parent.exists())).free
    if free < needed:
        raise InvalidInput(
            f"{files.root} has {free / 2**20:.0f} MiB free, but the sweep may write {needed / 2**20:.0f} MiB; free "
            "some space, choose another --output, or refresh norms less often (norms.refreshes_per_epoch)"
        )


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


Answer = TypeVar("Answer")
PAUSES = (2.0, 6.0, 15.0, 25.0, 30.0)
"""Seconds to wait before each retry after a storage error; in total longer than most outages of object stores."""


def train_patiently(planned: PlannedTrial, root: str, code: UserCode, report: Callable[[Progress], None]) -> None:
    """Train one trial in this process, with retries while the object store of its folder fails; see `patiently`.

    A retry continues from the last checkpoint, and reports the epochs since then again.
    """
    from dpsweep.workers.trials.trial import run_trial  # late: it imports torch, and drivers import this module

    def train() -> object:
        digest = planned.data_digest
        return run_trial(
            planned.spec, root, code=code, releases=planned.releases, on_progress=report, data_digest=digest
        )

    patiently(root, train)


def patiently(root: str, work: Callable[[], Answer]) -> Answer:
    """Return ``work()``, which uses ``root``; it is called again after each of `PAUSES` while an object store fails.

    A local disk is not retried: an error means that it is full. Raises: StorageError if the storage still fails after
    the last retry, and any other error of ``work``.
    """
    for pause in PAUSES if "://" in root else ():
        try:
            return work()
        except StorageError:
            time.sleep(pause)
    return work()


SHARED = "choose an --output that every node shares, such as s3:// or NFS"
"""The next step about storage that a node does not share."""


@dataclass(frozen=True)
class Probe:
    """A file that the driver wrote, its random content, and the driver's versions."""

    uri: str
    content: bytes
    versions: Mapping[str, str] = field(default_factory=versions_here, compare=False)

    @classmethod
    def written(cls, uri: str) -> Self:
        """Write a new one. Raises: InvalidInput if it cannot be written."""
        probe = cls(uri, secrets.token_bytes(16))
        try:
            write_bytes_atomically(uri, probe.content)
        except StorageError as error:
            raise InvalidInput(str(error)) from error
        return probe

    def obstacle(self) -> str:
        """Return why this process does not read the content back, in one line; "" if it does."""
        try:
            self._require_content()
        except FileNotFoundError:
            return "it is not there"
        except (OSError, StorageError) as error:
            return reason_of(error)
        return ""

    def require(self) -> None:
        """Raise `UnfitNode`, naming this node, unless this process reads the content back and has the same versions.

        A link that is down for a while is waited for, as object stores are.
        """
        if others := differences(self.versions, versions_here()):
            raise UnfitNode(f"node {socket.gethostname()}, which joined later, has {others}; {SAME}", _this_node())
        try:
            patiently(self.uri, self._require_content)
        except (OSError, StorageError) as error:
            raise UnfitNode(
                f"{self.uri} was written by the driver but cannot be read on node {socket.gethostname()}, which joined "
                f"later: {error}; {SHARED}",
                _this_node(),
            ) from error

    def _require_content(self) -> None:
        if read_bytes(self.uri) != self.content:
            raise OSError("it has other content there")


@dataclass(frozen=True)
class OnSharedStorage(Generic[Part, Result]):
    """A job whose parts run only in processes that share the sweep's storage and versions, proven once in each."""

    job: PartwiseJob[Part, Result]
    probe: Probe

    @property
    def root(self) -> str:
        return self.job.root

    def account(self, part: Part) -> Result:
        """As `PartwiseJob.account`. Raises: UnfitNode, naming this node, if it does not share the storage."""
        _prove_once(self.probe)
        return self.job.account(part)


@functools.lru_cache(maxsize=16)
def _prove_once(probe: Probe) -> None:
    probe.require()  # an error is not cached


def _this_node() -> str:
    """Return the id that Ray gives this process's node; "" without Ray."""
    import ray  # late, because training without Ray does not load it

    return str(ray.get_runtime_context().get_node_id()) if ray.is_initialized() else ""
