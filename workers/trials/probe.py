"""Measures time and memory of the parts of a trial, by a few real steps in this process. Nothing of the trial is kept.

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
from dpsweep.workers.trials.trial import begin

_MAX_STEPS: Final = 40
_ENOUGH_SECONDS: Final = 2.0
"""Total seconds of steps after which no more are measured, once `_MIN_STEPS` are done."""
_MIN_STEPS: Final = 3
_SAMPLE_EXAMPLES: Final = 2048
"""Number of examples from which the time of a norm pass over all examples is estimated."""
_FULL_PASS_SECONDS: Final = 10.0
"""Estimated seconds of a norm pass over all examples below which the whole pass is measured."""


@dataclass(frozen=True)
class TrialProbe:
    """Seconds that the parts of a trial take, and its memory.

    begin: load the data, build the model and write the first checkpoint. step: one step without a norm pass. refresh:
    one norm pass over all examples; another thread stores its snapshot. evaluation, checkpoint: one of each. memory:
    peak bytes of the process, libraries included. gpu_memory: peak bytes allocated on the GPU. cores: CPU seconds per
    second of a step. steps: number of steps taken.
    """

    begin: float
    step: float
    refresh: float
    evaluation: float
    checkpoint: float
    memory: int
    gpu_memory: int
    cores: float
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
    took = _gpu_clock if device.type == "cuda" else time.thread_time
    _forget_peak(device)
    started = took()
    begun = begin(spec, files, code, releases)
    beginning, trainer = took() - started, begun.trainer
    with closed_afterwards(trainer.recorders):
        whole = len(begun.dataset.train)
        refresh = _refresh(trainer, whole, took) if not spec.norms.are_off else 0.0
        first = _seconds(took, trainer.advance)
        used = time.process_time()
        steps = _steps(trainer, took)
        cores = (time.process_time() - used) / max(sum(steps), 1e-9) if steps else 1.0
        trainer.evaluations()
        evaluation = _seconds(took, trainer.evaluations)
        checkpoint = _seconds(took, begun.save)
    return TrialProbe(
        begin=beginning,
        step=statistics.median(steps or [first]),
        refresh=refresh,
        evaluation=evaluation,
        checkpoint=checkpoint,
        memory=peak_bytes(),
        gpu_memory=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0,
        cores=cores,
        steps=1 + len(steps),
    )


def _refresh(trainer: Trainer, examples: int, clock: Callable[[], float]) -> float:
    """Return the seconds of a norm pass over all examples, estimated from a sample if it would take long and is not
    needed.
    """
    trainer.measure(_SAMPLE_EXAMPLES)  # the first pass also compiles and allocates
    refresh = _seconds(clock, lambda: trainer.measure(_SAMPLE_EXAMPLES)) * max(1.0, examples / _SAMPLE_EXAMPLES)
    return _seconds(clock, trainer.refresh) if refresh < _FULL_PASS_SECONDS or trainer.needs_norms else refresh


def _seconds(clock: Callable[[], float], work: Callable[[], object]) -> float:
    began = clock()
    work()
    return clock() - began


def _steps(trainer: Trainer, clock: Callable[[], float]) -> list[float]:
    """Return the seconds of each further step, without its norm pass; empty if the trial has no further step."""
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
        _RESET_PEAK.write_text("5")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
