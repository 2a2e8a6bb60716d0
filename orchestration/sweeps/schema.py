"""A sweep file: YAML -> `SweepSpec`, with one line per mistake. Pure: reads no data, starts nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Final, Self, get_type_hints

from pydantic import Field, ValidationError, model_validator

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.mechanism.random_trials import ExponentialChoice, RandomTrials
from dpsweep.accounting.mechanism.schedules import reads_accuracies
from dpsweep.accounting.mechanism.units import protects_users
from dpsweep.accounting.registry import nearest, unlike
from dpsweep.orchestration.store.release_modes import RELEASED, Disclosure, release_mode
from dpsweep.orchestration.sweeps.axes import combinations_of, has_lists, kinds_of
from dpsweep.orchestration.sweeps.key_places import UnknownKey, right_place
from dpsweep.orchestration.sweeps.sections import (
    ONE_LEVEL,
    OWN_NOISE,
    AccountingSettings,
    Attacks,
    Audit,
    Axis,
    AxisGroups,
    BaselineSettings,
    CompareSettings,
    DataField,
    Execution,
    Named,
    Norms,
    PrivacySettings,
    ResourceSettings,
    SamplingField,
    SchedulerSettings,
    Several,
    SweepSection,
    check_sections,
)
from dpsweep.orchestration.sweeps.text import parse_text, shortly
from dpsweep.orchestration.sweeps.tune import TUNED_COMPONENTS, Adapted, TuneSettings, candidates_of, takes
from dpsweep.workers.noise.noise_sources import noise_source_kind
from dpsweep.workers.own_code.imports import is_import_path
from dpsweep.workers.spec import (
    AttackSpec,
    Component,
    DataSpec,
    Epochs,
    ExecutionSpec,
    MinGroupSize,
    NoiseSourceName,
    NormSpec,
    SamplingSpec,
    Seed,
    TrialSpec,
    place_of,
)


def mistakes(error: ValidationError, content: Mapping[str, Any]) -> Iterator[str]:
    """Yield one line per mistake: its place in the sweep, what is expected there, and what was found."""
    wrong: dict[str, list[str]] = {}
    for item in error.errors(include_url=False):
        message = item["msg"].removeprefix("Value error, ")
        if isinstance(unknown := item.get("ctx", {}).get("error"), UnknownKey):
            message = f"{message}; {right_place(unknown, SweepSpec.model_json_schema())}"
        if item["type"] == "literal_error":
            message = unlike(message, item["input"])
        if item["type"] not in ("value_error", "missing"):
            message = f"{message}, but got {shortly(item['input'])}"
        missing = [str(item["loc"][-1])] if item["type"] == "missing" else []
        place = ".".join([*place_of(item["loc"], content), *missing])
        wrong.setdefault(place, []).append(_missing(place) if missing else message)
    for place, messages in wrong.items():
        line = "; or ".join(dict.fromkeys(messages))
        yield f"{place}: {line}" if place else line


def _missing(place: str) -> str:
    *sections, key = (part for part in place.split(".") if not part.isdigit())  # without positions in lists
    example = EXAMPLES.get(".".join([*sections, key]))
    return "this key is missing" + (f"; add it, such as `{key}: {example}`" if example else "")


EXAMPLES: Final[Mapping[str, str]] = {
    "name": "my-sweep",
    "data": "digits",
    "model": "mlp",
    "sampling": "{method: poisson, batch_size: 256}",
    "sampling.method": "poisson",
    "sampling.batch_size": "256",
    "epochs": "20",
    "clipping": "[none, {name: flat, bound: 1}]",
    "privacy": "{target_epsilon: 3, delta: 1e-5}",
    "privacy.delta": "1e-5",
    "audit.canaries": "200",
    "attacks.rmia.reference_models": "4",
    "tune.parameters": "{clipping.bound: [0.5, 1, 2]}",
    "tune.privacy": "unaccounted  # research mode; or public, private_selection, exponential_mechanism",
}
"""A value of every key without a default, by its place, for the message that it is missing."""


_SECTIONS: Final = {"data": DataSpec, "sampling": SamplingSpec, "norms": NormSpec}
"""Axes whose values are sections, with the dataclass that types the fields of each section."""
_WITH_LISTS: Final = (
    *_SECTIONS,
    *("model", "preprocessing", "loss", "optimizer", "learning_rate_schedule", "augmentation", "averaging"),
    *("clipping", "noise"),
)
"""Axes whose values may hold lists of values."""
_OF_PRIVACY: Final = ("target_epsilon", "noise_multiplier", "user_sampling", "max_records_per_user")
_OF_SELECTIONS: Final = ("auto", "pld", "rdp")
"""Accountants that cover a private selection."""
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
            spread_values += combinations_of(given, _types(key, given), key)
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
    """Name of the sweep and its default folder; at most 100 characters."""
    drafted: bool = False
    """Values that ``dpsweep init`` read off the rows are not confirmed yet: no epsilon is a guarantee."""
    data: Axis[DataField]
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
    sampling: Axis[SamplingField]
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
    """Epsilons of the training examples that may be shown: ``none``, ``private`` or ``raw``."""
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
    zip: AxisGroups | None = None
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
        return self.model_dump(mode="json")

    def reserved(self, trial: TrialSpec) -> ResourceSettings:
        """Return the Ray resources of a trial: the first section whose conditions hold."""
        names = {
            "data": trial.data.name,
            "preprocessing": trial.preprocessing.name if trial.preprocessing else None,
            "model": trial.model.name,
            "loss": trial.loss.name,
            "clipping": trial.clipping.name,
            "noise": trial.noise.schedule.name if trial.is_private else None,
        }
        return next(each for each in self.resources if all(names[role] in few for role, few in each.when.items()))

    @model_validator(mode="before")
    @classmethod
    def _lists_inside(cls, value: object) -> object:
        """Expand lists inside components and sections into several of them (`dpsweep.orchestration.sweeps.axes`)."""
        if not isinstance(value, Mapping):
            return value
        return {key: _spread_all(key, item) if key in _WITH_LISTS else item for key, item in value.items()}

    @model_validator(mode="after")
    def _levels_are_given(self) -> Self:
        given = [key for key in ("target_epsilon", "noise_multiplier") if getattr(self.privacy, key)]
        every = all(OWN_NOISE in schedule.params for schedule in self.noise)
        if not given and not every:
            raise InvalidInput(f"privacy: {ONE_LEVEL}, or a {OWN_NOISE} in every schedule of noise")
        if given and every:
            raise InvalidInput(
                f"privacy.{given[0]} applies to no trial, as every schedule of noise has its own {OWN_NOISE}; drop one "
                "of the two"
            )
        return self

    @model_validator(mode="after")
    def _public_data_are_others(self) -> Self:
        public = self.tune.data if self.tune else None
        if public is None or (self.adapted is not None and self.adapted.is_tuning):
            return self
        if any((each.name, each.params) == (public.name, public.params) for each in self.data):
            raise InvalidInput(
                f"tune.data is {public.name}, whose records the sweep protects: a tuning on them is not public; name "
                "other data, or take privacy: private_selection, exponential_mechanism or unaccounted"
            )
        return self

    @model_validator(mode="after")
    def _somebody_can_be_told(self) -> Self:
        for target in self.notify:
            scheme, mark, place = target.partition("://")
            if mark and " " not in scheme and (scheme not in ("http", "https") or place[:1] in ("", "/", ":")):
                raise InvalidInput(
                    f"notify: {target!r} is no address to post to; give https://HOST/..., or a command to run"
                )
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
        pairs = self.zip or ()
        named = [key for group in pairs for key in group]
        for key in named:
            if key not in ZIPPED:
                raise InvalidInput(f"zip: unknown axis {key!r}; {nearest(key, ZIPPED)}")
            if named.count(key) > 1:
                raise InvalidInput(f"zip: {key!r} is named twice; an axis varies with one group of others")
        for group in pairs:
            values = {key: getattr(self.privacy if key in _OF_PRIVACY else self, key) for key in group}
            lengths = {key: len(found or ()) for key, found in values.items()}
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
            "audit of rows (they are single examples; give kind: gradient)": (
                self.audit is not None and self.audit.leaves_out_rows
            ),
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
            _check_places(self.tune, self)
            if self.adapted is None:
                _check_tuning(self.tune, self)
            if self.tune.is_selection:
                _check_selection(self.tune, self)
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


def _check_places(tune: TuneSettings, sweep: SweepSpec) -> None:
    """Raise InvalidInput for a tuned parameter that no component takes, and if ``adapted`` has other parameters."""
    for place, values in tune.parameters.items():
        section, dot, key = place.partition(".")
        if place in ("epochs", "sampling.batch_size", "sampling.max_batch_size"):
            if not isinstance(values, list) or not all(type(value) is int and value >= 1 for value in values):
                raise InvalidInput(f"tune.parameters: {place} needs a list of whole numbers of at least 1")
        elif section not in TUNED_COMPONENTS or not dot:
            valid = (*TUNED_COMPONENTS, "sampling.batch_size", "epochs")
            raise InvalidInput(f"tune.parameters: unknown place {place!r}; {nearest(section, valid)}")
        elif not any(each and takes(each, section, key) for each in getattr(sweep, section)):
            raise InvalidInput(f"tune.parameters: no {section} of the sweep takes {key!r}; see docs/sweep.md")
    adapted = sweep.adapted or Adapted()
    chosen = (*adapted.candidates, *(winner.values for winner in adapted.winners.values()))
    if any(set(values) != set(tune.parameters) for values in chosen):
        raise InvalidInput("adapted has other parameters than tune; dpsweep writes this section: delete it")


def _check_tuning(tune: TuneSettings, sweep: SweepSpec) -> None:
    """Raise InvalidInput for selection by the reported test data, for seeds that the sweep uses too, for a scheduler
    that stops trials, and for ``zip`` of seeds or data."""
    candidates_of(tune)
    if shared := set(tune.seeds) & set(sweep.seeds):
        raise InvalidInput(f"tune.seeds: {min(shared)} is a seed of the sweep too; tune with seeds of its own")
    needs_public = tune.data is None and tune.privacy != "exponential_mechanism"
    if needs_public and not all(data.public_fraction > 0.0 for data in sweep.data):
        raise InvalidInput(
            "tune selects by public data, never by the test data that are reported; set data.public_fraction, or "
            "tune.privacy: public with tune.data, or tune.privacy: exponential_mechanism"
        )
    if sweep.scheduler.name != "fifo":
        raise InvalidInput(f"tune compares trained candidates, but {sweep.scheduler.name} stops some; use fifo")
    paired = {"seeds", "data"} & {key for group in sweep.zip or () for key in group}
    if paired:
        raise InvalidInput(f"tune has seeds and data of its own, so zip cannot pair {min(paired)}")


def _check_selection(tune: TuneSettings, sweep: SweepSpec) -> None:
    """Raise InvalidInput for settings of the sweep that the proof of private selection does not cover."""

    def refuse(what: str, instead: str) -> None:
        raise InvalidInput(f"tune.privacy {tune.privacy}: {what}; {instead}")

    if tune.search == "optuna":
        refuse("the proof needs candidates that do not follow results", "use search: grid or random")
    if not noise_source_kind(sweep.noise_source).is_secret:
        refuse(f"noise_source {sweep.noise_source} lets whoever knows a seed subtract the noise", "use os_entropy")
    if release_mode(sweep.release.name).statistics is not None:
        refuse(f"release {sweep.release.name} shows statistics of single examples", "use release: none")
    if sweep.audit is not None or (sweep.attacks or AttackSpec()) != AttackSpec():
        refuse("attacks and audits examine single runs", "leave them out")
    if sweep.privacy.budget is not None:
        refuse("a budget ends runs at different steps", "give privacy.target_epsilon or noise_multiplier")
    if any(reads_accuracies(schedule.name) for schedule in sweep.noise):
        refuse("a validation schedule follows results", "use another schedule")
    match tune.selection:
        case RandomTrials():
            _check_random(sweep, refuse)
        case ExponentialChoice():
            _check_choice(tune, tune.selection, sweep, refuse)
    for place in tune.parameters:
        if place.partition(".")[0] in ("epochs", "sampling", "noise"):
            refuse(f"candidates of another {place} cost differently", "tune only what leaves the noise as it is")


def _check_random(sweep: SweepSpec, refuse: Callable[[str, str], None]) -> None:
    if not all(data.public_fraction > 0.0 for data in sweep.data):
        refuse(
            "candidates are scored on public data, because an exact score on private data would release them",
            "set data.public_fraction",
        )
    for accountant in (sweep.privacy.accountant, *sweep.accounting.also):
        if accountant not in _OF_SELECTIONS:
            refuse(f"the accountant {accountant} covers no selection", f"choose {', '.join(_OF_SELECTIONS)}")


def _check_choice(
    tune: TuneSettings, choice: ExponentialChoice, sweep: SweepSpec, refuse: Callable[[str, str], None]
) -> None:
    if tune.select_by != "accuracy":
        refuse(f"the choice counts wrong predictions, not {tune.select_by}", "leave select_by out")
    for target in sweep.privacy.target_epsilon or ():
        if choice.epsilon > target:
            refuse(
                f"the choice alone costs epsilon {choice.epsilon:g}, more than the target {target:g}",
                f"give tune.epsilon at most {target:g}, which costs nothing more",
            )
    if any(size > 1 for size in sweep.accounting.group_sizes):
        refuse("records of a group may lie in several parts, for which no bound is proven here", "use group_sizes: [1]")


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
