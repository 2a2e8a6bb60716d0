"""`search: optuna`: candidates that Optuna proposes from the scores of earlier candidates. Pure.

Half of the samples are drawn at random, the same for every setting. The others are proposed for each setting from its
own scores, with a tree-structured Parzen estimator (Bergstra et al. 2011), in rounds; candidates of one round train in
parallel. Equal scores give equal proposals, so an interrupted tuning continues as it would have without interruption.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from dpsweep.accounting.errors import InvalidInput
from dpsweep.orchestration.sweeps.tune import Adapted, TuneSettings, candidates_of, rounded

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

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
    first = tuple(range(len(candidates_of(tune))))
    proposed: dict[str, tuple[int, ...]] = {}
    for setting, found in scores.items():
        before = tried.proposed.get(setting, first)
        known = [(candidates[place], found[place]) for place in dict.fromkeys(before) if place in found]
        added = []
        for values in _propose(tune, setting, known, min(_per_round(tune), _samples(tune) - len(before))):
            if _spelt(values) not in places:
                places[_spelt(values)] = len(candidates)
                candidates.append(values)
            added.append(places[_spelt(values)])
        proposed[setting] = (*before, *added)
    grew = any(len(found) > len(tried.proposed.get(setting, first)) for setting, found in proposed.items())
    return Adapted(candidates=tuple(candidates), proposed=proposed) if grew else None


def _samples(tune: TuneSettings) -> int:
    return tune.samples or 1


def _per_round(tune: TuneSettings) -> int:
    return max(1, math.ceil((_samples(tune) - len(candidates_of(tune))) / _ROUNDS))


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
    return values[param] if isinstance(values, list) else rounded(param, values)
