"""Traces inside JSON files, for stopped trials and for attempts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import PlainSerializer, PlainValidator

from dpsweep.accounting.errors import DpsweepError
from dpsweep.accounting.mechanism.estimates import without_guarantee
from dpsweep.accounting.mechanism.plain import of_plain, to_plain
from dpsweep.accounting.mechanism.trace import Trace


def _trace(stored: Trace | Mapping[str, Any]) -> Trace:
    """Return the stored trace. Raises: ValueError if there is none.

    Training never fixes contributions in advance, so contributions that claim a guarantee become output-specific.
    """
    if isinstance(stored, Trace):
        return stored
    try:
        return of_plain({**stored, "contributions": without_guarantee(stored["contributions"])})
    except (LookupError, TypeError, AttributeError, RuntimeError, DpsweepError) as error:
        raise ValueError(f"no trace of a run ({error})") from error


StoredTrace = Annotated[Trace, PlainValidator(_trace), PlainSerializer(to_plain)]
"""A trace inside a JSON file."""
