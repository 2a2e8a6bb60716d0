"""The types of fields of a sweep file, and the base class of its sections."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from typing import Annotated, Any, Final, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.registry import nearest
from dpsweep.orchestration.sweeps.text import shortly
from dpsweep.workers.spec import (
    AttackSpec,
    AuditSpec,
    BudgetSpec,
    Component,
    DataSpec,
    ExecutionSpec,
    NormSpec,
    SamplingSpec,
)

T = TypeVar("T")

NO_KEY: Final = "part"
"""Field of `DataSpec` that only tuning sets; in a sweep file, a key of this name is a parameter of the data source."""


def _check_keys(mapping: Mapping[Any, Any], valid: Collection[str]) -> None:
    for key in mapping:
        if key not in valid:
            raise InvalidInput(f"unknown key {str(key)!r}; {nearest(str(key), valid)}")


def _component(value: object) -> Component:
    """Read ``flat`` or ``{name: flat, bound: 1.0}``; parameters are checked later, when the component is built."""
    match value:
        case Component():
            return value
        case str():
            return Component(value)
        case {"name": str(name), **params}:
            return Component(name, {str(key): param for key, param in params.items()})
    raise InvalidInput(f"expected a name, or a mapping with a name and parameters, but got {shortly(value)}")


def _data(value: object) -> object:
    """Read a data source: keys that are not fields of `DataSpec` are parameters of the source."""
    component = _component(value)
    cuts = {field.name for field in fields(DataSpec)} - {"name", "params", NO_KEY}
    for key in component.params:
        if key not in cuts and difflib.get_close_matches(key, cuts, n=1, cutoff=0.8):
            raise InvalidInput(f"unknown key {key!r}; {nearest(key, cuts)}, and the parameters of the source")
    chosen = {key: param for key, param in component.params.items() if key in cuts}
    params = {key: param for key, param in component.params.items() if key not in cuts}
    return {"name": component.name, "params": params, **chosen}


def _known_keys_of(dataclass_type: type[Any]) -> Callable[[object], object]:
    valid = [field.name for field in fields(dataclass_type)]

    def check(value: object) -> object:
        if isinstance(value, Mapping):
            _check_keys(value, valid)
        return value

    return check


def _norms(value: object) -> object:
    """Read the section ``norms``; ``off`` is short for ``{refreshes_per_epoch: off}``."""
    return NormSpec("off") if value == "off" else _known_keys_of(NormSpec)(value)


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _as_groups(value: object) -> object:
    """Read the groups of ``zip`` as tuples; a single list of names is one group."""
    if not isinstance(value, list):
        return value
    groups = [value] if all(isinstance(name, str) for name in value) else value
    return tuple(tuple(group) if isinstance(group, list) else group for group in groups)


LEAST_QUANTITY = 1e-4
"""Smallest amount of a resource; Ray counts resources in multiples of it."""


def _quantity(value: float) -> float:
    """Refuse positive amounts below `LEAST_QUANTITY`."""
    if 0.0 < value < LEAST_QUANTITY:
        raise InvalidInput(f"{value} is less than 0.0001, the least that Ray reserves; give more, or 0 where it may be")
    return value


def whole_or_share(value: float) -> float:
    """Refuse fractions above 1: Ray can share one GPU among trials, but reserves several only as a whole number."""
    if value > 1.0 and not value.is_integer():
        raise InvalidInput(f"{value} GPUs cannot be reserved; give a fraction of one, or a whole number of them")
    return value


Named = Annotated[Component, BeforeValidator(_component)]
Several = Annotated[tuple[T, ...], BeforeValidator(_as_tuple)]
Axis = Annotated[Several[T], Field(min_length=1)]
Quantity = Annotated[float, AfterValidator(_quantity)]
Data = Annotated[DataSpec, BeforeValidator(_data)]
Pairs = Annotated[tuple[tuple[str, ...], ...], BeforeValidator(_as_groups), Field(min_length=1)]
Sampling = Annotated[SamplingSpec, BeforeValidator(_known_keys_of(SamplingSpec))]
Budget = Annotated[BudgetSpec, BeforeValidator(_known_keys_of(BudgetSpec))]
Norms = Annotated[NormSpec, BeforeValidator(_norms)]
Attacks = Annotated[AttackSpec, BeforeValidator(_known_keys_of(AttackSpec))]
Audit = Annotated[AuditSpec, BeforeValidator(_known_keys_of(AuditSpec))]
Execution = Annotated[ExecutionSpec, BeforeValidator(_known_keys_of(ExecutionSpec))]


class SweepSection(BaseModel):
    """Base class of sweep file sections: frozen; an unknown key is an error that names the nearest valid key."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, value: object) -> object:
        if isinstance(value, Mapping):
            _check_keys(value, cls.model_fields)
        return value
