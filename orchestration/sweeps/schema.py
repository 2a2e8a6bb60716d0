"""A sweep file: YAML -> `SweepSpec`, with one line per mistake. Pure: reads no data, starts nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self, get_type_hints

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.individual import INDIVIDUAL_ACCOUNTANTS
from dpsweep.accounting.mechanism.samplings import Adjacency
from dpsweep.accounting.mechanism.units import UnitName, protects_users
from dpsweep.accounting.registry import nearest
from dpsweep.orchestration.records.release_modes import RELEASED, Disclosure
from dpsweep.orchestration.sweeps.axes import has_lists, spread
from dpsweep.orchestration.sweeps.compare import CompareSettings
from dpsweep.orchestration.sweeps.fields import (
    Attacks,
    Audit,
    Axis,
    Budget,
    Data,
    Execution,
    Named,
    Norms,
    Pairs,
    Quantity,
    Sampling,
    Several,
    SweepSection,
)
from dpsweep.orchestration.sweeps.list_values import kinds_of
from dpsweep.orchestration.sweeps.mistakes import mistakes
from dpsweep.orchestration.sweeps.resources import ResourceSettings, check_sections, reserved
from dpsweep.orchestration.sweeps.selection import check_selection
from dpsweep.orchestration.sweeps.text import parse_text
from dpsweep.orchestration.sweeps.tune import Adapted, TuneSettings, check_places, check_tuning
from dpsweep.workers.own_code.imports import is_import_path
from dpsweep.workers.spec import (
    Component,
    DataSpec,
    Delta,
    Epochs,
    ExecutionSpec,
    MaxRecords,
    MinGroupSize,
    NoiseMultiplier,
    NoiseSourceName,
    NormSpec,
    SamplingSpec,
    Seed,
    TrialSpec,
    UserSampling,
    name_in,
)

OWN_NOISE: Final = "noise_multiplier"
"""Parameter of a noise schedule that fixes its initial noise multiplier; such a schedule is not calibrated."""
_ONE_LEVEL = "give exactly one of target_epsilon (calibrated) and noise_multiplier (as given)"


Users = Annotated[int, Field(ge=1)]


def _whole_key(value: object) -> object:
    """Read a key of a map as a whole number: JSON, in which a sweep file is checked, has keys of text alone."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


class RowsPerUserSettings(SweepSection):
    """Numbers of rows per user, by which ``dpsweep plan`` recommends a way to protect users (users.md)."""

    users: Annotated[dict[Annotated[MaxRecords, BeforeValidator(_whole_key)], Users], Field(min_length=1)]
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
    budget: Budget | None = None
    """Training stops before the first epoch that would exceed this budget."""
    adjacency: Adjacency | None = None
    """Adjacency of the claims; by default that of the sampling."""
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
            raise InvalidInput(_ONE_LEVEL)
        return self

    @model_validator(mode="after")
    def _users_are_described(self) -> Self:
        of_users = protects_users(self.unit)
        if self.rows_per_user is not None and not of_users:
            raise InvalidInput("rows_per_user is given, but unit is example; set unit: user, or leave it out")
        given = {"user_sampling": self.user_sampling, "max_records_per_user": self.max_records_per_user}
        for key, value in given.items():
            if of_users and value is None:
                raise InvalidInput(f"unit is user, but {key} is missing; give {_OF_USERS[key]}")
            if value is not None and not of_users:
                raise InvalidInput(f"{key} is given, but unit is example; set unit: user, or leave it out")
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
    """CPUs that each part reserves. By default 1 on a running cluster, and none on an embedded one."""
    resource: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]*$")] | None = None
    """Custom Ray resource of which each part reserves 1, such as ``accounting`` of nodes that were started with it
    (``ray start --resources='{"accounting": 4}'``). Not used on an embedded cluster."""


class SchedulerSettings(SweepSection):
    """Scheduling of trials. ``fifo`` trains each trial to its end. ``asha`` compares trials of one setting and seed,
    and stops those with a low metric; it never stops a baseline. On private data, this selection costs privacy. The
    epsilon of a stopped trial is an estimate, because results decided how long it trained."""

    name: Literal["fifo", "asha"] = "fifo"
    """``asha`` stops trials early."""
    metric: Literal["public_accuracy", "test_accuracy"] = "public_accuracy"
    """Metric that ``asha`` compares: accuracy, or the main score of another task, such as r2."""
    grace_epochs: int = Field(default=1, ge=1)
    """Epochs that every trial trains before ``asha`` may stop it."""
    reduction_factor: int = Field(default=3, ge=2)
    """``asha`` continues one in ``reduction_factor`` trials at each check."""
    accept_unaccounted_selection: bool = False
    """Allow selection by private data, which no epsilon covers."""


class BaselineSettings(SweepSection):
    """Settings that differ for the non-private baseline."""

    optimizer: Named | None = None
    """Optimizer in place of the sweep's; unclipped gradients are larger and may need a smaller learning rate."""


_SECTIONS: Final = {"data": DataSpec, "sampling": SamplingSpec, "norms": NormSpec}
"""Axes whose values are sections, with the dataclass that types the fields of each section."""
_WITH_LISTS: Final = (
    *_SECTIONS,
    *("model", "preprocessing", "loss", "optimizer", "learning_rate_schedule", "augmentation", "averaging"),
    *("clipping", "noise"),
)
"""Axes whose values may hold lists of values."""


_OF_PRIVACY: Final = ("target_epsilon", "noise_multiplier", "user_sampling", "max_records_per_user")
ZIPPED: Final = (*_WITH_LISTS, "epochs", "seeds", *_OF_PRIVACY)
"""Axes that ``zip`` may name, and those of them in the section privacy."""


def _spread_all(key: str, value: object) -> object:
    """Return the values of an axis, where each component that holds lists is replaced by one component per
    combination.
    """
    if not has_lists(value) and not (isinstance(value, list) and any(map(has_lists, value))):
        return value
    spread_values: list[object] = []
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, Mapping) and has_lists(item):
            given = {str(name): each for name, each in item.items()}
            spread_values += spread(given, _types(key, given), key)
        else:
            spread_values.append(item)
    return spread_values


def _types(key: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Types of the parameters of a component or section, by name; empty for a component of the user's own."""
    types: dict[str, Any] = {OWN_NOISE: float} if key == "noise" else {}
    if key not in ("sampling", "norms"):
        types |= kinds_of(key, given.get("name"), list(given))
    if key in _SECTIONS:
        types |= get_type_hints(_SECTIONS[key], include_extras=True)
    return {name: kind for name, kind in types.items() if name not in ("name", "params")}


class SweepSpec(SweepSection):
    """A whole sweep file. Fields of type ``Axis`` take one value or a list of values."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=100)
    """Name of the sweep, and of its default folder; at most 100 characters."""
    data: Axis[Data]
    """A data source and its splits."""
    model: Axis[Named]
    """The model, or a function of your own."""
    preprocessing: Axis[Named | None] = (None,)
    """Transformation of stored features into the model's input."""
    loss: Axis[Named] = (Component("cross_entropy"),)
    """The loss of one example."""
    optimizer: Axis[Named] = (Component("sgd", {"learning_rate": 0.1}),)
    """The optimizer, which takes a step with the noisy gradient."""
    learning_rate_schedule: Axis[Named] = (Component("constant"),)
    """Factor on the learning rate over the steps."""
    augmentation: Axis[Named | None] = (None,)
    """Random changes of the training examples."""
    averaging: Axis[Named | None] = (None,)
    """Average of the parameters over steps; the averaged model is evaluated and kept."""
    sampling: Axis[Sampling]
    """How batches are drawn."""
    epochs: Axis[Epochs]
    """Length of training; an epoch has n / batch_size steps, rounded up."""
    clipping: Axis[Named]
    """Clipping method, which bounds each example's gradient; ``none`` is the non-private baseline."""
    noise: Axis[Named] = (Component("constant"),)
    """Schedule of the noise over epochs, or a strategy that correlates it over steps."""
    seeds: Axis[Seed] = (0,)
    """Training seeds: of initial parameters, batches and, if seeded, noise."""
    privacy: PrivacySettings
    """Privacy of every private trial."""
    baseline: BaselineSettings = BaselineSettings()
    """Settings that differ for the non-private baseline."""
    reference: bool = False
    """Train simple models (a rule on one column, logistic or linear regression) beside the non-private baselines of
    tables."""
    norms: Axis[Norms] = (NormSpec(),)
    """How often the gradient norms of all examples are stored; ``off``: never."""
    attacks: Attacks | None = None
    """Attacks on the trained model."""
    min_group_size: MinGroupSize | None = None
    """Smallest number of test examples for which a group is shown; by default 10."""
    without_gradient: Several[str] = ()
    """Patterns of names of trainable parameters, such as ``experts.*``, that need no gradient from the examples that a
    plan tries."""
    audit: Audit | None = None
    """A lower bound on epsilon, measured in the trial's own training run."""
    noise_source: NoiseSourceName = "seeded"
    """``seeded`` (research mode: whoever knows the seed knows the noise), ``os_entropy`` or ``os_entropy_secure``."""
    accounting: AccountingSettings = AccountingSettings()
    """Accounting of trained trials."""
    release: Named = Component("none")
    """What may be shown about the training examples' epsilons: ``none``, ``private`` or ``raw``."""
    compare: CompareSettings = CompareSettings()
    """Metric by which settings are compared."""
    scheduler: SchedulerSettings = SchedulerSettings()
    """Whether trials with a low metric are stopped."""
    resources: Axis[ResourceSettings] = (ResourceSettings(),)
    """Ray resources of each trial."""
    execution: Execution = ExecutionSpec()
    """Options that change only speed and memory, never the mechanism."""
    notify: Several[Annotated[str, Field(min_length=1)]] = ()
    """Addresses to POST JSON to, or commands to run, when the sweep finished, failed or is stuck."""
    tune: TuneSettings | None = None
    """Hyperparameters that each setting tunes before settings are compared."""
    adapted: Adapted | None = None
    """Tuned values of a sweep with ``tune``; written by dpsweep."""
    zip: Pairs | None = None
    """Axes that vary together, such as ``[clipping, optimizer]``, or several such lists."""

    @property
    def disclosure(self) -> Disclosure:
        """The release mode, which decides what may leave ``private/``."""
        return self.release.name

    @property
    def own_components(self) -> tuple[tuple[str, str], ...]:
        """The user's own components, as (role, ``module:function``), such as ("model", "my_models:net")."""
        named = [
            *(("data source", data.name) for data in self.data),
            *((("data source", self.tune.data.name),) if self.tune and self.tune.data else ()),
            *(("model", model.name) for model in self.model),
            *(("loss", loss.name) for loss in self.loss),
            *(("clipping method", clipping.name) for clipping in self.clipping),
        ]
        return tuple(sorted({(what, name) for what, name in named if is_import_path(name)}))

    @property
    def selects_unaccounted(self) -> bool:
        """Return whether the scheduler stops trials by a metric that is not that of public data."""
        is_public = self.scheduler.metric == "public_accuracy" and all(data.public_fraction > 0.0 for data in self.data)
        return self.scheduler.name != "fifo" and not is_public

    def plain(self) -> dict[str, Any]:
        """Return the specification as JSON values, every default written out."""
        plain: dict[str, Any] = self.model_dump(mode="json")
        for key in ("norms", "resources"):  # as in earlier versions, where these keys took one value
            if len(plain[key]) == 1:
                plain[key] = plain[key][0]
        return plain

    def reserved(self, trial: TrialSpec) -> ResourceSettings:
        """Return the Ray resources that a trial of the sweep reserves."""
        return reserved(self.resources, trial)

    @model_validator(mode="before")
    @classmethod
    def _lists_inside(cls, value: object) -> object:
        """Expand lists inside components and sections into several of them (`dpsweep.orchestration.sweeps.axes`)."""
        if not isinstance(value, Mapping):
            return value
        return {key: _spread_all(key, item) if key in _WITH_LISTS else item for key, item in value.items()}

    @property
    def pairs(self) -> tuple[tuple[str, ...], ...]:
        """The groups of axes that ``zip`` varies together, each as keys of the sweep file."""
        return self.zip or ()

    def values_of(self, key: str) -> tuple[Any, ...]:
        """Return the values of an axis of `ZIPPED`; empty for one of privacy that the file does not give."""
        found = getattr(self.privacy if key in _OF_PRIVACY else self, key)
        return found or ()

    @model_validator(mode="after")
    def _levels_are_given(self) -> Self:
        given = self.privacy.target_epsilon or self.privacy.noise_multiplier
        if not given and not all(OWN_NOISE in schedule.params for schedule in self.noise):
            raise InvalidInput(f"privacy: {_ONE_LEVEL}, or a {OWN_NOISE} in every schedule of noise")
        return self

    @model_validator(mode="after")
    def _resources_are_clear(self) -> Self:
        check_sections(self.resources)
        if (
            self.execution.device == "cpu"
            and not self.execution.allow_cpu
            and any(each.gpus for each in self.resources)
        ):
            raise InvalidInput(
                "resources.gpus reserves GPUs, but execution.device is 'cpu', so that they would stay idle; set gpus "
                "to 0 or device to auto, or allow it with execution.allow_cpu: true"
            )
        return self

    @model_validator(mode="after")
    def _pairs_match(self) -> Self:
        named = [key for group in self.pairs for key in group]
        for key in named:
            if key not in ZIPPED:
                raise InvalidInput(f"zip: unknown axis {key!r}; {nearest(key, ZIPPED)}")
            if named.count(key) > 1:
                raise InvalidInput(f"zip: {key!r} is named twice; an axis varies with one group of others")
        for group in self.pairs:
            lengths = {key: len(self.values_of(key)) for key in group}
            if len(group) < 2:
                raise InvalidInput("zip: a group of axes that vary together needs at least two")
            if len(set(lengths.values())) > 1:
                counts = ", ".join(f"{key} has {length}" for key, length in lengths.items())
                raise InvalidInput(f"zip: axes that vary together need equally many values, but {counts}")
        return self

    @model_validator(mode="after")
    def _released_statistics_exist(self) -> Self:
        if self.release.name == RELEASED and any(norms.are_off for norms in self.norms):
            raise InvalidInput(
                f"release: {RELEASED} shows statistics of the epsilons of single examples, but "
                "norms.refreshes_per_epoch is off; use release: none, or refresh norms"
            )
        return self

    @model_validator(mode="after")
    def _is_defined_per_user(self) -> Self:
        if not protects_users(self.privacy.unit):
            return self
        refused = {
            f"release: {self.release.name} (statistics of the epsilons of single examples; none)": (
                self.release.name != "none"
            ),
            "accounting.group_sizes (a user is a group already; 1)": self.accounting.group_sizes != (1,),
            "tune": self.tune is not None,
            "attacks": self.attacks is not None,
            "audit": self.audit is not None,
        }
        found = [what for what, is_so in refused.items() if is_so]
        if found:
            raise InvalidInput(f"privacy.unit is user, which does not cover {'; '.join(found)}; leave it out")
        return self

    @model_validator(mode="after")
    def _tuning_fits(self) -> Self:
        if self.tune is None and self.adapted is not None:
            raise InvalidInput("adapted belongs to a section tune, and dpsweep writes it: delete it")
        if self.tune is not None:
            check_places(self.tune, self)
            if self.adapted is None:
                check_tuning(self.tune, self)
            if self.tune.is_selection:
                check_selection(self.tune, self)
        return self

    @model_validator(mode="after")
    def _selection_is_accounted(self) -> Self:
        scheduler = self.scheduler
        if self.selects_unaccounted and not scheduler.accept_unaccounted_selection:
            raise InvalidInput(
                f"scheduler {scheduler.name} selects trials by {scheduler.metric}, which costs privacy that no "
                "accountant here counts; set data.public_fraction and metric: public_accuracy, or "
                "accept_unaccounted_selection: true"
            )
        return self


def parse_sweep(text: str, origin: str = "sweep") -> SweepSpec:
    """Parse and check the YAML text of a sweep file; ``origin`` names the text in errors.

    Raises: InvalidInput with one line per mistake: its place, what is expected there, and what was found.

    >>> parse_sweep("epoch: 3", "my.yaml")
    Traceback (most recent call last):
        ...
    dpsweep.accounting.errors.InvalidInput: my.yaml: unknown key 'epoch'; did you mean 'epochs'?...
    """
    try:
        content = parse_text(text)
    except InvalidInput as error:
        raise InvalidInput(f"{origin}: {error}") from error
    if not isinstance(content, Mapping):
        raise InvalidInput(f"{origin}: expected a mapping with keys {', '.join(SweepSpec.model_fields)}")
    try:
        return SweepSpec.model_validate_json(json.dumps(content), strict=True)
    except ValidationError as error:
        raise InvalidInput("\n".join(f"{origin}: {line}" for line in mistakes(error, content))) from error
