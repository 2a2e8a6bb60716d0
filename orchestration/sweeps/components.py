"""Registries of the components that a sweep file may name, and the types of their parameters. Loads torch."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any, Final, get_type_hints

from dpsweep.accounting.mechanism.schedules import NOISES
from dpsweep.orchestration.store.release_modes import RELEASE_MODES
from dpsweep.workers.clipping import CLIPPING
from dpsweep.workers.data import SOURCES
from dpsweep.workers.models import MODELS
from dpsweep.workers.spec import Component
from dpsweep.workers.tasks.losses import LOSSES
from dpsweep.workers.training.augmentation import AUGMENTATIONS
from dpsweep.workers.training.optimizers import AVERAGES, LEARNING_RATE_SCHEDULES, OPTIMIZERS
from dpsweep.workers.training.preprocessing import PREPROCESSING

COMPONENTS: Final[Mapping[str, Mapping[str, Callable[..., object]]]] = {
    "data": SOURCES,
    "model": MODELS,
    "preprocessing": PREPROCESSING,
    "loss": LOSSES,
    "optimizer": OPTIMIZERS,
    "learning_rate_schedule": LEARNING_RATE_SCHEDULES,
    "augmentation": AUGMENTATIONS,
    "averaging": AVERAGES,
    "clipping": CLIPPING,
    "noise": NOISES,
    "release": {name: mode.release for name, mode in RELEASE_MODES.items()},
}
"""Registry of components by key of the sweep file."""

_GIVEN: Final = {
    *("feature_shape", "num_classes", "parameters", "total_steps", "steps_per_epoch"),
    *("initial_noise_multiplier", "steps", "apart"),
}
"""Arguments that the trial passes to a component, so a sweep file cannot give them."""


def parameters_of(make: Callable[..., object]) -> Iterator[inspect.Parameter]:
    """Yield the parameters of a component's factory that a sweep file may give."""
    for parameter in inspect.signature(make).parameters.values():
        is_named = parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if is_named and parameter.name not in _GIVEN:
            yield parameter


def without_defaults(axis: str, value: object) -> object:
    """Return a component without the parameters that have their default; any other value of an axis as it is."""
    key = "noise" if axis == "schedule" else axis
    if not isinstance(value, Component) or value.name not in COMPONENTS.get(key, {}):
        return value
    usual = {parameter.name: parameter.default for parameter in parameters_of(COMPONENTS[key][value.name])}
    return Component(value.name, {name: each for name, each in value.params.items() if usual.get(name, _NONE) != each})


_NONE: Final = object()


@functools.cache
def types_of(key: str, name: str) -> Mapping[str, Any]:
    """Return the type of each parameter of the component ``name`` that a sweep file may give; empty for an unknown
    one.
    """
    make = COMPONENTS[key].get(name)
    if make is None:
        return {}
    plain = inspect.unwrap(make)
    hints = _hints_of_class(plain) if inspect.isclass(plain) else get_type_hints(plain, include_extras=True)
    return {parameter.name: hints[parameter.name] for parameter in parameters_of(make)}


def _hints_of_class(cls: type[Any]) -> Mapping[str, Any]:
    """Types of a dataclass's fields, or of the arguments of any other class."""
    if is_dataclass(cls):
        return get_type_hints(cls, include_extras=True)
    return get_type_hints(cls.__init__, include_extras=True)
