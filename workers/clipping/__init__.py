"""Clipping methods, one file each, behind one protocol."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from accounting.mechanism import Release, SideQuery
from accounting.registry import build
from workers.clipping.automatic import AutomaticClipping
from workers.clipping.bounds import PrivateMedian, released_bound
from workers.clipping.dpsgd_f import DPSGDFClipping
from workers.clipping.flat import FlatClipping
from workers.clipping.global_ import GlobalAdaptiveClipping, GlobalClipping
from workers.clipping.individual import IndividualClipping
from workers.clipping.naive import NaiveReweighting
from workers.clipping.none import NoClipping
from workers.clipping.per_layer import PerLayerClipping
from workers.clipping.protocol import BatchQuery, ClippingMethod, ClippingState, ClipRule, Examples, Setting
from workers.clipping.quantile import QuantileClipping
from workers.spec import Component

__all__ = [
    "CLIPPING",
    "BatchQuery",
    "ClipRule",
    "ClippingMethod",
    "ClippingState",
    "Examples",
    "PrivateMedian",
    "Setting",
    "make_clipping",
    "released_bound",
    "releases",
    "side_queries",
]

CLIPPING: Final[Mapping[str, Callable[..., ClippingMethod]]] = {
    "none": NoClipping,
    "flat": FlatClipping,
    "per_layer": PerLayerClipping,
    "automatic": AutomaticClipping,
    "quantile": QuantileClipping,
    "dpsgd_f": DPSGDFClipping,
    "naive": NaiveReweighting,
    "individual": IndividualClipping,
    "global": GlobalClipping,
    "global_adaptive": GlobalAdaptiveClipping,
}


def make_clipping(component: Component) -> ClippingMethod:
    """The clipping method a trial names, or `InvalidInput` naming the nearest valid name or key."""
    return build(CLIPPING, component.name, component.params, "clipping method")


def side_queries(component: Component) -> tuple[SideQuery, ...]:
    """What a method asks of every batch beside the gradient: known without data, for planners."""
    query = make_clipping(component).query
    return () if query is None else (query.as_side_query(),)


def releases(component: Component) -> tuple[Release, ...]:
    """What a method releases once before training (the median norm of its initial bound), for planners."""
    bound = make_clipping(component).bound
    return (bound.release,) if isinstance(bound, PrivateMedian) else ()
