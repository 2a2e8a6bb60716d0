"""The question to `dpsweep epsilon`, and the run that it is about."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.mechanism.random_trials import RandomTrials
from dpsweep.accounting.mechanism.reasons import Reason
from dpsweep.accounting.mechanism.schedules import parse_schedule
from dpsweep.accounting.mechanism.trace import Trace
from dpsweep.accounting.records import TrialFiles
from dpsweep.orchestration.commands.run_flags import RunFlags
from dpsweep.orchestration.commands.run_shape import strategy_fields
from dpsweep.orchestration.commands.stored_trial import stored_reasons, stored_trace
from dpsweep.orchestration.records.layout import absolute


@dataclass(frozen=True)
class AccountedRun:
    """A run, planned or stored.

    `fields`: what the JSON output says of it. `dataset_size`: None if unknown. `files`: None unless a trial is named.
    `reasons`: why every epsilon of the named trial is an estimate; empty where no trial is named, and only the
    mechanism is accounted for.
    """

    trace: Trace
    fields: dict[str, Any]
    dataset_size: int | None
    files: TrialFiles | None = None
    reasons: tuple[Reason, ...] = ()


@dataclass(frozen=True)
class RunSource:
    """The options that name a stored run, --trial and --trace, and the flags that describe a planned one instead."""

    trial: str | None
    trace: str | None
    flags: RunFlags

    def check(self) -> None:
        """Raise InvalidInput if more than one run is named or described."""
        if self.trial is not None and self.trace is not None:
            raise InvalidInput("give either --trial or --trace, not both")
        if self._is_stored and self.flags.describe_a_run:
            raise InvalidInput(
                "--trial and --trace say what was run: drop the flags that describe noise, batches and length"
            )

    def run(self) -> AccountedRun:
        """Return the run. Raises: InvalidInput for bad flags or a missing file, DataCorruption for a damaged one."""
        return self._stored() if self._is_stored else self._planned()

    @property
    def _is_stored(self) -> bool:
        return self.trial is not None or self.trace is not None

    def _stored(self) -> AccountedRun:
        files = None if self.trial is None else TrialFiles(absolute(self.trial))
        trace = stored_trace(absolute(str(self.trace)) if files is None else files.trace)
        fields: dict[str, Any] = {"trial": self.trial, "trace": self.trace, "steps": trace.steps}
        return AccountedRun(trace, fields, trace.dataset_size, files, () if files is None else stored_reasons(files))

    def _planned(self) -> AccountedRun:
        flags = self.flags
        schedule = parse_schedule(flags.schedule, flags.required_noise())
        shape = flags.shape()
        trace = shape.trace(schedule, epochs=flags.epochs, steps=flags.steps)
        fields = {
            "sampling": flags.sampling,
            "schedule": flags.schedule,
            "noise_multiplier": flags.noise_multiplier,
            "steps": trace.steps,
            **strategy_fields(shape, trace),
        }
        return AccountedRun(trace, fields, flags.dataset_size)


@dataclass(frozen=True)
class EpsilonRequest:
    """The question about a run: the options of `dpsweep epsilon` of the same names.

    trials: number of runs if only the best of them is released, else None.
    """

    delta: float
    accountant: str
    group_size: str
    compare: bool
    individual: str | None
    examples: str | None
    risk: bool
    prior: float | None
    trials: RandomTrials | None
    plot: Path | None
    curve: Path | None

    def check(self, source: RunSource) -> None:
        """Raise InvalidInput for options that contradict each other or need another one."""
        of_examples = self.individual or self.examples
        if self.trials is not None and (self.compare or of_examples or self.risk or self.plot or self.curve):
            raise InvalidInput(
                "--selection-trials gives the epsilon of the released run alone: drop --compare, --individual, "
                "--examples, --risk, --plot and --curve"
            )
        if of_examples and source.trial is None:
            raise InvalidInput("--individual and --examples need --trial: they read its recorded contributions")
        source.check()
        if self.prior is not None and not self.risk:
            raise InvalidInput("--prior needs --risk, which shows the bound on reconstruction")
