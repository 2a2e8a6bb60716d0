"""The one form in which a trace is stored: plain values, each part of a closed sum with the name of its kind.

`dpsweep.accounting.records.traces` keeps them as an Arrow file, results and attempts inside their JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from typing import Any, Final

from dpsweep.accounting.mechanism.filters import FILTERS
from dpsweep.accounting.mechanism.noise_strategies import INDEPENDENT, STRATEGIES
from dpsweep.accounting.mechanism.random_trials import ExponentialChoice, RandomTrials
from dpsweep.accounting.mechanism.samplings import Sampling, stored_kinds
from dpsweep.accounting.mechanism.trace import (
    GaussianRelease,
    PureRelease,
    Release,
    Segment,
    Selection,
    SideQuery,
    Trace,
    require_supported,
)
from dpsweep.accounting.mechanism.units import EXAMPLE, Example, Unit, User

_RELEASES: Final[Mapping[str, type[Release]]] = {"gaussian": GaussianRelease, "pure": PureRelease}
_UNITS: Final[Mapping[str, type[Unit]]] = {Example.name: Example, User.name: User}
_SELECTIONS: Final[Mapping[str, type[Selection]]] = {"random": RandomTrials, "exponential": ExponentialChoice}


def to_plain(trace: Trace) -> dict[str, Any]:
    """Return the trace as numbers, texts, lists and mappings, without the facts that most runs do not have.

    Raises: UnsupportedMechanism for a mechanism that no reader would know.
    """
    require_supported(trace)
    samplings, of_segment = _samplings(), [field.name for field in fields(Segment)]
    return {
        "dataset_size": trace.dataset_size,
        "adjacency": trace.adjacency,
        "contributions": trace.contributions,
        "noise_follows_results": trace.noise_follows_results,
        **({"ended_by_results": True} if trace.ended_by_results else {}),
        **({"filter": _kind_of(trace.filter, FILTERS)} if trace.filter else {}),
        **({"selection": _kind_of(trace.selection, _SELECTIONS)} if trace.selection else {}),
        **({"strategy": _kind_of(trace.strategy, STRATEGIES)} if trace.strategy != INDEPENDENT else {}),
        **({"unit": _kind_of(trace.unit, _UNITS)} if trace.unit != EXAMPLE else {}),
        "releases": [_kind_of(release, _RELEASES) for release in trace.releases],
        "segments": [
            {
                **{name: getattr(segment, name) for name in of_segment},
                "sampling": _kind_of(segment.sampling, samplings),
                "side_queries": [asdict(query) for query in segment.side_queries],
            }
            for segment in trace.segments
        ],
    }


def of_plain(plain: Mapping[str, Any]) -> Trace:
    """Return the trace from which `to_plain` has made these values.

    Raises: KeyError, TypeError, ValueError or AttributeError for values of another form, among them unknown kinds;
    DpsweepError for an impossible run.
    """
    run, samplings = dict(plain), _samplings()
    limit, selection, strategy, unit = (run.pop(name, None) for name in ("filter", "selection", "strategy", "unit"))
    return Trace(
        segments=tuple(_segment(segment, samplings) for segment in run.pop("segments")),
        releases=tuple(_built(release, _RELEASES) for release in run.pop("releases")),
        filter=None if limit is None else _built(limit, FILTERS),
        selection=None if selection is None else _built(selection, _SELECTIONS),
        strategy=INDEPENDENT if strategy is None else _built(strategy, STRATEGIES),
        unit=EXAMPLE if unit is None else _built(unit, _UNITS),
        **run,
    )


def _samplings() -> Mapping[str, type[Sampling]]:
    return {kind.stored_name: kind for kind in stored_kinds()}


def _segment(plain: Mapping[str, Any], samplings: Mapping[str, type[Sampling]]) -> Segment:
    queries = tuple(SideQuery(**query) for query in plain["side_queries"])
    return Segment(**{**plain, "sampling": _built(plain["sampling"], samplings), "side_queries": queries})


def _kind_of(part: Any, kinds: Mapping[str, Callable[..., Any]]) -> dict[str, Any]:
    """Return the name of the part's kind, and its fields."""
    return {"kind": next(name for name, kind in kinds.items() if kind is type(part)), **asdict(part)}


def _built(plain: Mapping[str, Any], kinds: Mapping[str, Callable[..., Any]]) -> Any:
    fields = dict(plain)
    return kinds[fields.pop("kind")](**fields)
