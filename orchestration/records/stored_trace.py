"""Traces inside JSON files: those of trials that were stopped, and of attempts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from typing import Annotated, Any

from pydantic import PlainSerializer, PlainValidator

from accounting.errors import DpsweepError
from accounting.estimates import without_guarantee
from accounting.filters import FILTERS
from accounting.mechanism import GaussianRelease, PureRelease, Segment, SideQuery, Trace, selection_of
from accounting.samplings import stored_kinds


def _trace(plain: Trace | Mapping[str, Any]) -> Trace:
    """Rebuild the trace from its `dataclasses.asdict` form. Raises ValueError where that fails.

    Training never fixes contributions in advance: what an older version called a guarantee is output-specific.
    """
    if isinstance(plain, Trace):
        return plain
    try:
        segments = (
            Segment(
                **{
                    **row,
                    "sampling": _with_fields(stored_kinds(), row["sampling"]),
                    "side_queries": tuple(SideQuery(**query) for query in row["side_queries"]),
                }
            )
            for row in plain["segments"]
        )
        releases = (_with_fields((GaussianRelease, PureRelease), row) for row in plain["releases"])
        limit, selection = plain.get("filter"), plain.get("selection")
        kept = {
            **plain,
            "contributions": without_guarantee(plain["contributions"]),
            "filter": None if limit is None else _with_fields(FILTERS.values(), limit),
            "selection": None if selection is None else selection_of(selection),
        }
        return Trace(**{**kept, "segments": tuple(segments), "releases": tuple(releases)})
    except (LookupError, TypeError, RuntimeError, DpsweepError) as error:
        raise ValueError(f"no trace of a run ({error})") from error


def _with_fields(kinds: Iterable[type[Any]], row: Mapping[str, Any]) -> Any:
    """Build the class among ``kinds`` whose field names equal the keys of ``row``; no two classes have equal fields."""
    return next(kind(**row) for kind in kinds if {each.name for each in fields(kind)} == row.keys())


StoredTrace = Annotated[Trace, PlainSerializer(asdict), PlainValidator(_trace)]
"""A trace inside a JSON file."""
