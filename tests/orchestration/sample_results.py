"""A sweep whose trials have results that were never trained, for tests of what is shown of them."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from dpsweep.accounting.mechanism.estimates import PrivacyEstimate
from dpsweep.accounting.mechanism.samplings import PoissonSampling
from dpsweep.accounting.mechanism.trace import Segment, Trace
from dpsweep.accounting.records.traces import write_trace
from dpsweep.orchestration.comparison.record import SweepRecord, claimed, rows
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.store.published import EpsilonHistogram, GroupEpsilon, IndividualStatistics, TrialState
from dpsweep.orchestration.store.results import StoppedTrial, TrialResult, write_exact_statistics, write_result
from dpsweep.orchestration.store.status import TrialStatus, status_of
from dpsweep.orchestration.sweeps.grid import GridPoint, grid
from dpsweep.orchestration.sweeps.manifest import new_manifest, write_manifest
from dpsweep.orchestration.sweeps.schema import parse_sweep
from dpsweep.workers.evaluation.scores import Evaluation, GroupEvaluation
from dpsweep.workers.spec import NoiseSpec
from dpsweep.workers.training.history import EpochRecord, TrainingResult, reasons_of_trial
from tests.orchestration.sample_grids import small

DELTA = 1e-5
EXACT = IndividualStatistics(
    disclosure="raw",
    kind="estimate",
    mean=1.23456789,
    median=1.1,
    groups=(GroupEpsilon("a", 1.2, 0.1, 60.0), GroupEpsilon("b", 1.4, 0.2, 40.0)),
    histogram=EpsilonHistogram((0.0, 1.5, 3.0), (60.0, 40.0)),
    reasons=("known_seed", "norms_estimated"),
)
"""What the owner of the data may see of every private trial."""


def evaluation(accuracy: float, loss: float = 0.5) -> Evaluation:
    """Two groups, one served a tenth better and one a tenth worse than the whole."""
    groups = (GroupEvaluation("a", 20, accuracy + 0.1, loss), GroupEvaluation("b", 20, accuracy - 0.1, loss))
    return Evaluation(accuracy, loss, groups, {"accuracy_gap": 0.2})


def worst_case(epsilon: float, size: int = 1, kind: str = "guarantee") -> PrivacyEstimate:
    unit = "example" if size == 1 else f"group of {size}"
    return PrivacyEstimate(epsilon, DELTA, "add_remove", "pld", kind, unit=unit, group_size=size)  # type: ignore[arg-type]  # a Kind


def _at(delta: float, *estimates: PrivacyEstimate) -> tuple[PrivacyEstimate, ...]:
    return tuple(replace(estimate, delta=delta) for estimate in estimates)


def result_of(point: GridPoint, accuracy: float, kind: str = "guarantee") -> TrialResult:
    epsilon = 3.0 if point.is_private else float("inf")
    history = tuple(
        EpochRecord(epoch, 10 * (epoch + 1), 2.0 - epoch, 1.0, {"all": 1.0}, evaluation(accuracy)) for epoch in range(2)
    )
    training = TrainingResult(
        point.key, 2, 20, 10, "completed", 100, 40, ("a", "b"), 7, 1.0, history, evaluation(accuracy)
    )
    spec = replace(point.spec, noise=NoiseSpec(2.0 if point.is_private else 0.0))
    result = TrialResult(
        key=point.key,
        spec=spec,
        worst_case=_at(spec.delta, worst_case(epsilon, kind=kind))[0],
        others=(),
        groups=_at(spec.delta, worst_case(epsilon, 1), worst_case(2.5 * epsilon, 2)) if point.is_private else (),
        epsilons=(0.5 * epsilon, epsilon),
        training=training,
        individuals=None,
        started=100.0,
        ended=107.5,
    )
    return claimed(result, reasons_of_trial(spec, ()))


def stopped_of(point: GridPoint) -> StoppedTrial:
    trace = Trace(100, (Segment(0, 10, PoissonSampling(0.1), 2.0),))
    return StoppedTrial(
        point.key, point.spec, trace, worst_case(1.5), (), (), 1, evaluation(0.6), (), started=100.0, ended=103.0
    )


def sample_record(folder: Path, finished: Collection[int] = (0,), **changes: object) -> tuple[SweepRecord, SweepFiles]:
    """A baseline that finished at 0.9 and a private trial that finished at 0.7, with trials of both that failed.

    finished: seeds of those that finished.
    """
    text = small(**{"clipping": ["none", "flat"], "noise": "constant", "seeds": [0, 1], **changes})
    sweep, files = parse_sweep(text), SweepFiles(str(folder))
    points, statuses = grid(sweep), dict[str, TrialStatus]()
    for point in points:
        if point.spec.seed in finished:
            result = result_of(point, 0.7 if point.is_private else 0.9)
            statuses[point.key] = status_of(result)
            if point.is_private:
                write_exact_statistics(files.trial(point.key).private_summary, EXACT)
        else:
            statuses[point.key] = TrialStatus(point.key, 20, TrialState.FAILED, error="lost")
    return SweepRecord(new_manifest(sweep, text), sweep, points, statuses, {}), files


def stored_sample(
    folder: Path, individuals: IndividualStatistics | None = None, finished: Collection[int] = (0,), **changes: object
) -> SweepFiles:
    """`sample_record` as a run leaves it on disk; individuals: what the private trial shows of its examples."""
    record, files = sample_record(folder, finished, **changes)
    write_manifest(files, record.manifest)
    for key, status in record.statuses.items():
        if isinstance(status.result, TrialResult):
            private = status.result.spec.is_private
            shown = replace(status.result, individuals=individuals if private else None)
            write_result(files.trial(key).result, claimed(shown, shown.reasons))
            write_trace(files.trial(key).trace, Trace(100, (Segment(0, 20, PoissonSampling(0.1), 2.0),)))
    Path(files.results).write_text(json.dumps(rows(record)))
    return files
