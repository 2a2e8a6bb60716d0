"""A sweep file: YAML -> `SweepSpec`, with one line per mistake. Pure: reads no data, starts nothing."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from accounting.errors import InvalidInput
from accounting.registry import nearest
from workers.spec import (
    BudgetSpec,
    Component,
    DataSpec,
    ExecutionSpec,
    NormSpec,
    SamplingSpec,
)

T = TypeVar("T")


def _check_keys(mapping: Mapping[Any, Any], valid: Collection[str]) -> None:
    for key in mapping:
        if key not in valid:
            raise InvalidInput(f"unknown key {str(key)!r}; {nearest(str(key), valid)}")


def _component(value: object) -> Component:
    """``flat`` or ``{name: flat, bound: 1.0}``; the parameters are checked where the component is built."""
    match value:
        case Component():
            return value
        case str():
            return Component(value)
        case {"name": str(name), **params}:
            return Component(name, {str(key): param for key, param in params.items()})
    raise InvalidInput(f"expected a name, or a mapping with a name and parameters, but got {value!r}")


def _data(value: object) -> DataSpec:
    """Keys that are not about cutting the data are parameters of the source."""
    component = value if isinstance(value, DataSpec) else _component(value)
    if isinstance(component, DataSpec):
        return component
    cuts = {field.name for field in fields(DataSpec)} - {"name", "params"}
    for key in component.params:
        if key not in cuts and difflib.get_close_matches(key, cuts, n=1, cutoff=0.8):
            raise InvalidInput(f"unknown key {key!r}; {nearest(key, cuts)}, and the parameters of the source")
    chosen = {key: param for key, param in component.params.items() if key in cuts}
    if "keep" in chosen:
        if not isinstance(chosen["keep"], Mapping):
            raise InvalidInput("keep needs a mapping from group to a fraction or a count, such as {8: 0.1}")
        chosen["keep"] = {str(group): amount for group, amount in chosen["keep"].items()}
    params = {key: param for key, param in component.params.items() if key not in cuts}
    return TypeAdapter(DataSpec).validate_python({"name": component.name, "params": params, **chosen})


def _known_keys_of(dataclass_type: type[Any]) -> Callable[[object], object]:
    valid = [field.name for field in fields(dataclass_type)]

    def check(value: object) -> object:
        if isinstance(value, Mapping):
            _check_keys(value, valid)
        return value

    return check


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _whole(value: object) -> object:
    """``true`` would pass as 1."""
    if isinstance(value, bool):
        raise InvalidInput(f"expected a whole number, but got {str(value).lower()}")
    return value


Named = Annotated[Component, BeforeValidator(_component)]
Axis = Annotated[tuple[T, ...], BeforeValidator(_as_tuple), Field(min_length=1)]


class Settings(BaseModel):
    """A section of a sweep file: frozen; an unknown key is an error that names the nearest valid one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, value: object) -> object:
        if isinstance(value, Mapping):
            _check_keys(value, cls.model_fields)
        return value


class PrivacySettings(Settings):
    """How private every private trial is: calibrated to a target, or with noise multipliers as given."""

    delta: float = Field(gt=0.0, lt=1.0)
    target_epsilon: Axis[Annotated[float, Field(gt=0.0)]] | None = None
    noise_multiplier: Axis[Annotated[float, Field(ge=0.0)]] | None = None
    budget: Annotated[BudgetSpec, BeforeValidator(_known_keys_of(BudgetSpec))] | None = None
    accountant: str = "auto"
    """The accountant that calibration meets the target with, and whose worst case the comparison shows."""

    @model_validator(mode="after")
    def _one_level(self) -> Self:
        if (self.target_epsilon is None) == (self.noise_multiplier is None):
            raise InvalidInput("give exactly one of target_epsilon (calibrated) and noise_multiplier (as given)")
        return self


class AccountingSettings(Settings):
    individual: Literal["rdp", "pld"] = "rdp"
    """Accountant of the per-example epsilons."""
    also: tuple[str, ...] = ()
    """Accountants reported beside privacy.accountant."""
    group_sizes: tuple[Annotated[int, Field(ge=1)], ...] = (1,)
    """Sizes of groups whose worst-case epsilon is reported."""
    actors: int = Field(default=2, ge=1)
    """How many accounting actors share the parts of a trial."""
    cpus: float = Field(default=0.0, ge=0.0)
    """CPUs that each of them reserves; 0 shares those of the trials that train."""


class SchedulerSettings(Settings):
    """fifo trains every trial to its end; asha stops trials on a metric, which is a selection that costs privacy."""

    name: Literal["fifo", "asha"] = "fifo"
    metric: Literal["public_accuracy", "test_accuracy"] = "public_accuracy"
    grace_epochs: int = Field(default=1, ge=1)
    reduction_factor: int = Field(default=3, ge=2)
    accept_unaccounted_selection: bool = False


class ResourceSettings(Settings):
    cpus: float = Field(default=1.0, gt=0.0)
    gpus: float = Field(default=0.0, ge=0.0)
    max_concurrent: int | None = Field(default=None, ge=1)
    max_failures: int = Field(default=3, ge=0)
    """How often a trial whose worker died is continued from its checkpoint."""


class BaselineSettings(Settings):
    """What the non-private trials use instead: without clipping, gradients are longer and want smaller steps."""

    optimizer: Named | None = None


class SweepSpec(Settings):
    """A whole sweep file. Fields typed ``Axis`` hold one value or a list of them."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    data: Axis[Annotated[DataSpec, BeforeValidator(_data)]]
    model: Axis[Named]
    preprocessing: Axis[Named | None] = (None,)
    loss: Axis[Named] = (Component("cross_entropy"),)
    optimizer: Axis[Named] = (Component("sgd", {"learning_rate": 0.1}),)
    learning_rate_schedule: Axis[Named] = (Component("constant"),)
    augmentation: Axis[Named | None] = (None,)
    averaging: Axis[Named | None] = (None,)
    sampling: Axis[Annotated[SamplingSpec, BeforeValidator(_known_keys_of(SamplingSpec))]]
    epochs: Axis[Annotated[int, BeforeValidator(_whole), Field(ge=1, le=1_000_000)]]
    clipping: Axis[Named]
    noise: Axis[Named] = (Component("constant"),)
    seeds: Axis[Annotated[int, BeforeValidator(_whole), Field(ge=0, lt=2**63)]] = (0,)
    privacy: PrivacySettings
    baseline: BaselineSettings = BaselineSettings()
    norms: Annotated[NormSpec, BeforeValidator(_known_keys_of(NormSpec))] = NormSpec()
    noise_source: Literal["seeded", "os_entropy", "os_entropy_secure"] = "seeded"
    accounting: AccountingSettings = AccountingSettings()
    release: Named = Component("none")
    scheduler: SchedulerSettings = SchedulerSettings()
    resources: ResourceSettings = ResourceSettings()
    execution: Annotated[ExecutionSpec, BeforeValidator(_known_keys_of(ExecutionSpec))] = ExecutionSpec()

    @property
    def user_modules(self) -> tuple[str, ...]:
        """The modules and files of the user's own ``module:function`` components."""
        names = [*(data.name for data in self.data), *(model.name for model in self.model)]
        return tuple(sorted({name.rpartition(":")[0] for name in names if ":" in name}))

    @model_validator(mode="after")
    def _selection_is_accounted(self) -> Self:
        scheduler = self.scheduler
        public = scheduler.metric == "public_accuracy" and all(data.public_fraction > 0.0 for data in self.data)
        if scheduler.name != "fifo" and not public and not scheduler.accept_unaccounted_selection:
            raise InvalidInput(
                f"scheduler {scheduler.name} selects trials by {scheduler.metric}, which costs privacy that no "
                "accountant here counts; set data.public_fraction and metric: public_accuracy, or "
                "accept_unaccounted_selection: true"
            )
        return self


class _SweepLoader(yaml.SafeLoader):
    """YAML 1.1 reads ``1e-5`` as a word; a sweep file means the number."""


def _unique_keys(loader: _SweepLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    """A key given twice would silently lose its first value."""
    keys = [key.value for key, _ in node.value]
    for key, _ in node.value:
        if keys.count(key.value) > 1 and isinstance(key, yaml.ScalarNode):
            raise yaml.constructor.ConstructorError(None, None, f"the key {key.value!r} is given twice", key.start_mark)
    return loader.construct_mapping(node, deep=True)


def _finite(loader: _SweepLoader, node: yaml.ScalarNode) -> float:
    number = loader.construct_yaml_float(node)
    if not math.isfinite(number):
        raise yaml.constructor.ConstructorError(
            None, None, f"{node.value} is not a finite number; write a number", node.start_mark
        )
    return number


_SweepLoader.add_constructor("tag:yaml.org,2002:map", _unique_keys)
_SweepLoader.add_constructor("tag:yaml.org,2002:float", _finite)
_SweepLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_text(path: Path) -> str:
    """The text of a sweep file."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise InvalidInput(f"cannot read the sweep file {path}: {reason}") from error


def parse_sweep(text: str, origin: str = "sweep") -> SweepSpec:
    """The sweep in a YAML text; ``origin`` names it in errors."""
    try:
        content = yaml.load(text, _SweepLoader)
    except yaml.YAMLError as error:
        raise InvalidInput(f"{origin}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, Mapping):
        raise InvalidInput(f"{origin}: expected a mapping with keys {', '.join(SweepSpec.model_fields)}")
    try:
        return SweepSpec.model_validate(content)
    except ValidationError as error:
        raise InvalidInput("\n".join(f"{origin}: {line}" for line in _error_lines(error))) from error


def _error_lines(error: ValidationError) -> Iterator[str]:
    for item in error.errors():
        # The place as the user wrote it: names and list positions, without pydantic's names of union branches.
        place = ".".join(str(part) for part in item["loc"] if isinstance(part, int) or str(part).isidentifier())
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] not in ("value_error", "missing"):
            message = f"{message}, but got {item['input']!r}"
        yield f"{place}: {message}" if place else message
