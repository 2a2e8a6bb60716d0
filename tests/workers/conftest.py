"""What all tests of training share."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def without_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that dies leaves what it wrote; outliving a power cut too would take most of a small trial's time."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
