"""The Python library: plan, run and open sweeps. Its names are exported by the package ``dpsweep``."""

from __future__ import annotations

import functools
import html
import inspect
import math
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt
import yaml

from dpsweep.accounting.errors import DpsweepError, InvalidInput
from dpsweep.orchestration.comparison.formats import at_most, per_unit
from dpsweep.orchestration.execution.environment import EMBEDDED, prepare_environment

if TYPE_CHECKING:
    import pandas as pd
    from plotly.graph_objects import Figure
    from rich.console import Console
    from torch import nn

    from dpsweep.accounting.mechanism.trace import Trace
    from dpsweep.accounting.records.epsilon_files import Epsilons
    from dpsweep.accounting.records.trial_files import TrialFiles
    from dpsweep.orchestration.comparison.across_sweeps import Comparison
    from dpsweep.orchestration.comparison.best import Best
    from dpsweep.orchestration.comparison.record import SweepRecord
    from dpsweep.orchestration.store.layout import SweepFiles
    from dpsweep.orchestration.store.published import TrialState
    from dpsweep.orchestration.store.results import StoredResult
    from dpsweep.orchestration.sweeps.grid import GridPoint
    from dpsweep.orchestration.sweeps.planned import Plan
    from dpsweep.orchestration.sweeps.schema import SweepSpec
    from dpsweep.orchestration.tracking.logged_models import Registered
    from dpsweep.workers.own_code.imports import GivenData, UserCode
    from dpsweep.workers.spec import TrialSpec


P = ParamSpec("P")
T = TypeVar("T")


@functools.cache
def _flags() -> re.Pattern[str]:
    """Return the pattern of flags for the parameters of `run` in a message, outside commands in backticks."""
    names = "|".join(name.replace("_", "-") for name in ("from", *inspect.signature(run).parameters))
    given = r"--allow-code (?P<code>[^\s':]+)$|--retry (?P<trials>all|failed)\b"
    return re.compile(rf"`[^`]*`|{given}|--(?P<name>{names})\b", re.MULTILINE)


def _in_python(message: str) -> str:
    """Return a message with the parameters of `run` in place of the command's flags."""

    def parameter(found: re.Match[str]) -> str:
        if found["code"] or found["trials"]:
            return f"allow_code=[{found['code']!r}]" if found["code"] else f"retry=[{found['trials']!r}]"
        named = (found["name"] or "").replace("-", "_")
        return f"`{'sources' if named == 'from' else named}`" if named else found[0]

    return _flags().sub(parameter, message)


def _for_python(function: Callable[P, T]) -> Callable[P, T]:
    """Let errors of ``function`` name parameters in place of flags."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except DpsweepError as error:
            error.args = (_in_python(str(error)), *error.args[1:])
            raise

    return called


@dataclass(frozen=True)
class Trial:
    """One trial of a stored sweep, from `StoredSweep.trials`."""

    _record: SweepRecord
    _point: GridPoint
    _files: TrialFiles
    _code: UserCode

    @property
    def key(self) -> str:
        """Unique name of the trial in its sweep; also the name of its folder."""
        return self._point.key

    @property
    def spec(self) -> TrialSpec:
        """The specification that was trained; before the trial has ended, the requested one with uncalibrated noise."""
        return self.result.spec if self.result is not None else self._point.spec

    @property
    def state(self) -> TrialState:
        """``finished``, ``stopped`` (by a scheduler), ``failed``, or otherwise ``pending``."""
        return self._record.status(self.key).state

    @property
    def result(self) -> StoredResult | None:
        """The result of a finished or stopped trial, else None."""
        return self._record.status(self.key).result

    @property
    def error(self) -> str | None:
        """The reason why the trial failed, as far as the release mode shows it; None if it did not fail."""
        error = self._record.status(self.key).error
        return None if error is None else _in_python(error)

    @property
    def trace(self) -> Trace:
        """The mechanisms that were run, as input to accountants. Raises: InvalidInput if the trial has no result."""
        from dpsweep.accounting.records.traces import read_trace
        from dpsweep.orchestration.store.results import StoppedTrial

        result = self.result
        if result is None:
            raise self._unfinished()
        return result.trace if isinstance(result, StoppedTrial) else read_trace(self._files.trace)

    def __repr__(self) -> str:
        result = self.result
        worst = None if result is None else result.worst_case
        cost = "" if worst is None else f", ε{per_unit(worst.unit)} {at_most(worst.epsilon, 4)} ({worst.kind})"
        return f"<Trial {self.key}: {self.state.word}{cost}>"

    def _repr_html_(self) -> str:
        found, result = f"<p>{html.escape(repr(self))}</p>", self.result
        if result is None:
            return found + (f"<p>{html.escape(self.error)}</p>" if self.error else "")
        return found + self.history.tail(1).to_html(index=False, escape=True)

    @property
    def history(self) -> pd.DataFrame:
        """One row per completed epoch: step, noise multiplier, clipping bounds, metrics of test data, ε so far.

        Empty for a trial without a result.
        """
        import pandas as pd

        epochs = self._record.trial(self._point).history
        return pd.DataFrame(
            {
                "epoch": each.epoch,
                "step": each.step,
                "noise_multiplier": each.noise_multiplier,
                **{f"clipping_bound.{name}": bound for name, bound in each.clipping_bounds.items()},
                **each.metrics,
            }
            for each in epochs
        )

    def epsilons(self) -> Epsilons:
        """Return the individual epsilon of every training example: arrays [examples] ``example_ids``, ``upper``,
        ``lower``.

        ``lower`` is None where no lower bound is known. They hold at ``delta``; ``kind`` says whether they are
        guarantees, output-specific or estimates, and ``reasons`` why they are estimates. They are as stored, not
        computed again: private data, which must not be published. Raises: InvalidInput if they were not computed or
        were deleted, DataCorruption for damaged files.
        """
        from dpsweep.accounting.individual import individual_reasons
        from dpsweep.accounting.mechanism.reasons import union, weakened
        from dpsweep.accounting.records.arrow_parts import MANIFEST
        from dpsweep.accounting.records.epsilon_files import read_epsilons
        from dpsweep.accounting.records.files import exists

        if not exists(f"{self._files.epsilons}/{MANIFEST}"):
            raise InvalidInput(
                f"{self._files.epsilons} holds no epsilons of examples: the trial is not private or not finished, its "
                "norms are off (norms.refreshes_per_epoch), or its private folder was deleted; resume the sweep, or "
                "choose another trial"
            )
        found, result = read_epsilons(self._files.epsilons), self.result
        of_norms = individual_reasons(self.trace) if found.kind == "estimate" else ()
        return weakened(found, union((result.reasons if result else (), of_norms)))

    @_for_python
    def model(self) -> nn.Module:
        """Return the trained model, in evaluation mode on the CPU; it maps prepared features [n, ...] to logits [n,
        classes].

        No stored code is executed unasked. A model of the user's own is imported only if it was allowed when the sweep
        was opened, as it was when the sweep was run or opened. Raises: InvalidInput for a trial that did not finish, a
        model that is not allowed, and code that has changed since the trial was trained; DataCorruption for damaged
        files.
        """
        from dpsweep.workers.trials.trained_model import load_model

        self._require_weights()
        return load_model(self._files, self.spec, self._code)

    @_for_python
    def predict(self, examples: npt.ArrayLike) -> npt.NDArray[np.float32]:
        """Return logits [n, classes], not probabilities, for examples [n, ...] in the form of the trial's data source.

        Images are bytes, rows are encoded as by their source; preprocessing and preparation are applied as in the
        trial's evaluation. The predicted class is the largest logit; with a single column, class 1 if it is above 0.
        Raises: as `model`, and InvalidInput for examples of another shape or type.
        """
        from dpsweep.workers.trials.trained_model import load_trained

        self._require_weights()
        return load_trained(self._files, self.spec, self._code).logits(examples)

    @_for_python
    def predict_table(self, table: str | Path | pd.DataFrame) -> pd.DataFrame:
        """Return what the model says of the rows of a new table, given as a file or a data frame, in their order.

        Columns are read by their names and declarations in the sweep; labels, groups and users are not needed. For
        classes, ``prediction`` names one, and the probability of each follows; targets are in the unit of the table. A
        row that lacks a value has no prediction. Warnings count such rows, and values that the sweep does not declare.
        Raises: as `model`, and InvalidInput for a table that lacks a column, and for data whose columns are not
        declared.
        """
        import pandas as pd

        from dpsweep.workers.trials.predicted_table import predicted_table
        from dpsweep.workers.trials.trained_model import load_trained

        self._require_weights()
        found, notes = predicted_table(load_trained(self._files, self.spec, self._code), table)
        for note in notes:
            warnings.warn(note, stacklevel=3)  # of the caller, outside `_for_python`
        return pd.DataFrame(found)

    def _require_weights(self) -> None:
        from dpsweep.orchestration.store.integrity import require_unaltered_model
        from dpsweep.orchestration.store.results import TrialResult

        result = self.result
        if not isinstance(result, TrialResult):
            raise self._unfinished()
        require_unaltered_model(self._files, result)

    def _unfinished(self) -> InvalidInput:
        return InvalidInput(f"trial {self.key} is {self.state.word}, not finished; resume the sweep and open it again")


@dataclass(frozen=True)
class StoredSweep:
    """A sweep as stored on disk when it was opened, from `open_sweep` or `run`."""

    _record: SweepRecord
    _files: SweepFiles
    _code: UserCode

    @property
    def name(self) -> str:
        """The name in the sweep file."""
        return self._record.sweep.name

    @property
    def folder(self) -> str:
        """Absolute path or URI of the sweep's folder."""
        return self._files.root

    @_for_python
    def refresh(self) -> StoredSweep:
        """Return the sweep as it is on disk now, such as while it runs. Raises: as `open_sweep`."""
        from dpsweep.orchestration.comparison.claims import checked_record

        return replace(self, _record=checked_record(self._files))

    @property
    def trials(self) -> Mapping[str, Trial]:
        """Every trial of the grid by its key, in the order of `results`."""
        points = self._record.points
        return MappingProxyType(
            {point.key: Trial(self._record, point, self._files.trial(point.key), self._code) for point in points}
        )

    @property
    def failed(self) -> tuple[Trial, ...]:
        """The trials that failed."""
        from dpsweep.orchestration.store.published import TrialState

        return tuple(trial for trial in self.trials.values() if trial.state is TrialState.FAILED)

    def __repr__(self) -> str:
        states = Counter(trial.state.word for trial in self.trials.values())
        counted = ", ".join(f"{count} {word}" for word, count in states.items())
        return f"<StoredSweep {self.name!r} in {self.folder}: {counted or 'no trials'}>"

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(repr(self))}</p>{self.results().to_html(index=False, escape=True)}"

    def results(self, *, all_columns: bool = False) -> pd.DataFrame:
        """Return one row per trial, with the columns that settings are compared by.

        all_columns: those of ``dpsweep export --all-columns`` instead, which are those of results.json, flat. A nested
        value is its own column, such as ``labels.clipping``, or by group size ``groups.4.epsilon``;
        ``parameters.`` precedes those that vary. Numbers that the release mode withholds are missing values, and so is
        an infinite epsilon; the column ``private`` is then False.
        """
        import pandas as pd

        from dpsweep.orchestration.comparison.stored import stored_settings
        from dpsweep.orchestration.comparison.trials_table import main_columns, trial_table

        table = trial_table(self._record, stored_settings(self._files))
        return pd.DataFrame(table if all_columns else main_columns(table))

    def best(
        self, by: str | None = None, *, max_epsilon: float = math.inf, at_least: Mapping[str, float] | None = None
    ) -> Best:
        """Return the best private setting by the mean of a metric of `results`, as ``dpsweep best`` prints it.

        `by`: a metric; by default accuracy or the main score of the task: r2, micro_f1, token_accuracy.
        `max_epsilon`: largest epsilon of a trial of the setting.
        `at_least`: lowest means that the setting must reach, such as ``{"worst_group": 0.7}``; the largest of a metric
        that is better when lower, such as ``loss``.
        The model of the result ``found`` is ``trials[found.trial.key].model()``.
        Raises: InvalidInput for an unknown metric and if no setting meets the conditions, DataCorruption for damaged
        files.
        """
        from dpsweep.orchestration.comparison.best import best
        from dpsweep.orchestration.comparison.stored import stored_findings

        return best(stored_findings(self._files, self._record.data()), by, max_epsilon, at_least)

    def differences(self) -> pd.DataFrame:
        """Return one row for every two private settings and metric of the headline, with a verdict, as in the report.

        Columns ``one`` and ``other`` are ``setting.name`` of trials in `results` with all columns. ``difference`` is
        the mean of ``metric`` of the first less that of the second, paired over seeds, between ``low`` and ``high``.
        ``verdict`` judges the first: "better", "worse", "not distinguishable", "unknown (one seed)" or "unknown". All
        intervals hold together with the probability ``table.attrs["level"]``. Of settings that differ in tuned values
        alone the best is compared. One that learnt nothing is left out. Raises: DataCorruption for damaged files.
        """
        import pandas as pd

        from dpsweep.orchestration.comparison.stored import stored_findings

        found, rows = stored_findings(self._files, self._record.data()), []
        for each in found.differences:
            known = each.interval
            ends = (math.nan,) * 3 if known is None else (known.value, known.low, known.high)
            rows.append((each.one, each.other, each.metric, *ends, each.verdict))
        columns = ["one", "other", "metric", "difference", "low", "high", "verdict"]
        table = pd.DataFrame(rows, columns=columns)
        table.attrs["level"] = found.level
        return table

    @_for_python
    def register(
        self, best: Best, name: str, alias: str = "champion", *, tracking_uri: str | None = None
    ) -> Registered:
        """Register the model of `best` in MLflow under a name, and give it an alias, as ``dpsweep best --register``.

        ``mlflow.pyfunc.load_model`` loads the ``location`` of the result as it is, and its ``address`` where MLflow's
        tracking URI is that of the sweep. A model of the user's own carries the code that it was trained with, which
        runs then. `tracking_uri`: by default ``MLFLOW_TRACKING_URI``, else where you recorded the sweep. Raises:
        InvalidInput for a name that MLflow refuses, and if MLflow has no weights of that model; TrackingUnavailable.
        """
        from dpsweep.orchestration.execution.same_code import own_files
        from dpsweep.orchestration.tracking.logged_models import register_best

        for warning in own_files(self._files, self._record, self._code, [best.trial.key]).changes():
            warnings.warn(_in_python(warning), stacklevel=3)  # the caller's line, outside `_for_python`
        return register_best(best, self._record.manifest.sweep_id, self._files, name, alias, tracking_uri)

    def plot(self, name: str = "privacy-utility") -> Figure:
        """Return a figure of the report, as its release mode shows it, for plotly.

        Raises: InvalidInput for a name that the report has no figure of, naming those that it has.
        """
        import plotly.graph_objects as go

        from dpsweep.orchestration.report.catalogue import drawn_figures

        drawn = {each.name: each for each in drawn_figures(self._record.data())}
        if name not in drawn:
            raise InvalidInput(f"the report has no figure {name!r}; it has: {', '.join(drawn) or 'none yet'}")
        return go.Figure(drawn[name].alone.plain())

    @_for_python
    def report(self) -> str:
        """Verify every stored file, write the reports again, and return the path of report.html.

        The report may be shared, except under ``release: raw``. Raises: DataCorruption with one line for each damaged
        file.
        """
        from dpsweep.orchestration.pipeline import render_again

        return render_again(self._files.root).files.report


@_for_python
def compare(*sweeps: StoredSweep | str | Path) -> Comparison:
    """Put the settings of several sweeps, or of their folders, beside each other, as ``dpsweep compare``.

    ``table()`` of the result is a data frame; ``differences`` say what does not compare. Raises: InvalidInput for fewer
    than two sweeps, and as `open_sweep`.
    """
    from dpsweep.orchestration.comparison.across_sweeps import compare as compared
    from dpsweep.orchestration.comparison.stored import stored_evidence

    opened = [each if isinstance(each, StoredSweep) else open_sweep(each) for each in sweeps]
    evidence = {each.folder: stored_evidence(each._files, each._record.data()) for each in opened}
    return compared({each.folder: each._record for each in opened}, evidence)


SweepLike = str | Path | Mapping[str, Any]
"""A sweep: the path of its file, its YAML text (more than one line), or its content as a mapping, such as a
`dpsweep.Sweep`, which may hold functions and classes, numbers of numpy and ranges."""
Allowed = Sequence[str | Path | Callable[..., Any]]
"""Modules and files of the user's own, functions and classes."""


@_for_python
def open_sweep(folder: str | Path, *, allow_code: Allowed = ()) -> StoredSweep:
    """Open the sweep in a folder or at a URI that ``dpsweep run`` wrote; models are loaded only on request.

    `allow_code`: the user's own modules and files that `Trial.model`, `predict` and `predict_table` may import, such as
    ``["my_models.py"]``, or the classes and functions themselves; by default none. Every epsilon of a trial is compared
    with the cost of its trace; measures of test data and epsilons of single examples are as stored. Raises:
    InvalidInput if there is no sweep or a module is not found, DataCorruption for damaged files, and for claims that
    their traces do not bear out.
    """
    from dpsweep.orchestration.comparison.claims import checked_record
    from dpsweep.orchestration.store.layout import sweep_at
    from dpsweep.orchestration.sweeps.python_objects import allowed_objects
    from dpsweep.orchestration.sweeps.user_code import allowed_again

    files = sweep_at(str(folder))
    record = checked_record(files)
    names, given = allowed_objects(allow_code, Path.cwd())
    return StoredSweep(record, files, allowed_again(record.sweep, names, given))


@_for_python
def plan(sweep: SweepLike, *, allow_code: Allowed = ()) -> Plan:
    """Plan a sweep without training: noise, steps and worst-case epsilon of each trial, and reasons for refusals.

    A sweep file is code, as for ``dpsweep plan``: the user's own models in its folder (for text or a mapping, the
    working directory) run on a few rows. `allow_code`: further modules and files that may be imported. Raises:
    InvalidInput for a sweep that cannot be read.
    """
    from dpsweep.orchestration.sweeps.plan import plan_sweep

    spec, _, code = _read(sweep, allow_code)
    return plan_sweep(spec, code)


@_for_python
def run(
    sweep: SweepLike,
    *,
    output: str | Path | None = None,
    address: str = EMBEDDED,
    tracking_uri: str | None = None,
    allow_code: Allowed = (),
    retry: Sequence[str] = (),
    sources: Sequence[str | Path] = (),
    max_hours: float | None = None,
    max_trials: int | None = None,
    stop_after_failures: int | None = None,
    max_gpu_hours: float | None = None,
    console: Console | None = None,
) -> StoredSweep:
    """Train, account and compare every trial of a sweep, as ``dpsweep run`` with the same options.

    A folder that holds the sweep, or an earlier version of it, is continued: trials with results keep them. The user's
    own code is read again by every call; results of it as it was before an edit are not continued.
    `retry`: ``failed``, ``all`` or keys of trials to train again.
    `sources`: folders of other sweeps, as ``--from``.
    `console`: of rich; shows progress, and in a notebook a line for each trial that ends; by default nothing is shown.
    Failed trials are in `StoredSweep.failed`.
    Raises: InvalidInput, before any trial starts, for a sweep that cannot run and for a process that is already
    connected to Ray.
    """
    for name, given in (("retry", retry), ("sources", sources)):
        if isinstance(given, str | Path):
            raise InvalidInput(f"{name} is {str(given)!r}; give a list, such as [{str(given)!r}]")
    spec, text, code = _read(sweep, allow_code)
    prepare_environment(address)
    tracking_uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
    folder, others = None if output is None else str(output), tuple(map(str, sources))
    from dpsweep.orchestration.execution.given_data import shared_data
    from dpsweep.orchestration.execution.shared_connection import ray_ahead
    from dpsweep.orchestration.store.layout import output_files

    files = output_files(folder, spec.name)
    with shared_data(code, files, address) as there, ray_ahead(spec, folder, address, there) as connect:
        from dpsweep.orchestration.pipeline import ConsoleDisplay, NoDisplay, RunRequest, run_sweep
        from dpsweep.orchestration.store.limits import Limits

        request = RunRequest(
            spec,
            text,
            folder,
            address,
            tracking_uri,
            there,
            limits=Limits(max_hours, max_trials, stop_after_failures, max_gpu_hours),
            retry=tuple(retry),
            sources=others,
            connect=connect,
        )
        outcome = run_sweep(request, NoDisplay() if console is None else ConsoleDisplay(console, _in_python))
    return StoredSweep(outcome.record, outcome.files, code)


def _read(sweep: SweepLike, allow_code: Allowed) -> tuple[SweepSpec, str, UserCode]:
    from dpsweep.orchestration.sweeps.python_objects import Objects, allowed_objects
    from dpsweep.orchestration.sweeps.schema import parse_sweep
    from dpsweep.orchestration.sweeps.text import read_text
    from dpsweep.orchestration.sweeps.user_code import permitted

    folder, origin = Path.cwd(), "sweep"
    allowed, given = allowed_objects(allow_code, folder)
    data: tuple[GivenData, ...] = ()
    if isinstance(sweep, Mapping):
        objects = Objects(folder)
        try:
            text = yaml.safe_dump(objects.plain(sweep), sort_keys=False)
        except RecursionError:
            raise InvalidInput("the sweep's values hold themselves, or nest too deeply; write them flat") from None
        given, data = (*objects.modules, *given), tuple(objects.data)
    elif isinstance(sweep, str) and "\n" in sweep:
        text = sweep
    elif isinstance(sweep, str | Path):
        file = Path(sweep)
        text, folder, origin = read_text(file), file.resolve().parent, str(file)
    else:
        raise InvalidInput(
            f"a sweep was given as {type(sweep).__name__}; give the path of its file, its text, or a mapping"
        )
    spec = parse_sweep(text, origin)
    return spec, text, replace(permitted(spec, folder, allowed, given), data=data)
