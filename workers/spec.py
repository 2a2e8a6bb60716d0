"""The specification of one trial: all settings that a training worker needs.

The planner makes a `TrialSpec`, sends it as JSON, and the worker never changes it. Fields are split by privacy meaning:
`sampling`, `clipping`, `noise`, `epochs` and released preprocessing change the mechanism; `execution` changes only
speed and memory; `attacks` examine the trained model, and `audit` leaves some examples out to do so. The bounds of a
number are in the type of its field, which sweep files use too; other requirements of a section are in its
`__post_init__`.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field, GetPydanticSchema, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError, core_schema

from accounting.errors import InvalidInput
from accounting.mechanism import Selection
from accounting.samplings import SAMPLINGS, Adjacency
from accounting.schedules import LARGEST_EPOCHS
from workers.bounds import check_bounds, place_of

Params = dict[str, Any]


def name_in(registry: Collection[str]) -> GetPydanticSchema:
    """An annotation that accepts only the names in ``registry``, as a `Literal` of them would."""
    return GetPydanticSchema(lambda _type, _handler: core_schema.literal_schema(list(registry)))


def known_noise_source(name: str) -> str:
    """``name``. Raises: InvalidInput unless it is registered in `workers.noise`."""
    from workers.noise import noise_source_kind  # late: it imports torch, which a sweep file does not need

    noise_source_kind(name)
    return name


Epochs = Annotated[int, Field(ge=1, le=LARGEST_EPOCHS)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Delta = Annotated[float, Field(gt=0.0, lt=1.0)]
NoiseMultiplier = Annotated[float, Field(ge=0.0)]
NoiseSourceName = Annotated[str, AfterValidator(known_noise_source)]
MAX_THREADS = 1024


def _is_none(value: object) -> bool:
    return value is None


def _is_everything(value: object) -> bool:
    """Not written, so that trials of versions without the field can still be resumed."""
    return value == "everything"


@dataclass(frozen=True)
class Component:
    """Name and parameters of a component; both are checked where the component is built."""

    name: str
    params: Params = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class DataPart:
    """One of ``of`` disjoint parts of the training examples, and the last of them held out: for a candidate of an
    `accounting.exponential_choice.ExponentialChoice`. place: counted from 0; never the last part's."""

    place: Annotated[int, Field(ge=0)]
    of: Annotated[int, Field(ge=2)]

    def __post_init__(self) -> None:
        check_bounds(self, "data.part")
        if self.place >= self.of - 1:
            raise InvalidInput(f"data.part {self.place} of {self.of}: candidates train on parts 0 to {self.of - 2}")


@dataclass(frozen=True)
class DataSpec:
    """A data source and its splits.

    keep: by group name, how much of the group stays in the training set: a fraction in (0, 1] or a count.
    test_fraction: held out if the source has no test set. public_fraction: split off the training set and treated as
    public, without any guarantee (validation-driven schedules read it). split_seed: seed of all of these splits.
    """

    name: str
    params: Params = field(default_factory=dict, hash=False)
    keep: dict[str, float | int] = field(default_factory=dict, hash=False)
    test_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.2
    public_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    split_seed: Annotated[int, Field(ge=0)] = 0
    part: Annotated[DataPart | None, Field(exclude_if=_is_none)] = None
    """What a candidate is trained on, where candidates share the data; no key of a sweep file."""

    def __post_init__(self) -> None:
        check_bounds(self, "data")


@dataclass(frozen=True)
class SamplingSpec:
    """How batches are drawn.

    method: a name in `accounting.samplings.SAMPLINGS`. batch_size: the expected batch size, which is public; full: all
    training examples, so that an epoch is one step.

    max_batch_size: of a larger Poisson batch, only a uniformly random subset of this size is kept.
    """

    method: Annotated[str, name_in(SAMPLINGS)]
    batch_size: Annotated[int, Field(ge=1)] | Literal["full"]
    max_batch_size: Annotated[int, Field(ge=1)] | None = None

    def __post_init__(self) -> None:
        check_bounds(self, "sampling")

    def expected_size(self, dataset_size: int) -> int:
        """The expected batch size on ``dataset_size`` training examples."""
        return dataset_size if self.batch_size == "full" else self.batch_size


@dataclass(frozen=True)
class NoiseSpec:
    """A noise schedule and its initial noise multiplier; 0 means no noise (the non-private baseline)."""

    initial_noise_multiplier: NoiseMultiplier
    schedule: Component = field(default_factory=lambda: Component("constant"))

    def __post_init__(self) -> None:
        check_bounds(self, "noise")


@dataclass(frozen=True)
class BudgetSpec:
    """Stop before the first epoch whose cost would exceed the budget: exactly one of rho (zCDP) and epsilon."""

    rho: Annotated[float, Field(gt=0.0)] | None = None
    """Of zero-concentrated DP."""
    epsilon: Annotated[float, Field(gt=0.0)] | None = None
    """At the sweep's delta."""
    covers: Annotated[Literal["everything", "training"], Field(exclude_if=_is_everything)] = "everything"
    """What the budget pays for: everything that is released, or the steps of training alone, without releases on the
    whole data such as ``dp_pca``, a bound, or statistics. Every epsilon that is shown counts everything."""

    def __post_init__(self) -> None:
        check_bounds(self, "budget")
        if (self.rho is None) == (self.epsilon is None):
            raise InvalidInput(f"a budget has rho {self.rho} and epsilon {self.epsilon}; give exactly one of them")


@dataclass(frozen=True)
class NormSpec:
    """How often the gradient norms of all examples are computed.

    refreshes_per_epoch: times per epoch (gamma of paper A), at every step, or when sampled: once, at step 0, and then
    each example's whenever it is in a batch, where its norm is computed anyway; off: never, so that no cost of single
    examples is known. rows_per_part: rows of one part, which is accounted on its own.
    """

    refreshes_per_epoch: Annotated[float, Field(gt=0.0)] | Literal["every_step", "when_sampled", "off"] = 1.0
    rows_per_part: Annotated[int, Field(ge=1)] = 65_536
    exact_examples: Annotated[int, Field(ge=0)] = 0
    """Number of random examples whose norms are stored at every step, to measure the error of the estimates."""

    def __post_init__(self) -> None:
        check_bounds(self, "norms")
        if self.are_off and self.exact_examples:
            raise InvalidInput(
                f"norms.exact_examples is {self.exact_examples}, but norms.refreshes_per_epoch is off, which leaves no "
                "estimate to compare them with; leave out exact_examples, or refresh norms"
            )

    @property
    def are_off(self) -> bool:
        """Whether no norms of all examples are taken, and no epsilon of single examples is computed."""
        return self.refreshes_per_epoch == "off"

    @property
    def when_sampled(self) -> bool:
        """Whether norms come from the batches, after a pass over all examples at step 0."""
        return self.refreshes_per_epoch == "when_sampled"

    @property
    def snapshots_per_epoch(self) -> float | None:
        """How often norms are stored; None: at every step; 0: never."""
        words = {"every_step": None, "when_sampled": 1.0, "off": 0.0}
        often = self.refreshes_per_epoch
        return words[often] if isinstance(often, str) else often

    def snapshots(self, epochs: int, steps: int) -> int:
        """Number of snapshots of a run."""
        often = self.snapshots_per_epoch
        return steps if often is None else min(steps, math.ceil(often * epochs))


MinGroupSize = Annotated[int, Field(ge=1)]


@dataclass(frozen=True)
class RmiaSpec:
    """reference_models: trained for the attack, each at the cost of about one trial. A pair already helps."""

    reference_models: Annotated[int, Field(ge=2, le=256)]

    def __post_init__(self) -> None:
        check_bounds(self, "attacks.rmia")
        if self.reference_models % 2:
            raise InvalidInput(
                f"attacks.rmia.reference_models is {self.reference_models}, but they come in pairs that share no "
                "training example; give an even number"
            )


@dataclass(frozen=True)
class AttackSpec:
    """Attacks on the trained model. They do not change the training; their results are private data.

    loss_threshold: membership inference by a loss threshold, per group (see `workers.attacks`). training_scores: loss
    and scores, such as accuracy, on the training examples, per group; by how much they are better than those on test
    examples is what guessing "a member if predicted right" gains (Yeom et al. 2018). rmia: membership inference by a
    likelihood ratio with reference models (see `workers.membership`).
    """

    loss_threshold: bool = False
    training_scores: Annotated[bool, Field(exclude_if=operator.not_)] = False
    rmia: Annotated[RmiaSpec | None, Field(exclude_if=_is_none)] = None
    """Not written where it is None, as ``training_scores`` is not where it is False, so that trials of versions without
    them can still be resumed."""


@dataclass(frozen=True)
class AuditSpec:
    """A one-run audit (see `workers.audit`); about half of the canaries are left out of training.

    canaries: number of random training examples, each left out by a fair coin. confidence: probability with which all
    lower bounds of the audit hold.
    """

    canaries: Annotated[int, Field(ge=1)]
    confidence: Annotated[float, Field(ge=0.5, lt=1.0)] = 0.95

    def __post_init__(self) -> None:
        check_bounds(self, "audit")


@dataclass(frozen=True)
class ExecutionSpec:
    """Fields that change only speed and memory, never the mechanism."""

    device: str = "auto"
    """``auto``, ``cpu``, ``cuda`` or ``cuda:0``."""
    micro_batch_size: Annotated[int, Field(ge=1)] | None = None
    """Examples whose gradients are taken at a time; by default the whole batch."""
    last_micro_batch: Literal["shorter", "padded"] = "shorter"
    """``padded``: the last micro-batch is filled up with rows of weight 0, so that all have one shape."""
    threads: Annotated[int, Field(ge=1, le=MAX_THREADS)] = 1
    """Threads of torch in each trial."""
    checkpoint_every_epochs: Annotated[float, Field(ge=1e-6)] = 1.0
    """Epochs, or a part of one, between checkpoints."""
    deterministic: bool = True
    """Whether a trial that is run again gives the same bits."""
    autocast: bool = False
    """Whether the model computes in bfloat16 where torch allows it."""

    def __post_init__(self) -> None:
        check_bounds(self, "execution")
        if self.last_micro_batch == "padded" and self.micro_batch_size is None:
            raise InvalidInput(
                "execution.last_micro_batch is padded, but execution.micro_batch_size, to which it would be, is null; "
                "give a micro_batch_size"
            )


SPEED: Final = ("device", "micro_batch_size", "last_micro_batch", "threads", "checkpoint_every_epochs", "deterministic")
"""Fields of `ExecutionSpec` that say how fast a trial runs and no more: it is the same trial at any of their values."""


@dataclass(frozen=True)
class TrialSpec:
    """All settings of one trial. key: its name, unique within a sweep. delta: at which epsilon is reported.

    >>> spec = TrialSpec(
    ...     key="a", data=DataSpec("digits"), model=Component("logistic"), sampling=SamplingSpec("poisson", 64),
    ...     clipping=Component("flat"), noise=NoiseSpec(1.0), epochs=1, delta=1e-5, seed=0,
    ... )
    >>> TrialSpec.from_json(spec.to_json()) == spec
    True
    """

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
    min_group_size: MinGroupSize = 10
    """Examples that a group of the test data must have to be shown."""
    audit: AuditSpec | None = None
    noise_source: NoiseSourceName = "seeded"
    execution: ExecutionSpec = field(default_factory=ExecutionSpec)
    adjacency: Adjacency | None = None
    """Adjacency of the claim; None for the first of the sampling's own."""
    selection: Annotated[Selection | None, Field(exclude_if=_is_none)] = None
    """The trial was chosen so among several candidates, and is the only one that is released."""

    def __post_init__(self) -> None:
        check_bounds(self)
        known_noise_source(self.noise_source)

    @property
    def is_private(self) -> bool:
        return self.noise.initial_noise_multiplier > 0.0

    def to_json(self) -> str:
        return _ADAPTER.dump_json(self, indent=2).decode()

    def checked(self) -> TrialSpec:
        """This spec as it is read back from JSON, where for instance tuples of parameters are lists.

        Raises: InvalidInput naming the first field whose value has another type than declared.
        """
        try:
            text = _ADAPTER.dump_json(self, warnings=False)
            spec = TrialSpec.from_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(place_of(first["loc"], json.loads(text)))
            raise InvalidInput(f"{field} is {first['input']!r} in JSON, but: {first['msg']}") from error
        except PydanticSerializationError as error:
            raise InvalidInput(f"a trial is written as JSON: {error}; use numbers, text, lists and maps") from error
        return spec

    @staticmethod
    def from_json(text: str | bytes) -> TrialSpec:
        return _ADAPTER.validate_json(text)


def at_speed_of(spec: TrialSpec, execution: ExecutionSpec) -> TrialSpec:
    """The same trial with the fields `SPEED` of ``execution``."""
    return replace(spec, execution=replace(execution, autocast=spec.execution.autocast))


_ADAPTER: TypeAdapter[TrialSpec] = TypeAdapter(TrialSpec)
