"""Runs a sweep: in one stage, with ``tune`` in two, or with ``--until`` with ever more seeds.

At look k, the intervals of all verdicts together have the level 1 - a_k with a_k = 0.05 * 6 / (pi^2 k^2). The a_k add
up to 0.05 over all looks there could be. So the probability of any wrong verdict at any look stays below 0.05, however
the number of looks was decided (alpha spending; a union bound). Every seed is trained and accounted as any other, and
the composed epsilon counts all of them. The decision to go on depends on results on test data alone.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from dpsweep.accounting.errors import InvalidInput
from dpsweep.orchestration.comparison.findings import Findings, findings
from dpsweep.orchestration.comparison.stored import stored_evidence
from dpsweep.orchestration.pipeline.request import NO_DISPLAY, Display, Outcome, RunRequest
from dpsweep.orchestration.pipeline.stage import run_stage
from dpsweep.orchestration.pipeline.tuning import run_private_selection, run_tuning
from dpsweep.orchestration.records.layout import require_safe
from dpsweep.orchestration.records.manifest import read_manifest
from dpsweep.orchestration.sweeps.schema import SweepSpec, parse_sweep
from dpsweep.orchestration.sweeps.text import parse_text, with_section


def run_sweep(request: RunRequest, display: Display = NO_DISPLAY) -> Outcome:
    """Run a sweep until all its trials have ended; a folder that holds it, or an earlier version of it, is continued.

    With ``tune``, candidates are trained first, as their own sweep in the subfolder ``tuning``. A private selection
    trains them in the private folder, which only the best of each trial leaves. Trials with results keep them, and
    their files are not written again; ``display`` gets their number. A trial that fails does not end the run; the
    record lists it. Raises: InvalidInput, before any trial starts, for a trial that cannot run, and for a cluster,
    storage or MLflow that cannot be used. Also for a folder that holds a sweep of another name or that others can
    change.
    """
    require_safe(request.files)
    if request.most_seeds is not None:
        return run_until_told_apart(request, request.most_seeds, display)
    if request.sweep.tune is None or request.sweep.adapted is not None:
        return run_stage(request, display)
    if request.sweep.tune.is_selection:
        return run_private_selection(request, display)
    return run_tuning(request, display)


_GROWTH: Final = 1.5
"""Factor by which the number of seeds grows from look to look, since every look costs level."""
_FIRST: Final = 2
"""Least number of seeds of a look: one seed decides nothing."""


def run_until_told_apart(request: RunRequest, most: int, display: Display) -> Outcome:
    """Run the sweep with ever more seeds until every method can be told from the best in the main score.

    most: largest number of seeds. A folder that an earlier run of the same file left is continued at its look. Raises:
    InvalidInput as `run_sweep`, for fewer seeds than two, and for a private selection, whose seeds are drawn.
    """
    if request.sweep.tune is not None and request.sweep.tune.is_selection:
        raise InvalidInput("--until adds seeds, and a private selection draws its own; leave out one of them")
    if most < _FIRST or most < len(request.sweep.seeds):
        raise InvalidInput(
            f"--max-seeds is {most}, and the sweep starts with {max(_FIRST, len(request.sweep.seeds))} seeds; raise it"
        )
    text = _begun(request) or _looking(request.text, _seeds(request.sweep.seeds, _FIRST), 1)
    while True:
        spec = parse_sweep(text)
        outcome = run_sweep(replace(request, sweep=spec, text=text, most_seeds=None), display)
        if outcome.stopped or outcome.record.failed:
            return outcome
        data = outcome.record.data()
        found = findings(data, stored_evidence(outcome.files, data))
        seeds = len(spec.seeds)
        if told_apart(found):
            display.warn(f"told apart with {seeds} seeds, at look {spec.compare.looks}")
            return outcome
        if seeds >= most:
            display.warn(f"not told apart with {seeds} seeds, as many as --max-seeds allows")
            return outcome
        more = more_seeds(seeds, most)
        display.warn(f"not told apart with {seeds} seeds: the sweep goes on to {more}, which costs privacy")
        request = replace(request, retry=(), sources=())
        text = _looking(outcome.record.manifest.text, _seeds(spec.seeds, more), spec.compare.looks + 1)


def more_seeds(seeds: int, most: int) -> int:
    """Return the number of seeds of the look that follows one with ``seeds`` of them, at most ``most``."""
    return min(most, math.ceil(_GROWTH * seeds))


def told_apart(found: Findings) -> bool:
    """Return whether every other method differs from the best one in the main score."""
    best = found.best(found.main.name, found.methods)
    return best is not None and not found.undecided(best, found.main.name, found.methods)


def _begun(request: RunRequest) -> str | None:
    """Return the stored file that an earlier run of the same request has grown to; None if there is none."""
    stored = read_manifest(request.files)
    if stored is None:
        return None
    before = parse_sweep(stored.text)
    return stored.text if before.compare.looks and _asked(before) == _asked(request.sweep) else None


def _asked(sweep: SweepSpec) -> dict[str, object]:
    """Return the sweep without what looks add to it."""
    compare = sweep.compare.model_copy(update={"looks": 0})
    return sweep.model_copy(update={"seeds": (), "adapted": None, "compare": compare}).plain()


def _seeds(given: tuple[int, ...], count: int) -> list[int]:
    """Return the given seeds, and the smallest others, ``count`` together unless more are given."""
    others = (seed for seed in range(len(given) + count) if seed not in given)
    return [*given, *(next(others) for _ in range(count - len(given)))]


def _looking(text: str, seeds: list[int], look: int) -> str:
    """Return the sweep file with these seeds at this look."""
    grown = with_section(text, "seeds", seeds, "Seeds that --until told-apart added: written by dpsweep.")
    compare = parse_text(grown).get("compare") or {}
    return with_section(grown, "compare", {**compare, "looks": look}, "The look at which verdicts are reached.")
