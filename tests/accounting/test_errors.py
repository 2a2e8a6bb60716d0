"""Errors and their causes."""

from __future__ import annotations

from dpsweep.accounting.errors import InvalidInput, private_text, without_locals


def test_an_error_that_is_its_own_cause_ends() -> None:
    """``raise error from error`` within a handler of that error makes one."""
    try:
        raise InvalidInput("wrong")
    except InvalidInput as error:
        error.__cause__ = error
        found = error
    assert without_locals(found) is found
    assert "wrong" in str(private_text(found))
