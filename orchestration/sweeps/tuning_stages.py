"""Stages of a sweep with ``tune``: its tuning, its private selection, and the sweep of the chosen candidates. Pure.

Private selection chooses each trial from its own candidates, and the epsilon of the trial covers the choice. The
candidates of all trials form their own sweep in the private folder. Their number, their scores and all candidates
except the chosen one of each trial are never shown (docs/accounting.md, Private selection).
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.mechanism.random_trials import ExponentialChoice, RandomTrials
from dpsweep.accounting.mechanism.trace import Selection, Trace
from dpsweep.orchestration.sweeps.planned import PlannedTrial
from dpsweep.orchestration.sweeps.schema import SweepSpec
from dpsweep.orchestration.sweeps.text import parse_text, with_section
from dpsweep.orchestration.sweeps.tune import Adapted, DrawnRun, TuneSettings, Winner, candidates_of
from dpsweep.workers.spec import Component

_SEEDS: Final = 2**31
"""Seeds of runs are drawn below this. A seed only names a run; it is no secret, because the noise has its own key."""


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
