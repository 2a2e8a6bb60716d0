"""What the text of an error leaves out."""

from __future__ import annotations

from dpsweep.accounting.errors import DpsweepError, full_text


def assert_private(error: DpsweepError, detail: str) -> None:
    """``detail`` is in a cause of the error, and not in its own text."""
    assert detail not in str(error)
    assert detail in full_text(error)
