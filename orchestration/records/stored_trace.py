"""Traces inside JSON files, for stopped trials and for attempts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any, get_args

from pydantic import PlainSerializer, PlainValidator

from dpsweep.accounting.errors import DpsweepError
from dpsweep.accounting.mechanism.estimates import without_guarantee
from dpsweep.accounting.mechanism.filters import FILTERS
from dpsweep.accounting.mechanism.noise_strategies import INDEPENDENT, plain_strategy, strategy_of
from dpsweep.accounting.mechanism.samplings import stored_kinds
from dpsweep.accounting.mechanism.trace import GaussianRelease, PureRelease, Segment, Selection, SideQuery, Trace
from dpsweep.accounting.mechanism.units import EXAMPLE, Unit
from dpsweep.accounting.registry import with_fields


def _trace(plain: Trace | Mapping[str, Any]) -> Trace:
    """Rebuild the trace from its `dataclasses.asdict` form. Raises: ValueError if that fails.

    Training never fixes contributions in advance, so contributions that claim a guarantee become output-specific.
    """
    if isinstance(plain, Trace):
        return plain
    try:
        segments = (
            Segment(
                **{
                    **row,
                    "sampling": with_fields(stored_kinds(), row["sampling"]),
                    "side_queries": tuple(SideQuery(**query) for query in row["side_queries"]),
                }
            )
            for row in plain["segments"]
        )
        releases = (with_fields((GaussianRelease, PureRelease), row) for row in plain["releases"])
        limit, selection, strategy = plain.get("filter"), plain.get("selection"), plain.get("strategy")
        kept = {
            **plain,
            "contributions": without_guarantee(plain["contributions"]),
            "filter": None if limit is None else with_fields(FILTERS.values(), limit),
            "selection": None if selection is None else with_fields(get_args(Selection), selection),
            "strategy": INDEPENDENT if strategy is None else strategy_of(strategy),
            "unit": Unit(**plain["unit"]) if "unit" in plain else EXAMPLE,
        }
        return Trace(**{**kept, "segments": tuple(segments), "releases": tuple(releases)})
    except (LookupError, TypeError, RuntimeError, DpsweepError) as error:
        raise ValueError(f"no trace of a run ({error})") from error


def _plain(trace: Trace) -> dict[str, Any]:
    """Return the fields of the trace. A noise strategy has its name and fields there only if noise is correlated, and a
    unit only if it is not the example.
    """
    fields = asdict(trace)
    del fields["strategy"]
    if trace.unit == EXAMPLE:
        del fields["unit"]
    return fields if trace.strategy == INDEPENDENT else {**fields, "strategy": plain_strategy(trace.strategy)}


StoredTrace = Annotated[Trace, PlainValidator(_trace), PlainSerializer(_plain)]
"""A trace inside a JSON file."""
