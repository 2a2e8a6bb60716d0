"""Measures time and memory of the steps of a trial, by a few real ones in this process. Nothing of the trial is kept.

Times and memory depend on the data, as in a real trial, where they are public.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from dpsweep.accounting.mechanism.trace import Release
from dpsweep.accounting.records.files import closed_to_strangers
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.workers.machine.devices import choose_device
from dpsweep.workers.machine.memory import peak_bytes
from dpsweep.workers.own_code.imports import NO_CODE, UserCode
from dpsweep.workers.spec import TrialSpec
from dpsweep.workers.training.norm_recorder import closed_afterwards
from dpsweep.workers.training.reproducible import reproducible
from dpsweep.workers.training.trainer import Trainer
from dpsweep.workers.trials.trial_setup import set_up

_MAX_STEPS: Final = 40
_ENOUGH_SECONDS: Final = 2.0
"""Total seconds of steps after which no more are measured, once `_MIN_STEPS` are done."""
_MIN_STEPS: Final = 3


@dataclass(frozen=True)
class TrialProbe:
    """Seconds of a step, without passes that compute norms of all examples, and the memory of a trial.

    memory: peak bytes of the process, libraries included. gpu_memory: peak bytes allocated on the GPU. steps: number of
    steps taken.
    """

    step: float
    memory: int
    gpu_memory: int
    steps: int


def probe_trial(spec: TrialSpec, releases: tuple[Release, ...] = (), code: UserCode = NO_CODE) -> TrialProbe:
    """Begin the trial in a temporary folder that only its owner can enter, take a few steps, and delete the folder.

    Seconds exclude other work of the machine. On a CPU they are the CPU time of the calling thread, which takes part in
    all parallel work. On a GPU they are elapsed time. Raises: InvalidInput as `run_trial` would.
    """
    device = choose_device(spec.execution.device)
    with (
        closed_to_strangers(),
        tempfile.TemporaryDirectory(prefix="dpsweep-probe-") as folder,
        reproducible(spec.execution, spec.seed),
    ):
        return _measured(spec, TrialFiles(str(Path(folder).resolve())), releases, code, device)


def _measured(
    spec: TrialSpec, files: TrialFiles, releases: tuple[Release, ...], code: UserCode, device: torch.device
) -> TrialProbe:
    clock = _gpu_clock if device.type == "cuda" else time.thread_time
    _forget_peak(device)
    trainer = set_up(spec, files, code, releases).trainer
    with closed_afterwards(trainer.stores):
        if trainer.needs_norms:
            trainer.refresh()
        first = _seconds(clock, trainer.advance)
        steps = _steps(trainer, clock)
        trainer.evaluations()  # may take more memory than a step
    return TrialProbe(
        step=statistics.median(steps or [first]),
        memory=peak_bytes(),
        gpu_memory=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0,
        steps=1 + len(steps),
    )


def _seconds(clock: Callable[[], float], work: Callable[[], object]) -> float:
    began = clock()
    work()
    return clock() - began


def _steps(trainer: Trainer, clock: Callable[[], float]) -> list[float]:
    """Return the seconds of each further step; empty if the trial has none."""
    found: list[float] = []
    while trainer.may_continue() and len(found) < _MAX_STEPS:
        if len(found) >= _MIN_STEPS and sum(found) > _ENOUGH_SECONDS:
            break
        found.append(_seconds(clock, trainer.advance))
    return found


def _gpu_clock() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


_RESET_PEAK: Final = Path("/proc/self/clear_refs")


def _forget_peak(device: torch.device) -> None:
    """Reset the memory peaks; if the system cannot, later readings include the peak of the process so far."""
    with contextlib.suppress(OSError):
        _RESET_PEAK.write_bytes(b"5")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
