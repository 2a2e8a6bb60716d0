"""How well the epsilon_i that training estimated agree with what was really paid, by the examples tracked exactly."""

from __future__ import annotations

import numpy as np

from accounting.individual.epsilons import individual_epsilons
from accounting.mechanism import Trace
from accounting.records.layout import TrialFiles
from accounting.records.shards import Epsilons, NormShards
from orchestration.comparison.statistics import pearson
from orchestration.records.published import EstimateQuality


def quality_of_estimates(files: TrialFiles, epsilons: Epsilons, trace: Trace, worst_case: float) -> EstimateQuality:
    """Compare the examples of ``private/exact-norms``, whose norms were taken at every step, with ``epsilons``.

    Both sides are accounted in the same way and capped at the worst case, so what differs is only how often norms were
    taken (paper A, Section 5.1). Computed from single training examples: private data.
    Raises: DataCorruption for shards that are missing, cut or altered.
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
