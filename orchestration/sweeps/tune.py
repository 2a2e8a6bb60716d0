"""Hyperparameter tuning: each compared setting keeps its best candidate before settings are compared. Pure.

A setting is one combination of all compared values except the training seed. Every setting, including the non-private
baseline, tries the same candidates with separate tuning seeds, and keeps the one with the best score on data other than
the reported test data. The tuning trials are their own sweep in the folder ``tuning/``.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Final, Literal, Self

import numpy as np
from pydantic import BeforeValidator, Field, PlainSerializer, model_validator

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.mechanism.random_trials import ExponentialChoice, RandomTrials
from dpsweep.accounting.mechanism.trace import Selection
from dpsweep.accounting.registry import one_of
from dpsweep.orchestration.sweeps.identity import content
from dpsweep.orchestration.sweeps.sections import DataField, Several, SweepSection
from dpsweep.orchestration.sweeps.text import shortly
from dpsweep.workers.own_code.imports import is_import_path
from dpsweep.workers.spec import AttackSpec, Component, DataPart, DataSpec, Seed, TrialSpec, name_in
from dpsweep.workers.tasks import TASKS

_PRIVATE: Final = ("clipping", "noise")
TUNED_COMPONENTS: Final = (
    *("model", "loss", "optimizer", "learning_rate_schedule", "augmentation", "averaging"),
    *_PRIVATE,
)
"""Components with tunable parameters; batch sizes of ``sampling`` and ``epochs`` can be tuned too."""
_RANGES: Final = ("uniform", "log_uniform")
_MOST_CANDIDATES: Final = 1_000
_DIGITS: Final = 4  # significant digits of a random candidate value, so that it is short to write down


def _values(value: object) -> object:
    """Check the candidate values of one parameter: a list, ``{uniform: [low, high]}`` or ``{log_uniform: ...}``."""
    match value:
        case list() if value:
            return value
        case {**found} if len(found) == 1 and next(iter(found)) in _RANGES:
            ((kind, ends),) = found.items()
            match ends:
                case [int() | float() as low, int() | float() as high] if low < high and (kind == "uniform" or low > 0):
                    return value
            raise InvalidInput(f"{kind} needs two increasing numbers, above 0 for log_uniform, but got {shortly(ends)}")
    raise InvalidInput(f"expected a list of values, or uniform or log_uniform with two ends, but got {shortly(value)}")


_OF_TASKS: Final = {
    f"{prefix}{score.name}": task.name
    for task in TASKS.values()
    for score in task.scores
    for prefix in ("", "worst_group_")
}
"""The task of each task-specific score, by the name of the score."""
SELECTABLE: Final = (
    *("accuracy", "worst_group_accuracy", "worst_group_balanced_accuracy", "worst_group_true_positive_rate", "loss"),
    *_OF_TASKS,
)
"""Scores that can select a candidate."""


def require_selectable(tune: TuneSettings | None, task: str) -> None:
    """Raise InvalidInput if the task has no score ``select_by``, or no wrong predictions to count for a choice."""
    if tune is None:
        return
    if task != "classification" and tune.privacy == "exponential_mechanism":
        raise InvalidInput(
            f"tune.privacy exponential_mechanism chooses by the number of wrong predictions, which {task} does not "
            "have; use private_selection"
        )
    if tune.select_by != "loss" and _OF_TASKS.get(tune.select_by, "classification") != task:
        known = [*(name for name, of in _OF_TASKS.items() if of == task), "loss"]
        choose = one_of(known if len(known) > 1 else ["accuracy", "worst_group_accuracy", "loss"])
        raise InvalidInput(f"tune.select_by is {tune.select_by}, which {task} does not have; choose {choose}")


class TuneSettings(SweepSection):
    """Hyperparameters that each setting tunes before settings are compared."""

    parameters: dict[str, Annotated[Any, BeforeValidator(_values)]] = Field(min_length=1)
    """Values by parameter, such as ``clipping.bound``: a list, ``{uniform: [a, b]}`` or ``{log_uniform: [a, b]}``."""
    search: Literal["grid", "random", "optuna"] = "grid"
    """``grid``: all combinations of the lists; ``random``: ``samples`` draws, the same for every setting; ``optuna``:
    half are such draws, and Optuna proposes the others."""
    samples: int | None = Field(default=None, ge=1, le=_MOST_CANDIDATES)
    """Candidates per setting, for ``search: random`` and ``optuna``."""
    seeds: Several[Seed] = (1_000_000,)
    """Training seeds of the tuning, different from those of the sweep."""
    select_by: Annotated[str, name_in(SELECTABLE)] = "accuracy"
    """Score that selects the best candidate, on the public part of the data or the test data of ``data``."""
    privacy: Literal["public", "private_selection", "exponential_mechanism", "unaccounted"]
    """``public``: tuning trains on ``data`` alone; ``private_selection``: each trial is the best of a random number of
    candidates; ``exponential_mechanism``: it is chosen among candidates on disjoint parts of the data. The target
    epsilon covers these two. ``unaccounted``: no epsilon covers the selection."""
    data: DataField | None = None
    """The public data set of ``privacy: public``; none of its records may be private."""
    trials: Annotated[float, Field(gt=1.0, le=_MOST_CANDIDATES)] | None = None
    """For ``private_selection``: expected number of candidates of each trial."""
    shape: Annotated[float, Field(ge=0.0, le=10.0)] | None = None
    """For ``private_selection``: shape of that number's law; 1, the default, is geometric, 0 logarithmic."""
    epsilon: Annotated[float, Field(gt=0.0, le=100.0)] | None = None
    """For ``exponential_mechanism``: epsilon of the choice. Up to the target epsilon it adds no cost."""

    @model_validator(mode="after")
    def _belong_together(self) -> Self:
        ranges = [place for place, values in self.parameters.items() if not isinstance(values, list)]
        if self.search == "grid" and (ranges or self.samples is not None):
            what = f"no ranges, as for {ranges[0]}" if ranges else "no samples"
            raise InvalidInput(f"search grid takes lists and {what}; give search: random or optuna, or leave these out")
        if self.search != "grid" and self.samples is None:
            raise InvalidInput(f"search {self.search} needs samples, the number of candidates of each setting")
        if (self.privacy == "public") != (self.data is not None):
            raise InvalidInput(
                "privacy public and data belong together: a tuning is public if it trains on public data alone"
            )
        is_random = self.privacy == "private_selection"
        if is_random and self.trials is None:
            raise InvalidInput("privacy private_selection needs trials, the expected number of candidates")
        is_exponential = self.privacy == "exponential_mechanism"
        if is_exponential and self.epsilon is None:
            raise InvalidInput("privacy exponential_mechanism needs epsilon, the cost of choosing a candidate")
        useless = {"trials": is_random, "shape": is_random, "epsilon": is_exponential}
        for key, of_use in useless.items():
            if getattr(self, key) is not None and not of_use:
                whose = "exponential_mechanism" if key == "epsilon" else "private_selection"
                raise InvalidInput(f"{key} is of privacy {whose}, but privacy is {self.privacy}; leave {key} out")
        return self

    @property
    def is_selection(self) -> bool:
        """Return whether each trial is selected from its own candidates and its epsilon covers the selection."""
        return self.selection is not None

    @property
    def selection(self) -> Selection | None:
        """The mechanism that selects each trial from its own candidates; None if no epsilon covers the selection."""
        if self.epsilon is not None:
            return ExponentialChoice(len(candidates_of(self)), self.epsilon)
        if self.trials is None:
            return None
        return RandomTrials(self.trials) if self.shape is None else RandomTrials(self.trials, self.shape)


class Tried(SweepSection):
    """A candidate that a setting tried. values: by parameter, for those that the setting has. score: mean of
    ``select_by`` over the tuning seeds; none if the candidate failed."""

    values: dict[str, Any]
    score: float | None = None


class Winner(SweepSection):
    """The chosen candidate of a setting.

    `values`: by parameter.
    `score`: by ``select_by``; none if private.
    `candidates`: number tried, or offered to a private selection.
    `candidate`: index among them, set by the exponential mechanism.
    `seed`: training seed of the run, set where the run itself is the trial.
    `tried`: all candidates; empty if private.
    """

    values: dict[str, Any]
    score: float | None
    candidates: int
    candidate: Annotated[int, Field(ge=0)] | None = None
    seed: int | None = None
    tried: Several[Tried] = ()


class DrawnRun(SweepSection):
    """One run of a private selection. candidate: index of its candidate. seed: training seed, which identifies it."""

    candidate: Annotated[int, Field(ge=0, lt=_MOST_CANDIDATES)]
    seed: Seed


def _read_runs(value: object) -> object:
    """Read ``2:17 0:4``, candidates and seeds of runs, which may be more than a sweep file may have values."""
    if not isinstance(value, str):
        return value
    runs = [each.partition(":") for each in value.split()]
    try:
        return tuple(DrawnRun(candidate=int(candidate), seed=int(seed)) for candidate, _, seed in runs)
    except ValueError as error:
        raise InvalidInput("it holds no runs; dpsweep writes this section, leave it as it is") from error


def _written_runs(runs: Sequence[DrawnRun]) -> str:
    return " ".join(f"{run.candidate}:{run.seed}" for run in runs)


DrawnRuns = Annotated[Several[DrawnRun], BeforeValidator(_read_runs), PlainSerializer(_written_runs)]


class Adapted(SweepSection):
    """Tuned values of a sweep with ``tune``: all candidates while tuning, then the best one of each setting.

    `candidates`: values by parameter.
    `winners`: best candidate by setting, as named by `setting_of`.
    `drawn`: runs of each private selection, by setting; their number is private.
    `proposed`: indices of the candidates that a setting tries, by setting; a setting that is missing here tries all.
    """

    candidates: Several[dict[str, Any]] = ()
    winners: dict[str, Winner] = Field(default_factory=dict)
    drawn: dict[str, DrawnRuns] = Field(default_factory=dict)
    proposed: dict[str, Several[Annotated[int, Field(ge=0)]]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _are_candidates(self) -> Self:
        drawn = (run.candidate for runs in self.drawn.values() for run in runs)
        largest = max((*drawn, *(place for places in self.proposed.values() for place in places)), default=-1)
        if largest >= len(self.candidates):
            raise InvalidInput(
                f"candidate is {largest}, but there are {len(self.candidates)}, counted from 0; dpsweep "
                "writes this section, leave it as it is"
            )
        return self

    @property
    def is_tuning(self) -> bool:
        """Return whether these are tuning trials, which only need a score."""
        return bool(self.candidates) and not self.drawn

    def tries(self, setting: str, candidate: int | None) -> bool:
        """Return whether the setting tries the candidate with this index."""
        return setting not in self.proposed or candidate in self.proposed[setting]


def setting_of(trial: TrialSpec, target_epsilon: float | None, accountant: str, tune: TuneSettings) -> str:
    """Return the name of the setting of a trial that is not yet tuned: a hash of everything that is compared except the
    seed.

    The hash covers the data splits, so that no candidate is chosen by the test set of another split; with ``tune.data``
    it leaves the data out. Under private selection it covers the seed too: every seed has its own selection.
    """
    compared = replace(
        trial,
        key="",
        seed=trial.seed if tune.is_selection else 0,
        data=DataSpec("any") if tune.data is not None else trial.data,
        attacks=AttackSpec(),
        audit=None,
    )
    return hashlib.sha256(content(compared, target_epsilon, accountant).encode()).hexdigest()[:16]


def candidates_of(tune: TuneSettings) -> tuple[dict[str, Any], ...]:
    """Return the candidates of every setting; with Optuna, only the random ones. Raises: InvalidInput for more than
    1,000.
    """
    places = list(tune.parameters)
    if tune.search != "grid":
        draw, samples = np.random.default_rng(tune.seeds[0]), tune.samples or 1
        count = samples if tune.search == "random" else (samples + 1) // 2
        return tuple({place: _drawn(tune.parameters[place], draw) for place in places} for _ in range(count))
    count = math.prod(len(values) for values in tune.parameters.values())
    if count > _MOST_CANDIDATES:
        raise InvalidInput(f"tune.parameters: {count:,} combinations, at most {_MOST_CANDIDATES:,}; shorten the lists")
    return tuple(dict(zip(places, chosen, strict=True)) for chosen in itertools.product(*tune.parameters.values()))


def values_tried(tune: TuneSettings | None, trial: TrialSpec, candidate: int | None) -> dict[str, Any]:
    """Return the values of the candidate with this index that the trial has, by parameter; empty outside a tuning."""
    found = {} if tune is None or candidate is None else candidates_of(tune)[candidate]
    return {place: value for place, value in found.items() if has(trial, place)}


def _drawn(values: Any, draw: np.random.Generator) -> Any:
    match values:
        case {"uniform": (low, high)}:
            return rounded_in_range(draw.uniform(low, high), values)
        case {"log_uniform": (low, high)}:
            return rounded_in_range(math.exp(draw.uniform(math.log(low), math.log(high))), values)
    return values[int(draw.integers(len(values)))]


def rounded_in_range(value: float, values: Mapping[str, Any]) -> float:
    """Return the value rounded to 4 significant digits and kept inside its range ``values``."""
    ((low, high),) = values.values()
    return min(max(float(f"{value:.{_DIGITS}g}"), float(low)), float(high))


def adapt(trial: TrialSpec, values: Mapping[str, Any]) -> TrialSpec:
    """Return the trial with the candidate's values; skips parameters that the trial does not have (see `has`)."""
    for place, value in values.items():
        section, _, key = place.partition(".")
        if not has(trial, place):
            continue
        if section == "epochs":
            trial = replace(trial, epochs=value)
        elif section == "sampling":
            trial = replace(trial, sampling=replace(trial.sampling, **{key: value}))
        else:
            found = _component(trial, section)
            name, params = (found.name, found.params) if found else ("", {})
            component = Component(name, {**params, key: value})
            noise = replace(trial.noise, schedule=component)
            trial = replace(trial, **({"noise": noise} if section == "noise" else {section: component}))
    return trial


def on_its_part(trial: TrialSpec, tune: TuneSettings, candidate: int) -> TrialSpec:
    """Return the trial restricted to its candidate's part of the data; unchanged unless the exponential mechanism
    chooses.
    """
    if not isinstance(tune.selection, ExponentialChoice):
        return trial
    return replace(trial, data=replace(trial.data, part=DataPart(candidate, tune.selection.parts)))


def has(trial: TrialSpec, place: str) -> bool:
    """Return whether the trial has the parameter ``place``, such as ``clipping.bound``, which a baseline does not
    have.
    """
    section, _, key = place.partition(".")
    if section in ("epochs", "sampling"):
        return True
    component = _component(trial, section)
    return component is not None and takes(component, section, key)


def _component(trial: TrialSpec, section: str) -> Component | None:
    if section in _PRIVATE and not trial.is_private:
        return None
    found: Component | None = trial.noise.schedule if section == "noise" else getattr(trial, section)
    return found


def takes(component: Component, section: str, key: str) -> bool:
    """Return whether the component takes the parameter; a user's own component takes those given in the sweep file."""
    from dpsweep.orchestration.sweeps.components import types_of  # late: it imports torch

    return key in component.params if is_import_path(component.name) else key in types_of(section, component.name)
