"""Runs a sweep: in one stage, or with ``tune`` in two."""

from __future__ import annotations

from dpsweep.orchestration.pipeline.private_selection import run_private_selection
from dpsweep.orchestration.pipeline.request import NO_DISPLAY, Display, Outcome, RunRequest
from dpsweep.orchestration.pipeline.stage import run_stage
from dpsweep.orchestration.pipeline.tuning import run_tuning
from dpsweep.orchestration.pipeline.until import run_until_told_apart
from dpsweep.orchestration.records.safety import require_safe


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
