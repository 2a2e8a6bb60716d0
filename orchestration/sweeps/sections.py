"""Sections of a sweep file and the types of their fields: privacy, accounting, scheduler, resources, others. Pure."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, Final, Literal, Self, TypeVar, get_args, get_type_hints

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.individual import INDIVIDUAL_ACCOUNTANTS
from dpsweep.accounting.mechanism.samplings import Adjacency
from dpsweep.accounting.mechanism.units import UnitName, protects_users
from dpsweep.accounting.registry import nearest, one_of
from dpsweep.orchestration.sweeps.key_places import UnknownKey
from dpsweep.orchestration.sweeps.text import shortly
from dpsweep.workers.evaluation import rates
from dpsweep.workers.spec import (
    AttackSpec,
    AuditSpec,
    BudgetSpec,
    Component,
    DataSpec,
    Delta,
    ExecutionSpec,
    MaxRecords,
    NoiseMultiplier,
    NormSpec,
    SamplingSpec,
    Shard,
    UserSampling,
    name_in,
)
from dpsweep.workers.tasks import TASKS, Task

T = TypeVar("T")

NO_KEY: Final = "part"
"""Field of `DataSpec` that only tuning sets; in a sweep file, a key of this name is a parameter of the data source."""


def _check_keys(mapping: Mapping[Any, Any], valid: Collection[str], of: str = "") -> None:
    for key in mapping:
        if key not in valid:
            raise UnknownKey(str(key), valid, of)


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
    """Return a check of a section's keys, and of those of the sections in it, such as ``attacks.rmia``."""
    valid = [field.name for field in fields(dataclass_type)]
    inner = {
        name: [field.name for field in fields(kind)]
        for name, hint in get_type_hints(dataclass_type).items()
        for kind in get_args(hint)
        if is_dataclass(kind)
    }

    def check(value: object) -> object:
        if isinstance(value, Mapping):
            _check_keys(value, valid)
            for name in value.keys() & inner.keys():
                if isinstance(value[name], Mapping):
                    _check_keys(value[name], inner[name], f" of {name}")
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
DataField = Annotated[DataSpec, BeforeValidator(_data)]
AxisGroups = Annotated[tuple[tuple[str, ...], ...], BeforeValidator(_as_groups), Field(min_length=1)]
SamplingField = Annotated[SamplingSpec, BeforeValidator(_known_keys_of(SamplingSpec))]
BudgetField = Annotated[BudgetSpec, BeforeValidator(_known_keys_of(BudgetSpec))]
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


OWN_NOISE: Final = "noise_multiplier"
"""Parameter of a noise schedule that fixes its initial noise multiplier; such a schedule is not calibrated."""
ONE_LEVEL: Final = "give exactly one of target_epsilon (calibrated) and noise_multiplier (as given)"

UserCount = Annotated[int, Field(ge=1)]


def _whole_key(value: object) -> object:
    """Read a key of a map as a whole number: JSON, in which a sweep file is checked, has keys of text alone."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


class RowsPerUserSettings(SweepSection):
    """Numbers of rows per user, by which ``dpsweep plan`` recommends a way to protect users (users.md)."""

    users: Annotated[dict[Annotated[MaxRecords, BeforeValidator(_whole_key)], UserCount], Field(min_length=1)]
    """Number of users by their number of rows. It changes no trial."""
    noise_multiplier: Annotated[float, Field(ge=1.0)] | None = None
    """Noise that these numbers were released with, which every private trial pays for; leave it out only if they are
    public."""

    @property
    def histogram(self) -> tuple[tuple[int, int], ...]:
        """The numbers as (rows, users), ascending by rows."""
        return tuple(sorted(self.users.items()))


class PrivacySettings(SweepSection):
    """Privacy of every private trial: calibrated to a target epsilon, or with given noise multipliers."""

    delta: Delta
    """Delta of every (epsilon, delta) claim; choose it well below 1/n."""
    target_epsilon: Axis[Annotated[float, Field(gt=0.0)]] | None = None
    """Epsilon of everything that a private trial releases; its noise is calibrated to it."""
    noise_multiplier: Axis[NoiseMultiplier] | None = None
    """Noise standard deviation divided by sensitivity; with a schedule, its initial value."""
    budget: BudgetField | None = None
    """Training stops before the first epoch that would exceed this budget."""
    adjacency: Adjacency | None = None
    """Adjacency of the claims; by default that of the sampling. ``fixed_graph``, of users whose rows may have several
    owners, takes as known who owns which (users.md)."""
    accountant: str = "auto"
    """Accountant for calibration and for the worst-case epsilon in reports."""
    unit: UnitName = "example"
    """Whose privacy every epsilon is: that of one row, or of a ``user`` with all their rows (users.md)."""
    user_sampling: Axis[UserSampling] | None = None
    """With unit ``user``: ``els`` samples and clips rows, ``uls`` samples users and clips the mean gradient of each."""
    max_records_per_user: Axis[MaxRecords] | None = None
    """With unit ``user``: how many rows each user keeps at most, chosen at random once per trial."""
    rows_per_user: RowsPerUserSettings | None = None
    """With unit ``user``: how many users have how many rows."""

    @model_validator(mode="after")
    def _one_level(self) -> Self:
        if self.target_epsilon is not None and self.noise_multiplier is not None:
            raise InvalidInput(ONE_LEVEL)
        return self

    @model_validator(mode="after")
    def _users_are_described(self) -> Self:
        of_users = protects_users(self.unit)
        if self.adjacency == "fixed_graph" and not of_users:
            raise InvalidInput("adjacency is fixed_graph, which is of users, but unit is example; set unit: user")
        if self.adjacency == "fixed_graph" and self.rows_per_user is not None:
            raise InvalidInput(
                "rows_per_user is given, but fixed_graph takes them as known from the data; leave it out"
            )
        for key in ("rows_per_user", *_OF_USERS):
            is_given = getattr(self, key) is not None
            if is_given and not of_users:
                raise InvalidInput(f"{key} is given, but unit is example; set unit: user, or leave it out")
            if of_users and not is_given and key in _OF_USERS:
                raise InvalidInput(f"unit is user, but {key} is missing; give {_OF_USERS[key]}")
        return self


_OF_USERS: Final = {
    "user_sampling": "els (rows are sampled), uls (users are sampled), or a list of both",
    "max_records_per_user": "how many rows each user keeps at most, or a list of numbers",
}


class AccountingSettings(SweepSection):
    """Accounting of trained trials."""

    individual: Annotated[str, name_in(INDIVIDUAL_ACCOUNTANTS)] = "rdp"
    """Accountant of the per-example epsilons."""
    also: Several[str] = ()
    """Further accountants to report besides privacy.accountant."""
    group_sizes: Several[Annotated[int, Field(ge=1, le=10_000)]] = (1,)
    """Sizes of groups whose worst-case epsilon is reported."""
    actors: int | None = Field(default=None, ge=1, le=1024)
    """Most parts that are accounted at the same time; by default as many as fit."""
    cpus: Quantity | None = Field(default=None, ge=0.0)
    """CPUs that each part reserves; by default 1 on a running cluster, else none."""
    resource: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]*$")] | None = None
    """Custom Ray resource that each part reserves 1 of on a running cluster, such as ``accounting`` (``ray start
    --resources='{"accounting": 4}'``)."""


class SchedulerSettings(SweepSection):
    """Scheduling of trials. ``fifo`` trains each trial to its end. ``asha`` compares trials of one setting and seed,
    trials of earlier drivers included, and stops those with a low metric, never a baseline. On private data, this
    selection costs privacy. The epsilon of a stopped trial is an estimate."""

    name: Literal["fifo", "asha"] = "fifo"
    """``asha`` stops trials early."""
    metric: Literal["public_accuracy", "test_accuracy"] = "public_accuracy"
    """Metric that ``asha`` compares: accuracy, or the main score of another task."""
    grace_epochs: int = Field(default=1, ge=1)
    """Epochs that every trial trains before ``asha`` may stop it."""
    reduction_factor: int = Field(default=3, ge=2)
    """``asha`` continues one in ``reduction_factor`` trials at each check."""
    accept_unaccounted_selection: bool = False
    """Allow selection by private data, which no epsilon covers."""

    @model_validator(mode="after")
    def _has_use_for_its_keys(self) -> Self:
        useless = sorted(self.model_fields_set - {"name"})
        if self.name == "fifo" and useless:
            raise InvalidInput(f"fifo stops no trial, and takes no {', '.join(useless)}; leave it out, or take asha")
        return self


class BaselineSettings(SweepSection):
    """Settings that differ for the non-private baseline."""

    optimizer: Named | None = None
    """Optimizer in place of the sweep's: unclipped gradients may need a smaller learning rate."""


_SHORT: Final[Mapping[object, str]] = {"tpr": "true_positive_rate", "fpr": "false_positive_rate"}


def _full_name(value: object) -> object:
    return _SHORT.get(value, value) if isinstance(value, str) else value


def _points(value: object) -> object:
    """Read ``3 points`` as 0.03; a number is a share."""
    text = value.split() if isinstance(value, str) else []
    if len(text) == 2 and text[1] in ("point", "points"):
        try:
            return float(text[0]) / 100.0
        except ValueError:
            pass
    if isinstance(value, str):
        raise InvalidInput(f"detect is {shortly(value)!r}; give percentage points, such as: 3 points")
    return value


def _names(task: Task) -> tuple[str, ...]:
    return tuple(score.name for score in task.scores)


WORST_GROUPS: Final = (
    *("accuracy", "accuracy_change", "user_accuracy", "balanced_accuracy"),
    *(name for name in rates.OF_TWO_CLASSES if name != "selection_rate"),  # where neither more nor less is better
    *("log_loss", "calibration_error"),
    *(name for task in TASKS.values() for name in (*_names(task), *([f"{task.main}_change"] if task.scores else []))),
)
"""Metrics of groups that may compare settings, of each task."""


class CompareSettings(SweepSection):
    """Metric by which settings are compared. A change of it trains nothing again."""

    worst_group: Annotated[Annotated[str, name_in(WORST_GROUPS)] | None, BeforeValidator(_full_name)] = None
    """Metric of groups; a setting is compared by its value for the group where it is worst. By default accuracy, or the
    main score of another task. ``tpr`` and ``fpr`` are short names."""
    detect: Annotated[float, Field(gt=0.0, lt=1.0), BeforeValidator(_points)] | None = None
    """Smallest difference in accuracy that the sweep should show, such as ``3 points``; `dpsweep plan` warns if it
    cannot."""
    looks: Annotated[int, Field(ge=0, le=1000)] = 0
    """How often verdicts were read to decide whether to add seeds; written by ``dpsweep run --until``."""


def require_defined(compare: CompareSettings, data: str, classes: int, task: str = "classification") -> None:
    """Check that ``compare.worst_group`` is defined for the data.

    data: name of the data, for errors. classes: number of classes. Raises: InvalidInput for a metric that the task does
    not have, or that is defined for two classes only.
    """
    name = compare.worst_group
    if name is None:
        return
    others = {
        score: each.name for each in TASKS.values() if each.scores for score in (*_names(each), f"{each.main}_change")
    }
    if others.get(name, "classification") != task:
        known = _names(TASKS[task]) if TASKS[task].scores else ("accuracy", "balanced_accuracy", "log_loss")
        raise InvalidInput(f"compare.worst_group is {name}, which {task} does not have; choose {one_of(known)}")
    if name in rates.OF_TWO_CLASSES and classes != 2:
        raise InvalidInput(
            f"compare.worst_group is {name}, which needs two classes, but {data} has {classes}; choose accuracy, "
            "balanced_accuracy, log_loss or calibration_error"
        )


LABEL: Final = "label "
"""Prefix of node labels among resource amounts: a node has 1 of each label that it carries."""
_Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?$", max_length=63)]
_Place = Literal["data", "preprocessing", "model", "loss", "clipping", "noise"]


class ResourceSettings(SweepSection):
    """Ray resources of each trial. In a list of such sections, a trial uses the first one whose ``when`` holds; the
    last one has no conditions, and gives ``max_concurrent`` and ``max_failures`` for all trials."""

    when: dict[_Place, Axis[str]] = Field(default_factory=dict)
    """In a list: names of components that a trial must have, such as ``{model: [resnet20, wrn16_4]}``."""
    cpus: Quantity = Field(default=1.0, gt=0.0)
    """CPUs of each trial."""
    gpus: Annotated[Quantity, AfterValidator(whole_or_share)] = Field(default=0.0, ge=0.0)
    """GPUs of each trial: a fraction of one GPU, or a whole number with one GPU for each rank."""
    ranks: int | None = Field(default=None, ge=1, le=1024)
    """Processes that share a trial's gradients and its reserved CPUs and GPUs; by default one per GPU."""
    ranks_on: Literal["one_node", "nodes"] = "one_node"
    """Where the ranks of a trial run: on ``one_node``, or on as few ``nodes`` as have room."""
    shard: Shard | None = None
    """Parameters of a model that ranks divide: the ``frozen`` ones, or ``all`` with the optimizer's state; by default
    none."""
    labels: dict[str, _Label] = Field(default_factory=dict)
    """Labels that a node must have, given by ``ray start --labels`` or by Ray, as ``ray.io/accelerator-type: A100``."""
    max_concurrent: int | None = Field(default=None, ge=1)
    """Most trials that run at the same time; by default as many as fit."""
    max_failures: int = Field(default=3, ge=0)
    """How often a trial is continued from its checkpoint after its worker died."""

    @model_validator(mode="after")
    def _one_gpu_for_each_rank(self) -> ResourceSettings:
        if self.ranks is not None and self.gpus and self.ranks != max(1.0, self.gpus):
            raise InvalidInput(
                f"ranks is {self.ranks} and gpus {self.gpus:g}, but each rank has one GPU or none; leave ranks out, or "
                "set gpus to as many or to 0"
            )
        if self.shard is not None and self.processes == 1:
            raise InvalidInput(f"shard is {self.shard!r}, but one rank holds all; give ranks or gpus, 2 or more")
        if self.cpus / self.processes < LEAST_QUANTITY:
            raise InvalidInput(
                f"{self.cpus} CPUs are too few for {self.processes} ranks; give 0.0001 for each, or more"
            )
        return self

    @property
    def processes(self) -> int:
        """Processes that share the gradients of a trial."""
        return self.ranks or max(1, int(self.gpus))

    @property
    def bundle(self) -> dict[str, float]:
        """CPUs and GPUs of each rank, rounded down to multiples of `LEAST_QUANTITY`."""
        return {
            name: math.floor(amount / self.processes / LEAST_QUANTITY + 1e-6) / round(1 / LEAST_QUANTITY)
            for name, amount in (("CPU", self.cpus), ("GPU", self.gpus))
            if amount
        }

    @property
    def amounts(self) -> dict[str, float]:
        """Amounts that a trial reserves, by name; 1 for every label that its nodes must have."""
        return self._labelled({"CPU": self.cpus, "GPU": self.gpus})

    @property
    def on_each_node(self) -> dict[str, float]:
        """The least amounts that a node must have: all, or one rank's where ranks run on several nodes."""
        return self.amounts if self.ranks_on == "one_node" else self._labelled(self.bundle)

    @property
    def times(self) -> int:
        """Return how often nodes must have `on_each_node` together."""
        return 1 if self.ranks_on == "one_node" else self.processes

    def _labelled(self, given: Mapping[str, float]) -> dict[str, float]:
        labels = {f"{LABEL}{name}={value}": 1.0 for name, value in self.labels.items()}
        return {name: amount for name, amount in given.items() if amount} | labels


def check_sections(sections: Sequence[ResourceSettings]) -> None:
    """Check a list of sections.

    Raises: InvalidInput unless every section but the last has conditions and the last has none, and if another section
    than the last gives ``max_concurrent`` or ``max_failures``.
    """
    if sections[-1].when or not all(section.when for section in sections[:-1]):
        raise InvalidInput(
            "in a list of resources, every section but the last has a condition, and the last has none: it is for the "
            "other trials; add `when: {model: NAME}`, or a last section without it"
        )
    for section in sections[:-1]:
        for name in ("max_concurrent", "max_failures"):
            if name in section.model_fields_set:
                raise InvalidInput(f"{name} holds for all trials; give it in the last section of resources")


def never_met(sections: Sequence[ResourceSettings], used: Sequence[ResourceSettings]) -> Iterator[str]:
    """Yield a sentence on each section of resources that none of the trials uses, as by a misspelt name."""
    for section in sections[:-1]:
        if used and not any(each is section for each in used):
            asked = ", ".join(f"{place}: {' or '.join(values)}" for place, values in section.when.items())
            yield f"resources: no trial has {asked}, for which a section of its own stands; the next that fits counts"
