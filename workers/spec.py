"""What one trial is, as data: everything a training worker needs, and nothing it could disagree about.

A `TrialSpec` is made by the planner, travels as JSON, and is never changed by the worker. Fields are split by
privacy meaning: `sampling`, `clipping`, `noise`, `epochs` and the released preprocessing change the mechanism;
`execution` changes only speed; `attacks` look at the trained model. The bounds of a number stand in the type of its
field, for sweep files too; what else a section requires stands in its `__post_init__`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, GetPydanticSchema, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError, core_schema

from accounting.errors import InvalidInput
from accounting.samplings import SAMPLINGS
from workers.bounds import check_bounds

Params = dict[str, Any]


def name_in(registry: Collection[str]) -> GetPydanticSchema:
    """Checks that a text field is a name in ``registry``, as a `Literal` of its names would."""
    return GetPydanticSchema(lambda _type, _handler: core_schema.literal_schema(list(registry)))


def known_noise_source(name: str) -> str:
    """``name``, or `InvalidInput` unless it is registered in `workers.noise`."""
    from workers.noise import noise_source_kind  # here, because it imports torch, which reading a sweep does not need

    noise_source_kind(name)
    return name


Epochs = Annotated[int, Field(ge=1, le=1_000_000)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Delta = Annotated[float, Field(gt=0.0, lt=1.0)]
NoiseMultiplier = Annotated[float, Field(ge=0.0)]
NoiseSourceName = Annotated[str, AfterValidator(known_noise_source)]
MAX_THREADS = 1024


@dataclass(frozen=True)
class Component:
    """A registered component by name, with its own parameters (checked where it is built)."""

    name: str
    params: Params = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class DataSpec:
    """A data source and how it is cut.

    keep: how much of a group stays in the training set, by group name: a fraction in (0, 1) or a count.
    test_fraction: held out where the source has no test set of its own. public_fraction: split off the training
    set, treated as public (validation-driven schedules read it). split_seed fixes all of these cuts.
    """

    name: str
    params: Params = field(default_factory=dict, hash=False)
    keep: dict[str, float | int] = field(default_factory=dict, hash=False)
    test_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.2
    public_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    split_seed: Annotated[int, Field(ge=0)] = 0

    def __post_init__(self) -> None:
        check_bounds(self, "data")


@dataclass(frozen=True)
class SamplingSpec:
    """method: a name in `accounting.samplings.SAMPLINGS`; batch_size is the public, expected batch size."""

    method: Annotated[str, name_in(SAMPLINGS)]
    batch_size: Annotated[int, Field(ge=1)]

    def __post_init__(self) -> None:
        check_bounds(self, "sampling")


@dataclass(frozen=True)
class NoiseSpec:
    """A noise schedule and its initial noise multiplier; 0 trains without noise (the non-private baseline)."""

    initial_noise_multiplier: NoiseMultiplier
    schedule: Component = field(default_factory=lambda: Component("constant"))

    def __post_init__(self) -> None:
        check_bounds(self, "noise")


@dataclass(frozen=True)
class BudgetSpec:
    """Stop before the first epoch whose cost would pass the budget. Exactly one of rho (zCDP) and epsilon."""

    rho: Annotated[float, Field(gt=0.0)] | None = None
    epsilon: Annotated[float, Field(gt=0.0)] | None = None

    def __post_init__(self) -> None:
        check_bounds(self, "budget")
        if (self.rho is None) == (self.epsilon is None):
            raise InvalidInput(f"a budget has rho {self.rho} and epsilon {self.epsilon}; give exactly one of them")


@dataclass(frozen=True)
class NormSpec:
    """How often the norm of every example is refreshed: times per epoch (gamma of paper A), or every step."""

    refreshes_per_epoch: Annotated[float, Field(gt=0.0)] | Literal["every_step"] = 1.0
    rows_per_part: Annotated[int, Field(ge=1)] = 65_536
    exact_examples: Annotated[int, Field(ge=0)] = 0
    """This many random examples are tracked at every step, to measure the quality of the estimates."""

    def __post_init__(self) -> None:
        check_bounds(self, "norms")


@dataclass(frozen=True)
class AttackSpec:
    """Attacks on the trained model, which change nothing of the training. What they find is private data.

    loss_threshold: membership inference by a loss threshold, per group (see `workers.attacks`).
    """

    loss_threshold: bool = False


@dataclass(frozen=True)
class ExecutionSpec:
    """Fields that change only speed and memory, never the mechanism."""

    device: str = "auto"
    micro_batch_size: Annotated[int, Field(ge=1)] | None = None
    threads: Annotated[int, Field(ge=1, le=MAX_THREADS)] = 1
    checkpoint_every_epochs: Annotated[float, Field(ge=1e-6)] = 1.0
    deterministic: bool = True
    autocast: bool = False

    def __post_init__(self) -> None:
        check_bounds(self, "execution")


@dataclass(frozen=True)
class TrialSpec:
    key: str
    data: DataSpec
    model: Component
    sampling: SamplingSpec
    clipping: Component
    noise: NoiseSpec
    epochs: Epochs
    delta: Delta
    seed: Seed
    loss: Component = field(default_factory=lambda: Component("cross_entropy"))
    optimizer: Component = field(default_factory=lambda: Component("sgd", {"learning_rate": 0.1}))
    learning_rate_schedule: Component = field(default_factory=lambda: Component("constant"))
    preprocessing: Component | None = None
    augmentation: Component | None = None
    averaging: Component | None = None
    budget: BudgetSpec | None = None
    norms: NormSpec = field(default_factory=NormSpec)
    attacks: AttackSpec = field(default_factory=AttackSpec)
    noise_source: NoiseSourceName = "seeded"
    execution: ExecutionSpec = field(default_factory=ExecutionSpec)

    def __post_init__(self) -> None:
        check_bounds(self)
        known_noise_source(self.noise_source)

    @property
    def is_private(self) -> bool:
        return self.noise.initial_noise_multiplier > 0.0

    def to_json(self) -> str:
        return _ADAPTER.dump_json(self, indent=2).decode()

    def checked(self) -> TrialSpec:
        """This spec with every field of its type, and what it is when read back: a tuple of parameters is a list.

        Raises: InvalidInput naming the field that is not.
        """
        try:
            spec = TrialSpec.from_json(_ADAPTER.dump_json(self, warnings=False))
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"]))
            raise InvalidInput(f"{field} is {first['input']!r} in JSON, but: {first['msg']}") from error
        except PydanticSerializationError as error:
            raise InvalidInput(f"a trial is written as JSON: {error}; use numbers, text, lists and maps") from error
        return spec

    @staticmethod
    def from_json(text: str | bytes) -> TrialSpec:
        return _ADAPTER.validate_json(text)


_ADAPTER: TypeAdapter[TrialSpec] = TypeAdapter(TrialSpec)
