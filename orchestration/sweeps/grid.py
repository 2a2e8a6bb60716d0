"""The grid of a sweep: all its trials. Pure.

Fields of a sweep file may hold a list instead of one value. The grid is the product of these lists, except that lists
named in ``zip`` vary together. A trial without clipping is a non-private baseline. Noise, schedule and target do not
apply to it, so there is one baseline per combination of the other fields; every private trial is compared with the
baseline of its combination.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final

from dpsweep.accounting.errors import InvalidInput, require_finite
from dpsweep.accounting.jobs.release import ReleaseSpec
from dpsweep.accounting.mechanism.trace import Release
from dpsweep.accounting.mechanism.units import of_records
from dpsweep.accounting.records.json_text import parsed_json
from dpsweep.orchestration.store.published import NON_PRIVATE, Label
from dpsweep.orchestration.store.release_modes import release_spec
from dpsweep.orchestration.sweeps.identity import Choice, content, labels_of, short_name, trial_key
from dpsweep.orchestration.sweeps.schema import SweepSpec
from dpsweep.orchestration.sweeps.sections import OWN_NOISE
from dpsweep.orchestration.sweeps.tune import Adapted, TuneSettings, adapt, on_its_part, setting_of
from dpsweep.workers.evaluation.scores import MIN_GROUP_SIZE
from dpsweep.workers.spec import AttackSpec, Component, NoiseSpec, TrialSpec, UserSpec

BASELINE = "none"
"""The clipping method of a non-private baseline."""

AxisChoices = Mapping[str, Sequence[tuple[int, Any]]]
"""The values of each axis with their indices in the sweep's list, by name of the axis."""
Chosen = Mapping[str, tuple[int, Any]]
"""One value of each axis, with its index."""
_AXES: Final = {"seeds": "seed", "noise": "schedule", "target_epsilon": "epsilon", "noise_multiplier": "sigma"}
"""Names of axes that differ from their key in the sweep file, by that key."""
KEYS: Final = {axis: key for key, axis in _AXES.items()}
"""Keys of the sweep file that differ from the name of their axis, by that name."""


def _placed(values: Iterable[Any]) -> list[tuple[int, Any]]:
    return list(enumerate(values))


def values_of(chosen: Chosen) -> Choice:
    """Return the values without their indices."""
    return {axis: value for axis, (_, value) in chosen.items()}


def combinations(axes: AxisChoices) -> Iterator[Chosen]:
    """Yield the product of all axes."""
    for chosen in itertools.product(*axes.values()):
        yield dict(zip(axes, chosen, strict=True))


def _paired(sweep: SweepSpec) -> list[list[str]]:
    """Return the groups of axes that ``zip`` varies together, by names of axes."""
    return [[_AXES.get(key, key) for key in group] for group in sweep.zip or ()]


def is_paired(sweep: SweepSpec, chosen: Chosen, also: Mapping[str, int] = MappingProxyType({})) -> bool:
    """Return whether axes that vary together have the same index in their lists. also: indices of further axes."""
    places = {axis: place for axis, (place, _) in chosen.items()} | dict(also)
    return all(len({places[axis] for axis in group if axis in places}) <= 1 for group in _paired(sweep))


def comparable_places(sweep: SweepSpec, chosen: Chosen) -> tuple[int, ...]:
    """Return indices that a private trial and its baseline have in common, to match the two.

    These are the indices of all shared axes except those that vary together with clipping; data and seed are always
    included.
    """
    paired = {axis for group in _paired(sweep) if "clipping" in group for axis in group} - {"data", "seed"}
    return tuple(place for axis, (place, _) in chosen.items() if axis not in paired)


_SHARED: Final = (
    *("data", "model", "preprocessing", "loss", "optimizer", "learning_rate_schedule", "augmentation", "averaging"),
    *("sampling", "epochs", "norms"),
)


def shared_axes(sweep: SweepSpec) -> AxisChoices:
    """Return the axes that private trials and baselines share."""
    return {**{axis: _placed(getattr(sweep, axis)) for axis in _SHARED}, "seed": _placed(sweep.seeds)}


def private_axes(sweep: SweepSpec) -> AxisChoices:
    """Return the axes that only private trials have: clipping, schedule, target ``epsilon`` or noise ``sigma``, and
    how users are protected.
    """
    privacy = sweep.privacy
    return {
        "clipping": [(place, each) for place, each in _placed(sweep.clipping) if each.name != BASELINE],
        "schedule": _placed(sweep.noise),
        **({"epsilon": _placed(privacy.target_epsilon)} if privacy.target_epsilon else {}),
        **({"sigma": _placed(privacy.noise_multiplier)} if privacy.noise_multiplier else {}),
        **({"user_sampling": _placed(privacy.user_sampling)} if privacy.user_sampling else {}),
        **({"max_records_per_user": _placed(privacy.max_records_per_user)} if privacy.max_records_per_user else {}),
    }


def repeated_axes(sweep: SweepSpec, meant: Callable[[str, Any], Any] = lambda axis, value: value) -> tuple[str, ...]:
    """Return the axes of the sweep that list a value twice; axes that vary together, if they list the same together.

    meant: a value of an axis as it is compared.
    """
    axes = {
        axis: [(place, meant(axis, value)) for place, value in values]
        for axis, values in {**shared_axes(sweep), **private_axes(sweep)}.items()
    }
    groups = [[axis for axis in group if axis in axes] for group in _paired(sweep)]
    paired = {axis for group in groups for axis in group}
    groups += [[axis] for axis in axes if axis not in paired]
    return tuple(axis for group in groups if _is_repeated([dict(axes[axis]) for axis in group]) for axis in group)


def _is_repeated(group: Sequence[Mapping[int, Any]]) -> bool:
    """Return whether the axes of ``group``, each as its values by index, have equal values at two indices."""
    places = set.intersection(*(set(values) for values in group)) if group else set[int]()
    return len({tuple(values[place] for values in group) for place in places}) < len(places)


MAX_TRIALS = 10_000
"""Maximum number of trials of a sweep; Ray Tune, MLflow and the report handle thousands."""


@dataclass(frozen=True)
class Past:
    """History of a stored sweep, which planning needs besides the sweep file.

    earlier: earlier versions of the file, whose trials are kept. calibrations: see `planned.Plan`;
    checked before use.
    """

    earlier: tuple[SweepSpec, ...] = ()
    calibrations: Mapping[str, float] = field(default_factory=dict)


NO_PAST: Final = Past()


@dataclass(frozen=True)
class GridPoint:
    """One trial that the sweep asks for.

    target_epsilon: None if the noise multiplier of ``spec`` is final; otherwise the planner replaces it by a calibrated
    one.
    """

    spec: TrialSpec
    choice: Choice = field(repr=False)
    """Its value on each axis."""
    labels: dict[str, Label] = field(default_factory=dict)
    """The values that distinguish the trials of the sweep; always clipping, schedule and seed. For display only."""
    target_epsilon: float | None = None
    baseline: str | None = None
    """Key of the trial's non-private baseline, if the sweep has one."""
    release: ReleaseSpec | None = None
    """The release of statistics after training, if the trial makes one."""
    content: str = field(default="", repr=False)
    """Canonical content of the trial, equal for the same trial in every sweep: `identity.content`."""
    is_asked: bool = True
    """Whether the current sweep file asks for the trial; if False, only an earlier version of the file did."""
    setting: str = field(default="", repr=False)
    """In a sweep with ``tune``: the name of the trial's setting, by `tune.setting_of`."""
    candidate: int | None = None
    """While tuning: the index of the trial's candidate."""

    @property
    def key(self) -> str:
        """Unique name of the trial in its sweep; also the name of its folder."""
        return self.spec.key

    @property
    def is_private(self) -> bool:
        """Return whether the trial clips and adds noise; False for a baseline."""
        return self.spec.is_private

    @property
    def releases(self) -> tuple[Release, ...]:
        """Return what `release` releases, as parts of a trace; nothing of a run without noise."""
        return self.release.releases() if self.release and self.is_private else ()


def grid(sweep: SweepSpec, past: Past = NO_PAST) -> tuple[GridPoint, ...]:
    """Return every trial of the sweep once, baselines first, each with a key that depends on the trial alone.

    Trials that only an earlier version of the file asked for come last.

    Raises: InvalidInput for more than `MAX_TRIALS` trials, an invalid ``release``, and two trials with one key.

    >>> from dpsweep.orchestration.sweeps.schema import parse_sweep
    >>> [point.key for point in grid(parse_sweep('''
    ... name: example
    ... data: breast_cancer
    ... model: logistic
    ... sampling: {method: poisson, batch_size: 64}
    ... epochs: 2
    ... clipping: [none, flat]
    ... privacy: {target_epsilon: [1, 3], delta: 1e-5}
    ... '''))]  # doctest: +NORMALIZE_WHITESPACE
    ['non-private-seed0-711b992150',
     'flat-constant-epsilon1-seed0-83dd226f9c',
     'flat-constant-epsilon3-seed0-d483813018']
    """
    _require_countable(sweep)
    asked = drafts(sweep)
    former = [replace(point, is_asked=False) for earlier in past.earlier for point in drafts(earlier)]
    distinct: dict[str, GridPoint] = {}
    for point in (*asked, *former):
        if distinct.setdefault(point.key, point).content != point.content:
            raise InvalidInput(f"two different trials are both called {point.key}; run them in two sweeps")
    return _labelled(sweep, tuple(distinct.values()))


def drafts(sweep: SweepSpec) -> tuple[GridPoint, ...]:
    """Return all trials of the product of the sweep's lists, without labels; what the lists give twice appears
    twice.
    """
    if sweep.tune is not None and sweep.adapted is not None and _runs(sweep.adapted):
        return _selected(sweep, sweep.tune, _runs(sweep.adapted))
    release = release_spec(sweep.release.name, sweep.release.params)
    shared = [chosen for chosen in combinations(shared_axes(sweep)) if is_paired(sweep, chosen)]
    unclipped = [{"clipping": place} for place, each in enumerate(sweep.clipping) if each.name == BASELINE]
    baselines = {
        (candidate, comparable_places(sweep, chosen)): _baseline(sweep, values_of(chosen), candidate)
        for chosen in reversed(shared)  # among comparable baselines, the first one is kept
        if any(is_paired(sweep, chosen, clipping) for clipping in unclipped)
        for candidate in reversed(_candidates(sweep))
    }
    private = [
        _private(sweep, values_of({**level, **chosen}), candidate, baselines.get((candidate, places)), release)
        for chosen in shared
        for places in (comparable_places(sweep, chosen),)
        for level in combinations(private_axes(sweep))
        if is_paired(sweep, {**level, **chosen})
        for candidate in _candidates(sweep)
    ]
    return _proposed(sweep, (*reversed(baselines.values()), *private))


Runs = Mapping[str, Sequence[tuple[int, Mapping[str, Any], int]]]
"""Runs of each private selection by setting: the index of the candidate, its tuned values, and the training seed."""


def _runs(adapted: Adapted) -> Runs:
    """Return all drawn runs, or, after the selection, the selected run of each setting; empty without private
    selection.
    """
    if adapted.drawn:
        return {
            name: [(each.candidate, adapted.candidates[each.candidate], each.seed) for each in drawn]
            for name, drawn in adapted.drawn.items()
        }
    return {
        name: [(best.candidate or 0, best.values, best.seed)]
        for name, best in adapted.winners.items()
        if best.seed is not None
    }


def settings_of(sweep: SweepSpec, tune: TuneSettings) -> tuple[str, ...]:
    """Return the names of all settings of a sweep, given by `setting_of` to its trials before any value is tuned."""
    points = drafts(sweep.model_copy(update={"adapted": None}))
    accountant = sweep.privacy.accountant
    return tuple(dict.fromkeys(setting_of(point.spec, point.target_epsilon, accountant, tune) for point in points))


def _selected(sweep: SweepSpec, tune: TuneSettings, runs: Runs) -> tuple[GridPoint, ...]:
    """Replace each trial of the sweep by its runs in ``runs``, which keep its labels.

    Selected runs are compared with the selected run of their baseline; drawn runs have no baseline.
    """
    found: list[GridPoint] = []
    selected: dict[str, str] = {}
    for point in drafts(sweep.model_copy(update={"adapted": None})):
        setting = setting_of(point.spec, point.target_epsilon, sweep.privacy.accountant, tune)
        if setting not in runs:
            raise InvalidInput("the sweep asks for a trial that was not selected with the others; use another folder")
        drawn = sweep.adapted is not None and bool(sweep.adapted.drawn)
        for place, (candidate, values, seed) in enumerate(runs[setting]):
            spec = on_its_part(replace(adapt(point.spec, values), seed=seed), tune, candidate)
            canonical = content(spec, point.target_epsilon, sweep.privacy.accountant)
            key = trial_key((point.key.rpartition("-")[0],), canonical)
            selected[point.key] = key
            run = replace(
                point,
                spec=replace(spec, key=key),
                choice={**point.choice, "candidate": place} if drawn else point.choice,
                baseline=None if drawn else selected.get(point.baseline or ""),
                content=canonical,
                setting=setting,
                candidate=place if drawn else None,
            )
            found.append(run)
    return tuple(found)


def _proposed(sweep: SweepSpec, found: tuple[GridPoint, ...]) -> tuple[GridPoint, ...]:
    """Keep the trials whose setting tries their candidate; drop references to baselines that are not kept."""
    if sweep.adapted is None or not sweep.adapted.proposed:
        return found
    kept = {point.key: point for point in found if sweep.adapted.tries(point.setting, point.candidate)}
    return tuple(replace(point, baseline=point.baseline if point.baseline in kept else None) for point in kept.values())


def _candidates(sweep: SweepSpec) -> Sequence[int | None]:
    """While tuning, the indices of all candidates; otherwise None alone."""
    return range(len(sweep.adapted.candidates)) if sweep.adapted and sweep.adapted.candidates else (None,)


def _adapted(
    sweep: SweepSpec, trial: TrialSpec, target_epsilon: float | None, candidate: int | None
) -> tuple[TrialSpec, str]:
    """Return the trial with its tuned values, and the name of its setting.

    Raises: InvalidInput for a setting that was not tuned and so has no best candidate.
    """
    if sweep.tune is None or sweep.adapted is None:
        return trial, ""
    setting = setting_of(trial, target_epsilon, sweep.privacy.accountant, sweep.tune)
    if candidate is not None:
        return on_its_part(adapt(trial, sweep.adapted.candidates[candidate]), sweep.tune, candidate), setting
    if setting not in sweep.adapted.winners:
        raise InvalidInput("the sweep asks for a setting that was not tuned with the others; run it in another folder")
    return adapt(trial, sweep.adapted.winners[setting].values), setting


def _require_countable(sweep: SweepSpec) -> None:
    """Raises: InvalidInput for more than `MAX_TRIALS` trials, where axes that vary together count once."""
    later = {axis for group in _paired(sweep) for axis in group[1:]}
    shared, private = (
        math.prod(len(values) for axis, values in axes(sweep).items() if axis not in later)
        for axes in (shared_axes, private_axes)
    )
    trials = shared * (private + any(clipping.name == BASELINE for clipping in sweep.clipping))
    proposed = sweep.adapted.proposed.values() if sweep.adapted else ()
    trials *= max(map(len, proposed), default=len(_candidates(sweep)))
    if trials > MAX_TRIALS:
        raise InvalidInput(
            f"the grid has up to {trials:,} trials, but a sweep at most {MAX_TRIALS:,}; shorten its lists, or split it"
        )


def _with_own_noise(choice: Choice) -> Choice:
    """Use the schedule's own noise multiplier, if it has one, in place of the sweep's target or noise multiplier."""
    schedule = choice["schedule"]
    if OWN_NOISE not in schedule.params:
        return choice
    sigma = require_finite(f"noise.{OWN_NOISE}", schedule.params[OWN_NOISE], at_least=0.0)
    rest = {axis: value for axis, value in choice.items() if axis not in ("epsilon", "sigma")}
    params = {key: value for key, value in schedule.params.items() if key != OWN_NOISE}
    return {**rest, "schedule": Component(schedule.name, params), "sigma": sigma}


def _baseline(sweep: SweepSpec, choice: Choice, candidate: int | None) -> GridPoint:
    adjacency, audit = sweep.privacy.adjacency, sweep.audit
    own = {
        "optimizer": sweep.baseline.optimizer or choice["optimizer"],
        "clipping": Component(BASELINE),
        "noise": NoiseSpec(0.0),
        "audit": audit if audit is not None and audit.leaves_out_rows else None,
        "adjacency": None if adjacency is None else of_records(adjacency),
        "reference": sweep.reference,
    }
    return _point(sweep, choice, own, candidate, (NON_PRIVATE,))


def _private(
    sweep: SweepSpec,
    chosen: Choice,
    candidate: int | None,
    baseline: GridPoint | None,
    release: ReleaseSpec | None,
) -> GridPoint:
    choice = _with_own_noise(chosen)
    clipping, schedule, target = choice["clipping"], choice["schedule"], choice.get("epsilon")
    level = f"sigma{choice['sigma']:g}" if target is None else f"epsilon{target:g}"
    words = (short_name(clipping.name), short_name(schedule.name), level)
    sampling, declared = choice.get("user_sampling"), sweep.privacy.rows_per_user
    counted_with = declared.noise_multiplier if declared else None
    own = {
        "clipping": clipping,
        "noise": NoiseSpec(choice["sigma"] if target is None else 1.0, schedule),
        "audit": sweep.audit,
        "adjacency": sweep.privacy.adjacency,
        "budget": sweep.privacy.budget,
        "selection": sweep.tune.selection if sweep.tune else None,
        "users": None if sampling is None else UserSpec(sampling, choice["max_records_per_user"], counted_with),
    }
    return _point(sweep, choice, own, candidate, words, target, baseline.key if baseline else None, release)


def _point(
    sweep: SweepSpec,
    choice: Choice,
    own: Mapping[str, Any],
    candidate: int | None,
    words: Sequence[str],
    target: float | None = None,
    baseline: str | None = None,
    release: ReleaseSpec | None = None,
) -> GridPoint:
    """Return the trial of one combination. own: fields of private trials, or of baselines, alone."""
    shared = {axis: choice[axis] for axis in (*_SHARED, "seed")}
    common = {
        "delta": sweep.privacy.delta,
        "attacks": sweep.attacks or AttackSpec(),
        "min_group_size": sweep.min_group_size or MIN_GROUP_SIZE,
        "noise_source": sweep.noise_source,
        "execution": sweep.execution,
    }
    trial, setting = _adapted(sweep, TrialSpec(key="", **{**shared, **common, **own}), target, candidate)
    canonical = content(trial, target, sweep.privacy.accountant, release)
    users = () if trial.users is None else (f"{trial.users.sampling}{trial.users.max_records}",)
    key = trial_key((*words, *users, f"seed{trial.seed}"), canonical)
    return GridPoint(
        replace(trial, key=key),
        choice if candidate is None else {**choice, "candidate": candidate},
        target_epsilon=target,
        baseline=baseline,
        release=release,
        content=canonical,
        setting=setting,
        candidate=candidate,
    )


def _labelled(sweep: SweepSpec, found: tuple[GridPoint, ...]) -> tuple[GridPoint, ...]:
    hidden = _hidden(found)
    choices = [{**point.choice, **_values(point, hidden)} for point in found]
    if sweep.baseline.optimizer and "optimizer" not in hidden:  # then a baseline has no value on this axis
        choices = [
            {axis: value for axis, value in choice.items() if point.is_private or axis != "optimizer"}
            for point, choice in zip(found, choices, strict=True)
        ]
    return tuple(replace(point, labels=each) for point, each in zip(found, labels_of(choices), strict=True))


def _hidden(found: Sequence[GridPoint]) -> set[str]:
    """Return the fields without an axis in which trials of one choice differ, such as the noise source of an earlier
    version of the file. Without a label they would count as further seeds.
    """
    alike: dict[frozenset[tuple[str, Any]], set[tuple[str, str]]] = {}
    hidden = set[str]()
    for point in () if all(each.is_asked for each in found) else found:
        own = {(name, repr(value)) for name, value in parsed_json(point.content).items()}
        hidden |= {name for name, _ in own ^ alike.setdefault(frozenset(point.choice.items()), own)}
    return hidden


def _values(point: GridPoint, fields: Iterable[str]) -> dict[str, Any]:
    """Return the values of these fields of a trial's `content`: scalars and components; others as they are spelt."""
    written, plain = parsed_json(point.content) if fields else {}, str | int | float | Component
    found = {name: getattr(point.spec, name, None) for name in sorted(fields)}
    return {
        name: each if isinstance(each, plain) else str(written.get(name, "default")) for name, each in found.items()
    }


def rivals(point: GridPoint) -> str | None:
    """Return the name of the group of trials that a scheduler may compare this one with: its setting and seed.

    They differ only in hyperparameters, such as the learning rate, the clipping bound or the batch size. If a scheduler
    compared methods, schedules, targets or data too, it would stop settings that the sweep asks about, judged by their
    first epochs. None for a baseline, which is never stopped because private trials are compared with it.
    """
    if not point.is_private:
        return None
    spec = point.spec
    level = 1.0 if point.target_epsilon is not None else spec.noise.initial_noise_multiplier
    compared = replace(
        spec,
        key="",
        clipping=Component(spec.clipping.name),
        noise=NoiseSpec(level, Component(spec.noise.schedule.name)),
        optimizer=Component("any"),
        learning_rate_schedule=Component("any"),
        averaging=None,
        augmentation=None,
        sampling=replace(spec.sampling, batch_size=1, max_batch_size=None),
        epochs=1,
        budget=None,
    )
    return content(compared, point.target_epsilon)
