"""The trace of a stored trial, and epsilons of its examples from their recorded contributions.

Everything derived from the norm shards is private data of the training examples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.accountants.paper_only import algorithm_2
from dpsweep.accounting.errors import DataCorruption, InvalidInput
from dpsweep.accounting.individual import (
    INDIVIDUAL_ACCOUNTANTS,
    individual_claim,
    individual_epsilons,
    individual_reasons,
)
from dpsweep.accounting.mechanism.estimates import Kind, PrivacyEstimate
from dpsweep.accounting.mechanism.reasons import Reason, union
from dpsweep.accounting.mechanism.trace import Trace
from dpsweep.accounting.pld import epsilon_of_examples
from dpsweep.accounting.records.files import read_bytes
from dpsweep.accounting.records.shards import NormShards, PartNorms, has_norms
from dpsweep.accounting.records.traces import read_trace
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.accounting.registry import lookup

QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
AS_PUBLISHED = "as published: rounds to the nearest, may under-state; for comparison only"
PRIVATE = "computed from single training examples: private data, not to be published"


@dataclass(frozen=True)
class EpsilonSpread:
    """Distribution of the epsilons of single examples: mean, and exact order statistics at `QUANTILES`.

    caution: a limit of the method, or None. reasons: why each is an estimate.
    """

    method: str
    kind: Kind
    delta: float
    adjacency: str
    examples: int
    mean: float
    quantiles: tuple[float, ...]
    caution: str | None = None
    reasons: tuple[Reason, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; an infinite epsilon is None."""
        return {
            "unit": "each example",
            "accountant": f"individual {self.method}",
            "kind": self.kind,
            "delta": self.delta,
            "adjacency": self.adjacency,
            "examples": self.examples,
            "mean": _finite(self.mean),
            "quantiles": {f"{level:g}": _finite(value) for level, value in zip(QUANTILES, self.quantiles, strict=True)},
            "sensitive": PRIVATE,
            "reasons": list(self.reasons),
            **({} if self.caution is None else {"caution": self.caution}),
        }


def stored_trace(path: str) -> Trace:
    """Return the trace in the file ``path``. Raises: InvalidInput if it does not exist, DataCorruption if it is
    damaged.
    """
    try:
        return read_trace(path)
    except FileNotFoundError:
        raise InvalidInput(f"{path} does not exist; give the folder of a trial that has trained") from None


def stored_reasons(files: TrialFiles) -> tuple[Reason, ...]:
    """Return why every epsilon of a stored trial is an estimate: by its result, or by its settings before there is one.

    Empty if neither is there. Raises: DataCorruption if they are damaged.
    """
    from dpsweep.orchestration.store.results import read_result  # late: only stored trials need them
    from dpsweep.workers.spec import TrialSpec
    from dpsweep.workers.training.history import reasons_of_trial

    result = read_result(files.result)
    try:
        spec = TrialSpec.from_json(read_bytes(files.spec)) if result is None else result.spec
    except FileNotFoundError:
        return ()
    except ValueError as error:
        raise DataCorruption(f"{files.spec} holds no settings of a trial; restore it from a backup") from error
    return reasons_of_trial(spec, ()) if result is None else union((result.reasons, reasons_of_trial(spec, ())))


def spread_of_epsilons(files: TrialFiles, trace: Trace, delta: float, method: str) -> EpsilonSpread:
    """Return the distribution of per-example epsilons at ``delta``.

    method: a key of `INDIVIDUAL`. Certified methods give upper bounds, none above the worst case of the run by the
    tightest accountant, which bounds every example; ``rdp-algorithm-2`` gives the values of the published algorithm,
    which are estimates.
    Raises: InvalidInput for an unknown method, DataCorruption for missing or damaged norm shards.
    """
    epsilons_of = lookup(INDIVIDUAL, method, "individual accounting method")
    shards = _complete_shards(files, trace)
    epsilons = np.concatenate([epsilons_of(part, trace, delta) for part in map(shards.read, shards.parts)])
    published = method not in INDIVIDUAL_ACCOUNTANTS
    if not published:
        epsilons = np.minimum(epsilons, account(trace, delta).epsilon)
    return EpsilonSpread(
        method=method,
        kind="estimate" if published else individual_claim(trace),
        delta=delta,
        adjacency=trace.adjacency,
        examples=len(epsilons),
        mean=float(epsilons.mean()),
        quantiles=tuple(np.quantile(epsilons, QUANTILES, method="higher").tolist()),
        caution=AS_PUBLISHED if published else None,
        reasons=union((individual_reasons(trace), ("accountant_not_proven",) if published else ())),
    )


def _certified(method: str, part: PartNorms, trace: Trace, delta: float) -> npt.NDArray[np.float64]:
    return individual_epsilons(part.steps, part.contributions, trace, delta, method).upper


def _as_published(part: PartNorms, trace: Trace, delta: float) -> npt.NDArray[np.float64]:
    if not trace.is_private:
        return np.full(len(part.example_ids), np.inf)
    return algorithm_2(part.steps.tolist(), part.contributions, trace, delta)


INDIVIDUAL: Mapping[str, Callable[[PartNorms, Trace, float], npt.NDArray[np.float64]]] = {
    **{method: partial(_certified, method) for method in INDIVIDUAL_ACCOUNTANTS},
    "rdp-algorithm-2": _as_published,
}
"""Methods of ``--individual``: map norms of a part, trace and delta to epsilons [examples of the part]."""


@dataclass(frozen=True)
class GivenExamples:
    """Records by id with steps [snapshots] and recorded contributions [records, snapshots]. Private data.

    missing: those that are not in the training data, whose contributions are 0. largest: the largest id that is.
    """

    ids: tuple[int, ...]
    steps: tuple[int, ...]
    contributions: npt.NDArray[np.float32]
    missing: frozenset[int] = frozenset()
    largest: int = -1


def contributions_of(files: TrialFiles, trace: Trace, example_ids: Sequence[int]) -> GivenExamples:
    """Return the recorded contributions of the given records.

    Raises: InvalidInput for an id that is not in the training data, DataCorruption for missing or damaged norm shards.
    """
    found = recorded(files, trace, sorted(set(example_ids)))
    if found.missing:
        raise InvalidInput(
            f"--examples has {min(found.missing)}, but {files.root} trained on no example of this id; the largest is "
            f"{found.largest}"
        )
    return found


def recorded(files: TrialFiles, trace: Trace, example_ids: Sequence[int]) -> GivenExamples:
    """As `contributions_of`, in the order of ``example_ids``, where some may not be in the training data."""
    shards, rows, largest = _complete_shards(files, trace), dict[int, npt.NDArray[np.float32]](), -1
    for part in map(shards.read, shards.parts):
        largest = max(largest, int(part.example_ids.max(initial=-1)))
        for row in np.flatnonzero(np.isin(part.example_ids, np.array(example_ids, np.int64))).tolist():
            rows[int(part.example_ids[row])] = part.contributions[row]
    steps = tuple(map(int, shards.steps))
    none = np.zeros(len(steps), np.float32)
    own = np.array([rows.get(example, none) for example in example_ids])
    return GivenExamples(tuple(example_ids), steps, own, frozenset(example_ids).difference(rows), largest)


def estimate_of_examples(group: GivenExamples, trace: Trace, delta: float) -> PrivacyEstimate:
    """Return the epsilon at ``delta`` of the given records together, from their recorded contributions."""
    found = epsilon_of_examples(trace, group.steps, group.contributions, delta)
    return PrivacyEstimate(
        epsilon=found.upper,
        delta=delta,
        adjacency=trace.adjacency,
        accountant="pld",
        kind=found.kind,
        unit=f"examples {', '.join(map(str, group.ids))}",
        group_size=len(group.ids),
        lower_epsilon=found.lower,
        reasons=trace.individual_reasons,
    )


def _complete_shards(files: TrialFiles, trace: Trace) -> NormShards:
    """Norm shards of a trial. Raises: InvalidInput if there are none, DataCorruption for missing or damaged ones."""
    if not has_norms(files.norms):
        raise InvalidInput(
            f"{files.norms} holds no norms: they were deleted, never taken (norms.refreshes_per_epoch: off), or the "
            "trial has not trained to its end; ask for the worst case alone, or name another trial"
        )
    shards = NormShards(files.norms)
    shards.require_complete(trace.dataset_size)
    return shards


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
