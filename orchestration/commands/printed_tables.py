"""Plans and outcomes as the commands print them: tables for terminals, and plain values for JSON."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from dpsweep.accounting.errors import count_of
from dpsweep.accounting.mechanism.noise_strategies import INDEPENDENT, kept_bytes
from dpsweep.accounting.mechanism.reasons import in_words, union
from dpsweep.accounting.records.files import exists
from dpsweep.orchestration.commands.options import show, stdout
from dpsweep.orchestration.comparison.extremes import hidden_groups_note
from dpsweep.orchestration.comparison.formats import (
    at_most,
    clock,
    file_size,
    listed,
    number,
    per_unit,
    plain_text,
    print_line,
    shortened,
    uncapitalised,
)
from dpsweep.orchestration.comparison.ledger import composed
from dpsweep.orchestration.comparison.metric_types import Metric, MetricTable
from dpsweep.orchestration.comparison.metrics import columns
from dpsweep.orchestration.comparison.rate_metrics import WORST_GROUP_METRICS
from dpsweep.orchestration.comparison.record import rows, told
from dpsweep.orchestration.comparison.sanity import without_changes
from dpsweep.orchestration.comparison.settings import label_phrases
from dpsweep.orchestration.report.prose import composed_cost
from dpsweep.orchestration.store.published import NON_PRIVATE, Label, PublishedTrial, TrialState
from dpsweep.orchestration.tracking.addresses import masked, serving
from dpsweep.orchestration.tracking.tracker import NO_TRACKING

if TYPE_CHECKING:  # these modules load torch, Ray and MLflow
    from dpsweep.orchestration.execution.prediction import Prediction
    from dpsweep.orchestration.pipeline import Outcome
    from dpsweep.orchestration.sweeps.planned import Plan, PlannedTrial
    from dpsweep.orchestration.sweeps.schema import SweepSpec
    from dpsweep.workers.dataset_description import DatasetDescription


def plan_rows(plan: Plan, sweep: SweepSpec) -> dict[str, Any]:
    """Return the plan as ``dpsweep plan --json`` prints it."""
    refused = [{"key": refusal.key, "refused": refusal.reason} for refusal in plan.refusals]
    trials = [_planned_row(planned, sweep) for planned in plan.trials]
    return {"trials": [*trials, *refused], "notes": list(plan.notes), "warnings": list(plan.warnings)}


def _tried(planned: PlannedTrial, sweep: SweepSpec) -> dict[str, Any]:
    from dpsweep.orchestration.sweeps.tune import values_tried  # late: it loads torch

    return values_tried(sweep.tune, planned.spec, planned.point.candidate)


def _planned_row(planned: PlannedTrial, sweep: SweepSpec) -> dict[str, Any]:
    return {
        "key": planned.spec.key,
        "labels": planned.point.labels,
        "candidate": _tried(planned, sweep),
        "target_epsilon": planned.point.target_epsilon,
        "noise_multiplier": planned.spec.noise.initial_noise_multiplier,
        "noise_strategy": planned.spec.noise.strategy,
        **dict(zip(("mean_squared_error", "max_squared_error"), planned.squared_errors or (None, None), strict=True)),
        "kept_bytes_per_weight": kept_bytes(planned.trace.strategy),
        "steps": planned.trace.steps,
        **planned.worst_case.as_dict(),
        "noise_source": planned.spec.noise_source,
        "train_size": planned.dataset.train_size,
        "shard_bytes": planned.shard_bytes,
        "ranks": sweep.reserved(planned.spec).processes,
        "refused": None,
    }


def plan_table(plan: Plan, sweep: SweepSpec) -> Table:
    """Return the plan as ``dpsweep plan`` prints it.

    With the ranks of each trial if any has several, and with errors and memory of noise if that of any is correlated.
    """
    ranks = [sweep.reserved(planned.spec).processes for planned in plan.trials]
    several = max(ranks, default=1) > 1
    labels = [_with_values(planned.point.labels, _tried(planned, sweep)) for planned in plan.trials]
    heading, differences = _differences([(each.key, of) for each, of in zip(plan.trials, labels, strict=True)])
    correlated = any(planned.trace.strategy != INDEPENDENT for planned in plan.trials)
    errors = _ERRORS if correlated else ()
    numbers = ("noise multiplier", *errors, "steps", "epsilon", "accountant", "norm shards")
    shown = empty_table("trial", *heading, *numbers, *(["ranks"] if several else []))
    for planned, difference, of_trial in zip(plan.trials, differences, ranks, strict=True):
        worst = planned.worst_case
        shown.add_row(
            planned.spec.key,
            *difference,
            f"{planned.spec.noise.initial_noise_multiplier:.6g}" if planned.spec.is_private else "none",
            *(_error_cells(planned) if correlated else ()),
            str(planned.trace.steps),
            at_most(worst.epsilon, 4) if worst.is_private else "not private",
            worst.accountant if worst.is_private else "",
            file_size(planned.shard_bytes),
            *([str(of_trial)] if several else []),
        )
    for refusal in plan.refusals:
        shown.add_row(refusal.key, "refused", style="red")
    return shown


def _with_values(labels: Mapping[str, Label], tried: Mapping[str, Any]) -> dict[str, Label]:
    """Return the labels of a trial with the values of its candidate in place of its number, which says nothing."""
    own = {place: value if isinstance(value, int | float) else str(value) for place, value in tried.items()}
    return {name: label for name, label in labels.items() if name != "candidate"} | own


_ERRORS = ("mean sq. error", "max sq. error", "kept per weight")


def _error_cells(planned: PlannedTrial) -> list[str]:
    errors = [f"{error:.4g}" for error in planned.squared_errors or ()] or ["", ""]
    return [*errors, f"{kept_bytes(planned.trace.strategy)} B"]


_OF_ERRORS = (
    "sq. error: of the sum of all gradients up to a step, per weight, in squared clipping bounds; "
    "kept: of earlier noise, by all ranks together"
)


def plan_lines(plan: Plan) -> list[str]:
    """Return what the table of a plan holds for: delta, adjacency and kind of its epsilons, the sizes of the data, and
    its notes.
    """
    costs = [trial.worst_case for trial in plan.trials if trial.worst_case.is_private]
    claims = dict.fromkeys(
        f"ε{per_unit(cost.unit)} at δ = {cost.delta:g}, adjacency {cost.adjacency}: {_KINDS.get(cost.kind, cost.kind)}"
        for cost in costs
    )
    reasons = in_words(union(cost.reasons for cost in costs))
    correlated = [_OF_ERRORS] if any(trial.trace.strategy != INDEPENDENT for trial in plan.trials) else []
    return [
        *claims,
        *reasons,
        *correlated,
        *dict.fromkeys(_data_line(trial.dataset) for trial in plan.trials),
        *plan.notes,
    ]


_KINDS = {"guarantee": "a guarantee", "estimate": "an estimate"}


def _data_line(data: DatasetDescription) -> str:
    sizes = {"training": data.train_size, "test": data.test_size, "public": data.public_size}
    counted = listed([f"{size:,} {part}" for part, size in sizes.items() if size])
    groups = len(data.group_names)
    return f"data {data.name}: {counted} examples in {count_of(groups, 'group')}"


def prediction_lines(found: Prediction) -> list[str]:
    """Return the prediction as ``dpsweep plan --probe`` prints it."""
    memory = file_size(found.memory) + (f", {file_size(found.gpu_memory)} on its GPU" if found.gpu_memory else "")
    price = "" if found.price is None else f"; price: {number(found.price)}"
    return [
        f"probe: {count_of(found.steps, 'step')} of {count_of(found.kinds, 'kind')} of trial; memory of a trial: "
        f"{memory}",
        f"time: {clock(found.seconds)} for the steps of {count_of(found.trials, 'trial')}, one after another{price}; "
        "norms, evaluation, accounting and reports come on top",
    ]


def outcome_object(outcome: Outcome) -> dict[str, Any]:
    """Return the outcome as ``dpsweep run --json`` prints it."""
    record, table = outcome.record, rows(outcome.record)
    return {
        "sweep": record.sweep.name,
        "output": outcome.files.root,
        "report": outcome.files.report,
        "private_report": outcome.files.private_report,
        "tracking_uri": masked(outcome.tracking_uri),
        "delta": record.sweep.privacy.delta,
        "release": record.disclosure,
        "composed": whole.as_dict() if (whole := composed(record.data().trials)) else None,
        "seconds": round(outcome.seconds, 3),
        "stopped": outcome.stopped,
        "recording": asdict(outcome.recording) if outcome.recording else None,
        "failed": sum(row["status"] == "failed" for row in table),
        "trials": table,
    }


def print_outcome(outcome: Outcome) -> None:
    """Print the table of trials, their errors, the decision, and the commands that open the report and MLflow."""
    console = stdout()
    show(_outcome_table(outcome))
    trials = outcome.record.data().trials
    for trial in trials:
        if trial.error:
            print_line(console, f"{trial.key} {trial.state.word}: {trial.error}", trial.state.style)
    if failed := [trial.key for trial in trials if trial.state is TrialState.FAILED]:
        with_keys = sum(exists(outcome.files.trial(key).checkpoint) for key in failed)
        print_line(console, _after_failures(len(failed), with_keys, outcome.files.root))
    for sentence in (*told(trials), *composed_cost(trials), *hidden_groups_note(trials)):
        print_line(console, sentence)
    for sentence in outcome.decision:
        print_line(console, sentence, "bold")
    python, uri = _this_python(), masked(outcome.tracking_uri)
    report = outcome.files.report
    if "://" in report:  # no browser reads an object store
        console.print("The report, to copy from the store and open in a browser:", style="bold")
        console.print(plain_text(f"  {report}"), soft_wrap=True)
    else:
        console.print("Open the report:", style="bold")
        console.print(plain_text(f"  {python} -m webbrowser {Path(report).as_uri()}"), soft_wrap=True)
    if uri == NO_TRACKING:
        return
    console.print("Open MLflow:", style="bold")
    page = outcome.recording.page if outcome.recording else ""
    serve = f"{python} -m {serving(uri)}"
    for line in [page or uri] if uri.startswith("http") else [serve, *([f"and then {page}"] if page else [])]:
        console.print(plain_text(f"  {line}"), soft_wrap=True)


def _after_failures(failed: int, with_keys: int, root: str) -> str:
    """Return what to do about failed trials. with_keys: how many of them were not trained to their end.

    >>> _after_failures(3, 1, "runs/a")
    '3 failed: run the same command again to go on, or give up with dpsweep forget runs/a; until then 1 of them keeps \
the key of its noise, with which whoever reads the folder could take the noise off'
    >>> _after_failures(3, 0, "runs/a")
    '3 failed: run the same command again to go on'
    """
    go_on = f"{failed} failed: run the same command again to go on"
    if not with_keys:
        return go_on
    they = "1 of them keeps the key of its" if with_keys == 1 else f"{with_keys} of them keep the keys of their"
    return (
        f"{go_on}, or give up with dpsweep forget {shlex.quote(root)}; until then {they} noise, with which whoever "
        "reads the folder could take the noise off"
    )


def _outcome_table(outcome: Outcome) -> Table:
    worst = WORST_GROUP_METRICS[outcome.record.worst_group]
    every = outcome.record.data().trials
    trials = without_changes(every) if outcome.unknown_cost else every
    metrics = columns(MetricTable.TERMINAL, worst.name, trials)
    heading, differences = _differences([(trial.key, trial.labels) for trial in trials])
    shown = empty_table("trial", *heading, *(uncapitalised(metric.heading) for metric in metrics))
    for trial, difference in zip(trials, differences, strict=True):
        style = None if trial.state is TrialState.FINISHED else trial.state.style
        remarks = (
            "stopped" if trial.state is TrialState.STOPPED else "",
            "" if trial.is_asked else "no longer asked for",
        )
        name = " ".join([trial.key, *(f"({remark})" for remark in remarks if remark)])
        if trial.quality is None:
            shown.add_row(name, *difference, trial.state.word, style=style)
        else:
            shown.add_row(name, *difference, *(_cell(metric, trial) for metric in metrics), style=style)
    return shown


def _differences(trials: Sequence[tuple[str, Mapping[str, Label]]]) -> tuple[list[str], list[list[Text]]]:
    """Heading and cells of a column for differences of trials that keys do not show; empty if keys show all."""
    cells = [plain_text(", ".join(_labels_beyond_key(key, labels))) for key, labels in trials]
    return ([_DIFFERENCE], [[cell] for cell in cells]) if any(cells) else ([], [[] for _ in cells])


def _labels_beyond_key(key: str, labels: Mapping[str, Label]) -> list[str]:
    """Return the labels of a trial that distinguish it within its sweep and are not part of its key, as phrases."""
    said = {*key.split("-"), NON_PRIVATE, "none"}
    varying = {axis: label for axis, label in labels.items() if axis not in _IN_KEYS and label not in said}
    return list(label_phrases(varying).values())


_DIFFERENCE = "differs in"
_IN_KEYS = ("seed", "epsilon", "sigma")
"""Axes whose values are part of the key of every trial."""


def _cell(metric: Metric, trial: PublishedTrial) -> Text:
    value, whose = metric.value(trial), metric.whose(trial)
    unit = per_unit(trial.privacy.unit) if metric.name == "epsilon" and trial.privacy else ""
    text = "not private" if value == math.inf else f"{metric.format.one(value)}{unit}"
    return plain_text(f"{', '.join(shortened(whose))}: {text}" if whose else text)


def empty_table(*columns: str) -> Table:
    """Return a table whose first column and differences wrap in a narrow terminal; no value is truncated."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    first, *others = columns
    table.add_column(first, no_wrap=True)
    for column in others:
        table.add_column(column, no_wrap=column != _DIFFERENCE, overflow="fold")
    return table


def _this_python() -> str:
    """Return the path of the running interpreter, so that printed commands work without an activated environment."""
    executable, here = Path(sys.executable), Path.cwd()
    return shlex.quote(str(executable.relative_to(here) if executable.is_relative_to(here) else executable))
