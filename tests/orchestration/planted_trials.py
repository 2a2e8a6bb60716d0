"""Sweeps that are trained trial by trial, with values planted in each before it is accounted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.orchestration.execution.completion import Times, complete_trial
from dpsweep.orchestration.pipeline import render_again
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.sweeps.manifest import new_manifest, write_manifest
from dpsweep.orchestration.sweeps.plan import plan_sweep
from dpsweep.orchestration.sweeps.schema import parse_sweep
from dpsweep.workers.trials.trial import run_trial


def finished_with(planted: Callable[[TrialFiles], None], text: str, folder: Path) -> SweepFiles:
    """Run the sweep ``text`` in ``folder``, and call ``planted`` with each trained trial."""
    sweep, files = parse_sweep(text), SweepFiles(str(folder))
    write_manifest(files, new_manifest(sweep, text))
    for planned in plan_sweep(sweep).trials:
        trial = files.trial(planned.key)
        run_trial(planned.spec, trial.root, releases=planned.releases)
        planted(trial)
        complete_trial(planned, trial, sweep, Times(0.0, 1.0))
    render_again(files.root)
    return files
