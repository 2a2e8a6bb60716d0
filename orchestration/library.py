"""The Python library: plan, run and open sweeps. Its names are exported by the package ``dpsweep``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import yaml

from accounting.errors import InvalidInput
from orchestration.execution.environment import EMBEDDED, prepare_environment

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn

    from accounting.mechanism import Trace
    from accounting.records.layout import TrialFiles
    from accounting.records.shards import Epsilons
    from orchestration.comparison.record import SweepRecord
    from orchestration.records.layout import SweepFiles
    from orchestration.records.results import StoredResult
    from orchestration.records.states import TrialState
    from orchestration.sweeps.grid import GridPoint
    from orchestration.sweeps.plan import Plan
    from orchestration.sweeps.schema import SweepSpec
    from workers.imports import UserCode
    from workers.spec import TrialSpec


@dataclass(frozen=True)
class Trial:
    """One trial of a stored sweep. Made by `Sweep.trials`."""

    _record: SweepRecord
    _point: GridPoint
    _files: TrialFiles
    _code: UserCode

    @property
    def key(self) -> str:
        """Its name in the sweep, and that of its folder."""
        return self._point.key

    @property
    def spec(self) -> TrialSpec:
        """What was trained; of a trial that is not over, what was asked for, its noise not yet calibrated."""
        return self.result.spec if self.result is not None else self._point.spec

    @property
    def state(self) -> TrialState:
        """``finished``, ``stopped`` by a scheduler, ``failed``, or else ``pending``."""
        return self._record.status(self.key).state

    @property
    def result(self) -> StoredResult | None:
        """What the trial found; None where it has not finished and was not stopped."""
        return self._record.status(self.key).result

    @property
    def error(self) -> str | None:
        """Why the trial failed, as far as that may be shown."""
        return self._record.status(self.key).error

    @property
    def trace(self) -> Trace:
        """The mechanisms that were run: what every accountant takes. Raises: InvalidInput for a trial not over."""
        from accounting.records.traces import read_trace
        from orchestration.records.results import StoppedTrial

        result = self.result
        if result is None:
            raise self._unfinished()
        return result.trace if isinstance(result, StoppedTrial) else read_trace(self._files.trace)

    def epsilons(self) -> Epsilons:
        """The privacy cost of every training example: arrays [examples] of ``example_ids``, ``upper``, ``lower``.

        Private data of these examples, not to be published. ``kind`` says whether they are guarantees or estimates,
        at ``delta``. Raises: InvalidInput where they were not computed or are deleted, DataCorruption for damage.
        """
        from accounting.records.files import exists
        from accounting.records.parts import MANIFEST
        from accounting.records.shards import read_epsilons

        if not exists(f"{self._files.epsilons}/{MANIFEST}"):
            raise InvalidInput(
                f"{self._files.epsilons} holds no epsilons of examples: the trial is not private or not finished, or "
                "its private folder was deleted; resume the sweep, or choose another trial"
            )
        return read_epsilons(self._files.epsilons)

    def model(self) -> nn.Module:
        """The trained model, in evaluation mode on the CPU: prepared features [n, ...] to logits [n, classes].

        Nothing stored is executed. A model of the user's own is imported only if it was allowed when the sweep was
        opened. Raises: InvalidInput for a trial that did not finish or a model that is not allowed, DataCorruption for
        damaged files.
        """
        from workers.trained import load_model

        self._require_weights()
        return load_model(self._files, self.spec, self._code)

    def predict(self, examples: npt.ArrayLike) -> npt.NDArray[np.float32]:
        """Logits [n, classes], not probabilities, of examples [n, ...] as the trial's data source stores them.

        Pictures as bytes, rows as encoded by their source: the trial's preprocessing and preparation are applied as in
        its evaluation. The class is the largest logit; of a single column, whether it is above 0. Raises: as `model`,
        and InvalidInput for examples of another shape or type.
        """
        from workers.trained import load_trained

        self._require_weights()
        return load_trained(self._files, self.spec, self._code).logits(examples)

    def _require_weights(self) -> None:
        from orchestration.records.integrity import require_unaltered
        from orchestration.records.results import TrialResult

        result = self.result
        if not isinstance(result, TrialResult):
            raise self._unfinished()
        for uri in (self._files.model, self._files.inputs):
            require_unaltered(self._files, result, uri)

    def _unfinished(self) -> InvalidInput:
        return InvalidInput(f"trial {self.key} is {self.state.word}, not finished; resume the sweep and open it again")


@dataclass(frozen=True)
class Sweep:
    """A sweep as it was on disk when it was opened. Made by `open_sweep` and `run`."""

    _record: SweepRecord
    _files: SweepFiles
    _code: UserCode

    @property
    def name(self) -> str:
        """What its file calls it."""
        return self._record.sweep.name

    @property
    def folder(self) -> str:
        """Absolute path or URI of the sweep's folder."""
        return self._files.root

    @property
    def trials(self) -> Mapping[str, Trial]:
        """Every trial of the grid by its key, in the order of the results."""
        points = self._record.points
        return MappingProxyType(
            {point.key: Trial(self._record, point, self._files.trial(point.key), self._code) for point in points}
        )

    @property
    def failed(self) -> tuple[Trial, ...]:
        """The trials that failed."""
        from orchestration.records.states import TrialState

        return tuple(trial for trial in self.trials.values() if trial.state is TrialState.FAILED)

    def results(self) -> pd.DataFrame:
        """One row per trial: those of results.json, with a column for each nested value, as ``labels.clipping``.

        Costs of groups are in columns by group size, as ``groups.4.epsilon``. An infinite epsilon is missing, beside
        ``private`` False.
        """
        import pandas as pd

        from orchestration.comparison.record import rows

        return pd.DataFrame([dict(_flat(row)) for row in rows(self._record)])

    def report(self) -> str:
        """Verify every stored file, write the reports again, and return the path of the one that may be shared.

        Raises: DataCorruption with one line for each damaged file.
        """
        from orchestration.pipeline import render_again

        return render_again(self._files.root).files.report


def _flat(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in row.items():
        if key == "groups" and isinstance(value, list):
            value = {str(estimate["group_size"]): estimate for estimate in value}
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


SweepLike = str | Path | Mapping[str, Any]
"""A sweep: the path of its file, its text (of more than one line), or the text as a mapping."""


def open_sweep(folder: str | Path, *, allow_code: Sequence[str] = ()) -> Sweep:
    """The sweep in a folder or at a URI that ``dpsweep run`` wrote; files of models are read when they are asked for.

    allow_code: modules and files of the user's own that `Trial.model` and `Trial.predict` may import, such as
    ``["my_models.py"]``; without it they import none. Raises: InvalidInput where there is no sweep or a module is not
    found, DataCorruption for damage.
    """
    from orchestration.comparison.stored import stored_record
    from orchestration.records.layout import SweepFiles, absolute
    from orchestration.sweeps.user_code import allowed_again

    files = SweepFiles(absolute(str(folder)))
    record = stored_record(files)
    return Sweep(record, files, allowed_again(record.sweep, allow_code))


def plan(sweep: SweepLike, *, allow_code: Sequence[str] = ()) -> Plan:
    """What a sweep would do: noise, steps and worst-case epsilon of each trial, and why one is refused; trains nothing.

    As ``dpsweep plan``: a sweep is code, and models of the user's own beside its file run on a few rows. The folder of
    a sweep given as text or mapping is the working directory. Raises: InvalidInput for a sweep that cannot be read.
    """
    from orchestration.sweeps.plan import plan_sweep

    spec, _, code = _read(sweep, allow_code)
    return plan_sweep(spec, code)


def run(
    sweep: SweepLike,
    *,
    output: str | Path | None = None,
    address: str = EMBEDDED,
    resume: bool = False,
    tracking_uri: str | None = None,
    allow_code: Sequence[str] = (),
) -> Sweep:
    """Train, account and compare every trial of a sweep, as ``dpsweep run`` with the same options; shows nothing.

    A trial that fails is in `Sweep.failed`. Raises: InvalidInput, before any trial starts, for a sweep that cannot run
    and for a process that is connected to Ray already.
    """
    spec, text, code = _read(sweep, allow_code)
    prepare_environment(address)
    from orchestration.pipeline import NoDisplay, RunRequest, run_sweep

    tracking_uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
    folder = None if output is None else str(output)
    outcome = run_sweep(RunRequest(spec, text, folder, address, resume, tracking_uri, code), NoDisplay())
    return Sweep(outcome.record, outcome.files, code)


def _read(sweep: SweepLike, allow_code: Sequence[str]) -> tuple[SweepSpec, str, UserCode]:
    from orchestration.sweeps.schema import parse_sweep
    from orchestration.sweeps.text import read_text
    from orchestration.sweeps.user_code import permitted

    folder, origin = Path.cwd(), "sweep"
    if isinstance(sweep, Mapping):
        try:
            text = yaml.safe_dump(dict(sweep), sort_keys=False)
        except yaml.YAMLError as error:
            raise InvalidInput(f"a sweep is written as YAML: {error}; use numbers, text, lists and maps") from error
    elif isinstance(sweep, str) and "\n" in sweep:
        text = sweep
    else:
        file = Path(sweep)
        text, folder, origin = read_text(file), file.resolve().parent, str(file)
    spec = parse_sweep(text, origin)
    return spec, text, permitted(spec, folder, allow_code)
