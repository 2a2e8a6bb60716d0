"""Traces inside JSON files: those of trials that were stopped, and of attempts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from typing import Annotated, Any

from pydantic import PlainSerializer, PlainValidator

from accounting.errors import DpsweepError
from accounting.mechanism import GaussianRelease, PureRelease, Segment, SideQuery, Trace
from accounting.samplings import SAMPLINGS


def _trace(plain: Trace | Mapping[str, Any]) -> Trace:
    """The trace that `dataclasses.asdict` made ``plain``; ValueError where it is none."""
    if isinstance(plain, Trace):
        return plain
    try:
        segments = (
            Segment(
                **{
                    **row,
                    "sampling": _with_fields(SAMPLINGS.values(), row["sampling"]),
                    "side_queries": tuple(SideQuery(**query) for query in row["side_queries"]),
                }
            )
            for row in plain["segments"]
        )
        releases = (_with_fields((GaussianRelease, PureRelease), row) for row in plain["releases"])
        return Trace(**{**plain, "segments": tuple(segments), "releases": tuple(releases)})
    except (LookupError, TypeError, RuntimeError, DpsweepError) as error:
        raise ValueError(f"no trace of a run ({error})") from error


def _with_fields(kinds: Iterable[type[Any]], row: Mapping[str, Any]) -> Any:
    """The one of ``kinds`` whose fields are those of ``row``: no two kinds share theirs."""
    return next(kind(**row) for kind in kinds if {each.name for each in fields(kind)} == row.keys())


StoredTrace = Annotated[Trace, PlainSerializer(asdict), PlainValidator(_trace)]
"""A trace inside a JSON file."""
