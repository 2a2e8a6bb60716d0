"""Compare estimated epsilon_i with the exact epsilon_i of examples whose norms were recorded at every step."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from dpsweep.accounting.individual import individual_epsilons
from dpsweep.accounting.mechanism.trace import Trace
from dpsweep.accounting.records import Epsilons, NormShards, TrialFiles
from dpsweep.orchestration.comparison.densities import density
from dpsweep.orchestration.comparison.statistics import pearson
from dpsweep.orchestration.records.published import EstimateQuality


def quality_of_estimates(
    files: TrialFiles, epsilons: Iterable[Epsilons], trace: Trace, worst_case: float
) -> EstimateQuality:
    """Compare estimated ``epsilons`` (parts) with epsilons from ``private/exact-norms``, recorded at every step.

    Both sides are accounted by the same method and capped at the worst case, so they differ only in how often norms
    were recorded (paper A, Section 5.1). The result is private data: it is computed from single training examples.
    Raises: DataCorruption for shards that are missing, truncated or altered.
    """
    shards = NormShards(files.exact_norms)
    tracked = [shards.read(part) for part in shards.parts]
    ids = np.concatenate([part.example_ids for part in tracked])
    own = _of_examples(epsilons, ids)
    paid = [individual_epsilons(part.steps, part.contributions, trace, own.delta, own.method).upper for part in tracked]
    order = np.argsort(own.example_ids)
    rows = order[np.searchsorted(own.example_ids, ids, sorter=order)]
    actual = np.minimum(np.concatenate(paid), worst_case)
    estimated = np.minimum(own.upper[rows], worst_case)
    errors = np.abs(estimated - actual)
    return EstimateQuality(
        examples=len(actual),
        correlation=pearson(actual, estimated),
        mean_error=float(errors.mean()),
        largest_error=float(errors.max()),
        density=density(actual, estimated),
    )


def _of_examples(epsilons: Iterable[Epsilons], ids: NDArray[np.int64]) -> Epsilons:
    """Return the epsilons of the given examples, in the order of the parts."""
    return Epsilons.concatenate([part.of(np.isin(part.example_ids, ids)) for part in epsilons])
