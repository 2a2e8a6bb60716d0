"""Compare estimated epsilon_i with those of the examples whose norms were taken at every step."""

from __future__ import annotations

import numpy as np

from accounting.individual import individual_epsilons
from accounting.mechanism import Trace
from accounting.records import Epsilons, NormShards, TrialFiles
from orchestration.comparison.statistics import pearson
from orchestration.records.published import EstimateQuality


def quality_of_estimates(files: TrialFiles, epsilons: Epsilons, trace: Trace, worst_case: float) -> EstimateQuality:
    """Compare ``epsilons`` with the epsilon_i of the examples in ``private/exact-norms``, taken at every step.

    Both sides are accounted by the same method and capped at the worst case, so they differ only in how often norms
    were taken (paper A, Section 5.1). Computed from single training examples: private data.
    Raises: DataCorruption for shards that are missing, truncated or altered.
    """
    shards = NormShards(files.exact_norms)
    ids, paid = [], []
    for part in map(shards.read, shards.parts):
        found = individual_epsilons(part.steps, part.contributions, trace, epsilons.delta, epsilons.method)
        ids.append(part.example_ids)
        paid.append(found.upper)
    order = np.argsort(epsilons.example_ids)
    rows = order[np.searchsorted(epsilons.example_ids, np.concatenate(ids), sorter=order)]
    actual = np.minimum(np.concatenate(paid), worst_case)
    estimated = np.minimum(epsilons.upper[rows], worst_case)
    errors = np.abs(estimated - actual)
    return EstimateQuality(
        examples=len(actual),
        correlation=pearson(actual, estimated),
        mean_error=float(errors.mean()),
        largest_error=float(errors.max()),
    )
