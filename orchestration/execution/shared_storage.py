"""The proof that a process shares the sweep's storage: it reads back what the driver wrote."""

from __future__ import annotations

import functools
import secrets
import socket
from dataclasses import dataclass
from typing import Generic, Self

from dpsweep.accounting.errors import InvalidInput, StorageError, UnfitNode
from dpsweep.accounting.jobs import Part, PartwiseJob, Result
from dpsweep.accounting.records import read_bytes, write_bytes_atomically
from dpsweep.orchestration.execution.storage_retries import patiently

SHARED = "choose an --output that every node shares, such as s3:// or NFS"
"""What to do about storage that a node does not share."""


@dataclass(frozen=True)
class Probe:
    """A file that the driver wrote, and its random content."""

    uri: str
    content: bytes

    @classmethod
    def written(cls, uri: str) -> Self:
        """Write a new one. Raises: InvalidInput if it cannot be written."""
        probe = cls(uri, secrets.token_bytes(16))
        try:
            write_bytes_atomically(uri, probe.content)
        except StorageError as error:
            raise InvalidInput(str(error)) from error
        return probe

    def is_read(self) -> bool:
        """Return whether this process reads the content back."""
        try:
            self._require_content()
        except (OSError, StorageError):
            return False
        return True

    def require(self) -> None:
        """Raise `UnfitNode`, naming this node, unless this process reads the content back.

        A link that is down for a while is waited for, as object stores are.
        """
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
    """A job whose parts run only in processes that share the sweep's storage; each process proves it once."""

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
