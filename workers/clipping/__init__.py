"""Clipping methods: each bounds the contribution of one example to the sum of gradients, and states the sensitivity."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from dpsweep.workers.clipping.by_example import FilterClipping, IndividualClipping
from dpsweep.workers.clipping.by_group import DPSGDFClipping, NaiveReweighting
from dpsweep.workers.clipping.by_norm import (
    AutomaticClipping,
    FlatClipping,
    GlobalAdaptiveClipping,
    GlobalClipping,
    NoClipping,
    PerLayerClipping,
    QuantileClipping,
)
from dpsweep.workers.clipping.clipping_method import (
    NORM_ERROR,
    BatchQuery,
    ClippingMethod,
    ClippingState,
    ClipRule,
    ExampleBudget,
    Examples,
    PrivateMedian,
    PublicFacts,
    released_bound,
)
from dpsweep.workers.clipping.own import own_clipping, rehearse
from dpsweep.workers.own_code.imports import NO_CODE, UserCode, build_named, is_import_path
from dpsweep.workers.spec import Component

__all__ = [
    "CLIPPING",
    "NORM_ERROR",
    "BatchQuery",
    "ClipRule",
    "ClippingMethod",
    "ClippingState",
    "ExampleBudget",
    "Examples",
    "PrivateMedian",
    "PublicFacts",
    "claims",
    "make_clipping",
    "own_clipping",
    "rehearse",
    "released_bound",
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
    "filter": FilterClipping,
    "global": GlobalClipping,
    "global_adaptive": GlobalAdaptiveClipping,
}


def make_clipping(component: Component, code: UserCode = NO_CODE) -> ClippingMethod:
    """Return the clipping method that a trial names: registered, or ``module:function(**params)`` from the user's
    ``code``.

    Raises: InvalidInput for unknown names, keys and impossible values, and when the user's function does not return a
    `ClippingMethod`.
    """
    name = component.name
    method = build_named(CLIPPING, name, component.params, "clipping method", code)
    return method if name in CLIPPING else own_clipping(name, method)


def claims(component: Component) -> tuple[str, ...]:
    """Return notes for readers of the results that the sensitivity is not proved; none for registered methods."""
    if not is_import_path(component.name):
        return ()
    return (
        f"clipping by {component.name}, the user's own: every epsilon rests on the sensitivity that it states, which "
        "was checked on the examples of this run, but is not proved",
    )
