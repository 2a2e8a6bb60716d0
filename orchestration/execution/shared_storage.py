"""The proof that a process shares the sweep's storage: it reads back what the driver wrote."""

from __future__ import annotations

import secrets
import socket
from dataclasses import dataclass
from typing import Self

from accounting.errors import InvalidInput, StorageError
from accounting.records import read_bytes, write_bytes_atomically

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
        """Whether this process reads the content back."""
        try:
            return read_bytes(self.uri) == self.content
        except (OSError, StorageError):
            return False

    def require(self) -> None:
        """Raise `InvalidInput`, naming this node, unless this process reads the content back."""
        if not self.is_read():
            raise InvalidInput(
                f"{self.uri} was written by the driver but cannot be read on node {socket.gethostname()}, which joined "
                f"later; {SHARED}"
            )
