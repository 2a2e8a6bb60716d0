"""Stages of a sweep with ``tune``: its tuning, its private selection, and the sweep of the chosen candidates. Pure.

Private selection chooses each trial from its own candidates, and the epsilon of the trial covers the choice. The
candidates of all trials form their own sweep in the private folder. Their number, their scores and all candidates
except the chosen one of each trial are never shown (docs/accounting.md, Private selection).

`search: optuna` proposes candidates from the scores of earlier ones. Half of the samples are drawn at random, the same
for every setting. The others are proposed for each setting from its own scores, with a tree-structured Parzen estimator
(Bergstra et al. 2011), in rounds; candidates of one round train in parallel. Equal scores give equal proposals, so an
interrupted tuning continues as it would have without interruption.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.mechanism.random_trials import ExponentialChoice, RandomTrials
from dpsweep.accounting.mechanism.trace import Selection, Trace
from dpsweep.orchestration.sweeps.planned import PlannedTrial
from dpsweep.orchestration.sweeps.schema import SweepSpec
from dpsweep.orchestration.sweeps.text import parse_text, with_section
from dpsweep.orchestration.sweeps.tune import Adapted, DrawnRun, TuneSettings, Winner, candidates_of, rounded_in_range
from dpsweep.workers.spec import Component

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

_SEEDS: Final = 2**31
"""Seeds of runs are drawn below this. A seed only names a run; it is no secret, because the noise has its own key."""


def why_unlike(trials: Iterable[PlannedTrial]) -> str | None:
    """Return why no private selection among these candidates is possible; None if it is.

    All private candidates of a setting must have the same trace, and the trace must carry a guarantee.
    """
    first: dict[str, Trace] = {}
    for trial in trials:
        if trial.spec.is_private:
            trace = replace(trial.trace, contributions="estimate")
            if first.setdefault(trial.point.setting, trace) != trace:
                return (
                    f"no bound on this selection is proven: candidate {trial.key} is another mechanism than others of "
                    "its setting; tune only what leaves noise and queries as they are"
                )
            if trace.kind != "guarantee":
                return f"a selection needs a guarantee, but that of {trial.key} is none; use another schedule"
    return None


def draw_runs(settings: Iterable[str], selection: Selection, candidates: int) -> dict[str, tuple[DrawnRun, ...]]:
    """Draw the runs of every setting, all with different seeds, from the operating system's randomness.

    `RandomTrials`: a secret random number of runs, each of a uniformly drawn candidate. `ExponentialChoice`: each
    candidate once.
    """
    source = secrets.SystemRandom()

    def places() -> list[int]:
        match selection:
            case RandomTrials():
                return [source.randrange(candidates) for _ in range(selection.number_at(source.random()))]
            case ExponentialChoice():
                return list(range(selection.candidates))

    drawn = {setting: places() for setting in settings}
    seeds = iter(source.sample(range(_SEEDS), sum(map(len, drawn.values()))))
    return {
        setting: tuple(DrawnRun(candidate=place, seed=next(seeds)) for place in found)
        for setting, found in drawn.items()
    }


def selection_stage(sweep: SweepSpec, text: str, drawn: Mapping[str, tuple[DrawnRun, ...]]) -> str:
    """Return the text of the sweep file of the runs that were drawn for ``sweep``; it is private data.

    text: the file of ``sweep`` itself.
    """
    adapted = Adapted(candidates=candidates_of(_required(sweep)), drawn=dict(drawn))
    stage = sweep.model_copy(update={"name": f"{sweep.name}-selection", "adapted": adapted})
    return _written(stage, sweep, text, f"The candidates of {sweep.name}, private")


def while_tuning(sweep: SweepSpec, adapted: Adapted | None = None) -> SweepSpec:
    """Return the tuning sweep of ``sweep``. adapted: the candidates; by default as in `candidates_of`."""
    tune = _required(sweep)
    own = {"data": (tune.data,)} if tune.data is not None else {}
    return sweep.model_copy(
        update={
            **own,
            "name": f"{sweep.name}-tuning",
            "seeds": tune.seeds,
            "attacks": None,
            "audit": None,
            "release": Component("none"),
            "accounting": sweep.accounting.model_copy(update={"group_sizes": (1,)}),
            "adapted": adapted or Adapted(candidates=candidates_of(tune)),
        }
    )


def _required(sweep: SweepSpec) -> TuneSettings:
    if sweep.tune is None:
        raise InvalidInput(f"the sweep {sweep.name} has nothing to tune; give it a section tune")
    return sweep.tune


def tuning_stage(sweep: SweepSpec, text: str, adapted: Adapted | None = None) -> str:
    """Return the text of the sweep file of `while_tuning`. text: file of ``sweep`` itself."""
    return _written(while_tuning(sweep, adapted), sweep, text, f"The tuning of {sweep.name}")


def _written(stage: SweepSpec, sweep: SweepSpec, text: str, what: str) -> str:
    """Return ``text``, the file of ``sweep``, with the values that its copy ``stage`` has in place of those."""
    changed = {key for key in SweepSpec.model_fields if getattr(stage, key) is not getattr(sweep, key)}  # 1 equals 1.0
    content = {key: value for key, value in parse_text(text).items() if key not in changed}
    content |= stage.model_dump(mode="json", include=changed - {"data"}, exclude_defaults=True)
    if "data" in changed:
        content["data"] = content["tune"]["data"]  # a component has other keys in a file than when dumped
    return f"# {what}: written by dpsweep.\n{json.dumps(content)}\n"


def tuned_stage(text: str, winners: Mapping[str, Winner]) -> str:
    """Return the sweep file ``text`` with a section ``adapted`` that holds the best candidate of each setting."""
    found = {"winners": {setting: winner.model_dump(mode="json") for setting, winner in winners.items()}}
    return with_section(text, "adapted", found, "What tuning chose: written by dpsweep.")


_ROUNDS: Final = 3
"""Number of rounds of proposals after the random candidates."""


def require_optuna(tune: TuneSettings) -> None:
    """Raise InvalidInput if the search needs Optuna and it is not installed."""
    if tune.search == "optuna" and importlib.util.find_spec("optuna") is None:
        raise InvalidInput(
            "tune.search optuna needs the package optuna, which is not installed: pip install 'dpsweep[optuna]', or "
            "use search: random"
        )


Scores = Mapping[str, Mapping[int, float]]
"""Mean score over seeds by setting and index of the candidate; larger is better, NaN if the candidate failed."""


def next_candidates(tune: TuneSettings, tried: Adapted, scores: Scores) -> Adapted | None:
    """Add the next proposals for every setting to the candidates in ``tried``.

    Returns None if every setting has tried all its samples, and for another search than optuna.
    """
    if tune.search != "optuna":
        return None
    candidates = list(tried.candidates)
    places = {_spelt(values): place for place, values in enumerate(candidates)}
    first, samples = tuple(range(len(candidates_of(tune)))), tune.samples or 1
    per_round = max(1, math.ceil((samples - len(first)) / _ROUNDS))
    proposed: dict[str, tuple[int, ...]] = {}
    for setting, found in scores.items():
        before = tried.proposed.get(setting, first)
        known = [(candidates[place], found[place]) for place in dict.fromkeys(before) if place in found]
        added = []
        for values in _propose(tune, setting, known, min(per_round, samples - len(before))):
            if _spelt(values) not in places:
                places[_spelt(values)] = len(candidates)
                candidates.append(values)
            added.append(places[_spelt(values)])
        proposed[setting] = (*before, *added)
    grew = any(len(found) > len(tried.proposed.get(setting, first)) for setting, found in proposed.items())
    return Adapted(candidates=tuple(candidates), proposed=proposed) if grew else None


def _spelt(values: Mapping[str, Any]) -> str:
    return json.dumps(values, sort_keys=True)


def _propose(
    tune: TuneSettings, setting: str, known: Sequence[tuple[Mapping[str, Any], float]], count: int
) -> list[dict[str, Any]]:
    """Ask Optuna for ``count`` candidates of a setting. known: candidates tried so far, with their scores."""
    import optuna  # late: an optional extra

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space = {place: _distribution(values) for place, values in tune.parameters.items()}
    seed = hashlib.sha256(f"{tune.seeds[0]} {setting} {len(known)}".encode()).digest()
    sampler = optuna.samplers.TPESampler(
        seed=int.from_bytes(seed[:4], "big"), n_startup_trials=min(len(known), 10), constant_liar=True
    )
    study = optuna.create_study(direction="maximize", sampler=sampler)
    for values, score in known:
        if math.isfinite(score):
            params = {place: _as_param(tune.parameters[place], value) for place, value in values.items()}
            study.add_trial(optuna.trial.create_trial(params=params, distributions=space, value=score))
    asked = [study.ask(space).params for _ in range(count)]
    return [{place: _as_value(tune.parameters[place], param) for place, param in each.items()} for each in asked]


def _distribution(values: Any) -> BaseDistribution:
    from optuna import distributions

    match values:
        case {"uniform": (low, high)}:
            return distributions.FloatDistribution(low, high)
        case {"log_uniform": (low, high)}:
            return distributions.FloatDistribution(low, high, log=True)
    return distributions.CategoricalDistribution(tuple(range(len(values))))


def _as_param(values: Any, value: Any) -> Any:
    """Return a value in Optuna's form: its index if ``values`` is a list, because Optuna takes no lists or maps as
    values.
    """
    return values.index(value) if isinstance(values, list) else value


def _as_value(values: Any, param: Any) -> Any:
    return values[param] if isinstance(values, list) else rounded_in_range(param, values)
