"""Private selection: each trial is chosen from its own candidates, and its epsilon covers the choice. Pure.

The candidates of all trials form their own sweep in the private folder. Their number, their scores and all
candidates except the chosen one of each trial are never shown (docs/accounting.md, Private selection).
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.mechanism.exponential_choice import ExponentialChoice
from dpsweep.accounting.mechanism.random_trials import RandomTrials
from dpsweep.accounting.mechanism.trace import Selection, Trace
from dpsweep.orchestration.records.release_modes import release_mode
from dpsweep.orchestration.sweeps.text import parse_text
from dpsweep.orchestration.sweeps.tune import Adapted, DrawnRun, TuneSettings, candidates_of
from dpsweep.workers.noise.noise_sources import noise_source_kind
from dpsweep.workers.spec import AttackSpec

if TYPE_CHECKING:
    from dpsweep.orchestration.sweeps.planned import PlannedTrial
    from dpsweep.orchestration.sweeps.schema import SweepSpec

_ACCOUNTANTS: Final = ("auto", "pld", "rdp")
_SEEDS: Final = 2**31
"""Seeds of runs are drawn below this. A seed only names a run; it is no secret, because the noise has its own key."""


def check_selection(tune: TuneSettings, sweep: SweepSpec) -> None:
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
    if any(schedule.name == "validation" for schedule in sweep.noise):
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
        if accountant not in _ACCOUNTANTS:
            refuse(f"the accountant {accountant} covers no selection", f"choose {', '.join(_ACCOUNTANTS)}")


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


def unlike(trials: Iterable[PlannedTrial]) -> str | None:
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
    assert sweep.tune is not None, "only a sweep with tune has candidates"
    adapted = Adapted(candidates=candidates_of(sweep.tune), drawn=dict(drawn)).model_dump(mode="json")
    content = {**parse_text(text), "name": f"{sweep.name}-selection", "adapted": adapted}
    return f"# The candidates of {sweep.name}, private: written by dpsweep.\n{json.dumps(content)}\n"
