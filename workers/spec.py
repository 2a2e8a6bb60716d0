"""The specification of one trial: all settings that a training worker needs.

The planner makes a `TrialSpec` and sends it as JSON; the worker never changes it. Fields are split by their effect on
privacy: `sampling`, `clipping`, `noise`, `epochs` and released preprocessing change the mechanism; `execution` changes
only speed and memory; `attacks` examine the trained model, and `audit` leaves some examples out of training to do so.
The type of a number field holds its bounds, which sweep files use too; `__post_init__` checks all other requirements
of a section.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Final, Literal, assert_never, get_args, get_type_hints

import numpy as np
from pydantic import Field, GetPydanticSchema, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticSerializationError, core_schema

from dpsweep.accounting.errors import InvalidInput, require_finite
from dpsweep.accounting.mechanism.noise_strategies import CORRELATED, INDEPENDENT
from dpsweep.accounting.mechanism.samplings import OWN_NUMBERS, SAMPLINGS, Adjacency, own_numbers
from dpsweep.accounting.mechanism.schedules import LARGEST_EPOCHS
from dpsweep.accounting.mechanism.trace import Selection
from dpsweep.accounting.mechanism.units import EXAMPLE, LARGEST_UNIT, Unit, User
from dpsweep.accounting.registry import lookup, unlike
from dpsweep.workers.noise.noise_sources import NOISE_SOURCES, noise_source_kind

Params = dict[str, Any]


def name_in(registry: Collection[str]) -> GetPydanticSchema:
    """Return an annotation that accepts only the names in ``registry``, as a `Literal` of them would."""
    return GetPydanticSchema(lambda _type, _handler: core_schema.literal_schema(list(registry)))


Epochs = Annotated[int, Field(ge=1, le=LARGEST_EPOCHS)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Delta = Annotated[float, Field(gt=0.0, lt=1.0)]
NoiseMultiplier = Annotated[float, Field(ge=0.0)]
NoiseSourceName = Annotated[str, name_in(NOISE_SOURCES)]
MAX_THREADS = 1024


@dataclass(frozen=True)
class Component:
    """Name and parameters of a component, such as a clipping method; both are checked when the component is built."""

    name: str
    params: Params = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class DataPart:
    """Training part of one candidate of an `dpsweep.accounting.mechanism.random_trials.ExponentialChoice`.

    The training examples are split into ``of`` disjoint parts. The candidate trains on part ``place``, and the last
    part is held out to choose among candidates. place: counted from 0, below ``of`` - 1.
    """

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
    test_fraction: held out if the source has no test set.
    public_fraction: split off the training set and treated as public, without any guarantee (validation-driven
    schedules read it).
    split_seed: seed of all of these splits.
    """

    name: str
    params: Params = field(default_factory=dict, hash=False)
    keep: dict[str, float | int] = field(default_factory=dict, hash=False)
    test_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.2
    public_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    split_seed: Annotated[int, Field(ge=0)] = 0
    part: DataPart | None = None
    """Part of the data that a candidate trains on, if several candidates share the data; not a key of sweep files."""

    def __post_init__(self) -> None:
        check_bounds(self, "data")


@dataclass(frozen=True)
class SamplingSpec:
    """How batches are drawn.

    method: a name in `dpsweep.accounting.mechanism.samplings.SAMPLINGS`. batch_size: the expected batch size, which is
    public; full: all training examples, so that an epoch is one step.

    max_batch_size: a larger Poisson batch is cut to a uniformly random subset of this size.

    per_epoch: with random_allocation, the number of the n / batch_size steps of an epoch that each example joins; None
    is 1.

    cycle_length: with cyclic_poisson, the number of groups of examples that take turns, at least the bands of banded
    noise. None is 1.
    """

    method: Annotated[str, name_in(SAMPLINGS)]
    batch_size: Annotated[int, Field(ge=1)] | Literal["full"]
    max_batch_size: Annotated[int, Field(ge=1)] | None = None
    per_epoch: Annotated[int, Field(ge=1)] | None = None
    cycle_length: Annotated[int, Field(ge=1)] | None = None

    def __post_init__(self) -> None:
        check_bounds(self, "sampling")
        own_numbers(self.method, self.numbers)

    @property
    def numbers(self) -> dict[str, int | None]:
        """Parameters of single methods, by name."""
        return {name: getattr(self, name) for name in OWN_NUMBERS}

    def expected_size(self, dataset_size: int) -> int:
        """Return the expected batch size on ``dataset_size`` training examples."""
        return dataset_size if self.batch_size == "full" else self.batch_size * (self.per_epoch or 1)


@dataclass(frozen=True)
class NoiseSpec:
    """The noise and its initial noise multiplier; 0 means no noise (the non-private baseline).

    schedule: a noise schedule, or a noise strategy, whose noise is correlated over the steps and constant.
    """

    initial_noise_multiplier: NoiseMultiplier
    schedule: Component = field(default_factory=lambda: Component("constant"))

    def __post_init__(self) -> None:
        check_bounds(self, "noise")

    @property
    def strategy(self) -> str:
        """Return the noise strategy as the command line writes it, such as ``banded:bands=4``."""
        if self.schedule.name not in CORRELATED:
            return INDEPENDENT.stored_name
        params = ",".join(f"{key}={value}" for key, value in self.schedule.params.items())
        return f"{self.schedule.name}:{params}" if params else self.schedule.name


@dataclass(frozen=True)
class BudgetSpec:
    """Training stops before the first epoch that would exceed the budget: exactly one of rho (zCDP) and epsilon."""

    rho: Annotated[float, Field(gt=0.0)] | None = None
    """Budget in zero-concentrated DP."""
    epsilon: Annotated[float, Field(gt=0.0)] | None = None
    """Budget as an epsilon at the sweep's delta."""
    covers: Literal["everything", "training"] = "everything"
    """Every release, or only the training steps, without releases from the whole data such as ``dp_pca``. Reported
    epsilons count every release."""

    def __post_init__(self) -> None:
        check_bounds(self, "budget")
        if (self.rho is None) == (self.epsilon is None):
            raise InvalidInput(f"a budget has rho {self.rho} and epsilon {self.epsilon}; give exactly one of them")


_Often = Literal["auto", "every_step", "when_sampled", "off"]
Refreshes = float | _Often
"""How often norms of all examples are taken: `NormSpec.refreshes_per_epoch`."""


@dataclass(frozen=True)
class NormSpec:
    """The rate at which the gradient norms of all examples are computed.

    refreshes_per_epoch: times per epoch (gamma of paper A); when_sampled: all at step 0, then each example's norm
    whenever it is in a batch; off: never, so that no epsilon of single examples is computed; auto: when_sampled, or
    once per epoch where needed. rows_per_part: examples in one part of the stored norms, which is accounted on its own.
    """

    refreshes_per_epoch: Annotated[float, Field(gt=0.0)] | _Often = "auto"
    rows_per_part: Annotated[int, Field(ge=1)] = 65_536
    exact_examples: Annotated[int, Field(ge=0)] = 0
    """Random examples whose norms are stored at every step, to measure the error of estimates."""

    def __post_init__(self) -> None:
        check_bounds(self, "norms")
        if self.are_off and self.exact_examples:
            raise InvalidInput(
                f"norms.exact_examples is {self.exact_examples}, but norms.refreshes_per_epoch is off, which leaves no "
                "estimate to compare them with; leave out exact_examples, or refresh norms"
            )

    @property
    def are_off(self) -> bool:
        """Return whether no norms of all examples are taken, and no epsilon of single examples is computed."""
        return self.refreshes_per_epoch == "off"

    @property
    def when_sampled(self) -> bool:
        """Return whether norms come from the batches, after a pass over all at step 0; old ones are measured again."""
        return self.refreshes_per_epoch == "when_sampled"

    @property
    def snapshots_per_epoch(self) -> float | None:
        """Number of stored snapshots per epoch; None: one at every step; 0: none."""
        words = {"auto": 1.0, "every_step": None, "when_sampled": 1.0, "off": 0.0}
        often = self.refreshes_per_epoch
        return words[often] if isinstance(often, str) else often

    def snapshots(self, epochs: int, steps: int) -> int:
        """Return the number of snapshots of a run."""
        often = self.snapshots_per_epoch
        return steps if often is None else min(steps, math.ceil(often * epochs))


UserSampling = Literal["els", "uls"]
"""``els``: rows are sampled and clipped. ``uls``: users are sampled, and each user's mean gradient is clipped."""
MaxRecords = Annotated[int, Field(ge=1, le=LARGEST_UNIT)]


@dataclass(frozen=True)
class UserSpec:
    """How a trial protects users (`dpsweep.workers.sampling.users`). max_records: most rows that it keeps of each user.

    counted_with: noise multiplier with which the rows per user were released before the trial was planned; None if
    they are public, or nobody asked.
    """

    sampling: UserSampling
    max_records: MaxRecords
    counted_with: Annotated[float, Field(ge=1.0)] | None = None

    def __post_init__(self) -> None:
        check_bounds(self, "privacy")

    @property
    def members(self) -> int:
        """Return how many members of the population that is sampled a user is at most."""
        match self.sampling:
            case "els":
                return self.max_records
            case "uls":
                return 1
            case _:
                assert_never(self.sampling)

    @property
    def rows_of_member(self) -> int:
        """Return how many gradients of rows are computed for one member of that population."""
        match self.sampling:
            case "els":
                return 1
            case "uls":
                return self.max_records
            case _:
                assert_never(self.sampling)


MinGroupSize = Annotated[int, Field(ge=1)]


@dataclass(frozen=True)
class RmiaSpec:
    """reference_models: models trained for the attack, each at the cost of about one trial. A pair already helps."""

    reference_models: Annotated[int, Field(ge=2, le=256)]

    def __post_init__(self) -> None:
        check_bounds(self, "attacks.rmia")
        if self.reference_models % 2:
            raise InvalidInput(
                f"attacks.rmia.reference_models is {self.reference_models}, but they come in pairs that share no "
                "training example; give an even number"
            )


@dataclass(frozen=True)
class ExposureSpec:
    """canaries: secrets, random sequences of tokens that are written over training examples.
    repeats: examples for each secret.
    length: tokens of a secret.
    candidates: sequences among which a secret is ranked, itself included.
    """

    canaries: Annotated[int, Field(ge=2, le=100_000)] = 20
    repeats: Annotated[int, Field(ge=1, le=100_000)] = 1
    length: Annotated[int, Field(ge=2)] = 8
    candidates: Annotated[int, Field(ge=2, le=10_000_000)] = 1024

    def __post_init__(self) -> None:
        check_bounds(self, "attacks.exposure")


@dataclass(frozen=True)
class AttackSpec:
    """Attacks on the trained model, whose results are private data. ``exposure`` alone changes the training data.

    loss_threshold: membership inference by a loss threshold, per group.
    training_scores: loss and scores, such as accuracy, on the training examples, per group.
    rmia: membership inference by a likelihood ratio with reference models.
    exposure: extraction of secrets from a language model (`dpsweep.workers.trials.exposure`).
    """

    loss_threshold: bool = False
    training_scores: bool = False
    rmia: RmiaSpec | None = None
    exposure: ExposureSpec | None = None


AuditKind = Literal["rows", "gradient"]
Transcript = Literal["iterates", "last_model"]


@dataclass(frozen=True)
class AuditSpec:
    """A one-run audit (`dpsweep.workers.training.one_run_audit`); about half of the canaries are left out of training.

    canaries: their number; a fair coin for each decides whether it is left out.
    confidence: probability with which all lower bounds of the audit hold together.
    kind: ``rows`` are random training examples, ``gradient`` are made-up contributions beside them
    (`dpsweep.workers.training.gradient_canaries`), which change the model.
    transcript: what guesses are made from, the released model or, with gradient canaries, the noisy sums of all steps.
    """

    canaries: Annotated[int, Field(ge=2)]
    confidence: Annotated[float, Field(ge=0.5, lt=1.0)] = 0.95
    kind: AuditKind = "rows"
    transcript: Transcript = "last_model"

    def __post_init__(self) -> None:
        check_bounds(self, "audit")
        if self.leaves_out_rows and self.transcript == "iterates":
            raise InvalidInput(
                "audit.transcript is iterates, but audit.kind is rows, which are scored by the released model only; "
                "set kind: gradient, or transcript: last_model"
            )

    @property
    def leaves_out_rows(self) -> bool:
        """Return whether the canaries are training examples, which coins leave out."""
        return self.kind == "rows"

    @property
    def own_parameters(self) -> bool:
        """Return whether canaries have parameters of their own (`OwnParameters`)."""
        return self.transcript == "last_model" and not self.leaves_out_rows


Shard = Literal["frozen", "all"]
"""Parameters of a model that the ranks of a trial can divide; with ``all``, they divide the optimizer's state too."""


def divides_trained(shard: Shard) -> bool:
    """Return whether ranks divide the parameters that train, too."""
    return shard == "all"


@dataclass(frozen=True)
class ExecutionSpec:
    """Options that change only speed and memory, never the mechanism."""

    device: str = "auto"
    """``auto``, ``cpu``, ``cuda`` or ``cuda:0``."""
    allow_cpu: bool = False
    """Let trials that reserve a GPU train on the CPU where torch sees no GPU; otherwise they are refused."""
    micro_batch_size: Annotated[int, Field(ge=1)] | None = None
    """Examples whose gradients are computed at a time; by default the whole batch."""
    last_micro_batch: Literal["shorter", "padded"] = "shorter"
    """``padded``: the last micro-batch is filled up with rows of weight 0, so that all have one shape."""
    threads: Annotated[int, Field(ge=1, le=MAX_THREADS)] = 1
    """Threads of torch in each trial."""
    checkpoint_every_epochs: Annotated[float, Field(ge=1e-6)] = 1.0
    """Epochs between checkpoints; may be a fraction."""
    deterministic: bool = True
    """Whether a repeated run gives bit-identical results."""
    autocast: bool = False
    """Whether the model computes in bfloat16 where torch allows it."""

    def __post_init__(self) -> None:
        check_bounds(self, "execution")
        if self.last_micro_batch == "padded" and self.micro_batch_size is None:
            raise InvalidInput(
                "execution.last_micro_batch is padded, but execution.micro_batch_size, to which it would be, is null; "
                "give a micro_batch_size"
            )
        if not self.deterministic and not self.stores_before_showing:
            raise InvalidInput(
                f"execution.checkpoint_every_epochs is {self.checkpoint_every_epochs:g}, and execution.deterministic "
                "false: a resumed trial would round otherwise the epochs that it has shown since its checkpoint, under "
                "the same noise; set checkpoint_every_epochs to at most 1, with which none are"
            )

    @property
    def stores_before_showing(self) -> bool:
        """Return whether each epoch is stored before it is shown, so that no resumed trial repeats a shown one."""
        return self.checkpoint_every_epochs <= 1.0


SPEED: Final = (
    *("device", "allow_cpu", "micro_batch_size", "last_micro_batch"),
    *("threads", "checkpoint_every_epochs", "deterministic"),
)
"""Fields of `ExecutionSpec` that affect only speed; changing them does not make it another trial."""


@dataclass(frozen=True)
class TrialSpec:
    """All settings of one trial. key: its name, unique within a sweep. delta: the delta of reported epsilons.

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
    """Smallest number of test examples for which a group's measures are shown."""
    audit: AuditSpec | None = None
    noise_source: NoiseSourceName = "seeded"
    execution: ExecutionSpec = field(default_factory=ExecutionSpec)
    adjacency: Adjacency | None = None
    """Adjacency of the privacy claim; None: the first one that the sampling supports."""
    reference: bool = False
    """Whether simple models are trained beside it, if it is not private (`dpsweep.workers.evaluation.references`)."""
    selection: Selection | None = None
    """How the trial was selected among several candidates, if it was; only the selected one is released."""
    users: UserSpec | None = None
    """How users are protected, if the epsilons are those of users and not of single examples."""

    def __post_init__(self) -> None:
        check_bounds(self)
        lookup(NOISE_SOURCES, self.noise_source, "noise source")

    @property
    def unit(self) -> Unit:
        """Return whose privacy the epsilons are."""
        return EXAMPLE if self.users is None else User(self.users.members)

    @property
    def known_seed(self) -> int | None:
        """The seed that noise, batches and all other random choices follow; None if they come from secret keys."""
        return None if noise_source_kind(self.noise_source).is_secret else self.seed

    @property
    def is_private(self) -> bool:
        """Return whether training adds noise: the initial noise multiplier is above 0."""
        return self.noise.initial_noise_multiplier > 0.0

    def to_json(self) -> str:
        """Return the spec as JSON, every default written out."""
        return _ADAPTER.dump_json(self, indent=2).decode()

    def checked(self) -> TrialSpec:
        """Return this spec after a round trip through JSON, where for instance tuples in parameters become lists, and
        numbers of numpy plain ones.

        Raises: InvalidInput naming the first field whose value has another type than declared.
        """
        try:
            text = _ADAPTER.dump_json(self, warnings=False, fallback=_plain_number)
            spec = TrialSpec.from_json(text)
        except ValidationError as error:
            plain = json.loads(text)
            of_field = [(".".join(place_of(each["loc"], plain)), each["input"], each["msg"]) for each in error.errors()]
            field, value, _ = of_field[0]
            asked = (unlike(why, value) for name, _, why in of_field if name == field)  # of each member of a union
            raise InvalidInput(f"{field} is {value!r}, but: {'; or '.join(dict.fromkeys(asked))}") from error
        except PydanticSerializationError as error:
            why = str(error).rpartition("Error: ")[2]
            raise InvalidInput(f"a trial is written as JSON: {why}; use numbers, text, lists and maps") from error
        return spec

    @staticmethod
    def from_json(text: str | bytes) -> TrialSpec:
        """Return the spec from JSON. Raises: ValidationError of pydantic, a ValueError."""
        return _ADAPTER.validate_json(text)


def _plain_number(value: object) -> object:
    """Return a number of numpy as Python's. Raises: PydanticSerializationError for anything else."""
    if isinstance(value, np.generic):
        return value.item()
    raise PydanticSerializationError(f"{value!r} is a {type(value).__name__}")


def at_speed_of(spec: TrialSpec, execution: ExecutionSpec) -> TrialSpec:
    """Return ``spec`` with the `SPEED` fields of ``execution``; autocast, which changes results, is kept."""
    return replace(spec, execution=replace(execution, autocast=spec.execution.autocast))


_ADAPTER: TypeAdapter[TrialSpec] = TypeAdapter(TrialSpec)


_ARGUMENTS: Final = {"gt": "above", "ge": "at_least", "lt": "below", "le": "at_most"}
"""pydantic's name of each bound -> its name in `require_finite`."""


def check_bounds(instance: Any, section: str = "") -> None:
    """Check every number field of a dataclass against the bounds in its type.

    section: name of the dataclass in a trial; errors put it before the name of the field. Values that are not numbers,
    such as None, are not checked.

    Raises: InvalidInput naming the first field that is not finite or out of bounds, and the bound.
    """
    kind: Any = type(instance)
    for name, bounds in _bounds_of(kind).items():
        value = getattr(instance, name)
        if isinstance(value, int | float):
            require_finite(f"{section}.{name}" if section else name, value, **bounds)


@functools.cache
def _bounds_of(kind: type[Any]) -> Mapping[str, Mapping[str, float]]:
    hints = get_type_hints(kind, include_extras=True)
    return {name: bounds for name, hint in hints.items() if (bounds := dict(_bounds(hint)))}


def _bounds(hint: Any) -> Iterator[tuple[str, float]]:
    """Yield the bounds in an annotated type, or in a member of a union."""
    for part in get_args(hint):
        if isinstance(part, FieldInfo):
            yield from (
                (argument, getattr(bound, attribute))
                for bound in part.metadata
                for attribute, argument in _ARGUMENTS.items()
                if hasattr(bound, attribute)
            )
        else:
            yield from _bounds(part)


def place_of(location: tuple[int | str, ...], content: Any) -> Iterator[str]:
    """Yield the keys and positions of a pydantic location that ``content`` has; pydantic adds internal ones."""
    for part in location:
        inside: dict[int | str, Any] = {}
        if isinstance(content, Mapping):
            inside = {str(key): value for key, value in content.items()}
        elif isinstance(content, list):
            inside = dict(enumerate(content))
        if part in inside:
            content = inside[part]
            yield str(part)
