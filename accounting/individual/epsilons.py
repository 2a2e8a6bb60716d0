"""Per-example epsilon from recorded contributions (paper A), by Renyi DP or exact composition of privacy losses.

The epsilon of example i covers adding, removing or blanking that one example. `Trace.individual_kind` says how strong
the claim is:

- A guarantee, if contributions were fixed before the run.
- Output-specific (epsilon_i, delta)-DP (paper A, Section 3), given the iterates that were released, if contributions
  were measured in the run and bound the true ones at every step.
- An estimate otherwise, and whenever the noise depended on results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dpsweep.accounting.errors import require_finite
from dpsweep.accounting.individual.contributions import Array, RecordedContributions
from dpsweep.accounting.mechanism.estimates import Claim
from dpsweep.accounting.mechanism.reasons import Reason
from dpsweep.accounting.mechanism.reductions import is_attained_by, rarest_apart
from dpsweep.accounting.mechanism.rounds import enforced_epsilon
from dpsweep.accounting.mechanism.trace import Trace
from dpsweep.accounting.registry import lookup

EpsilonBounds = tuple[Array, Array | None]
"""Upper and lower epsilon [rows]; None where the method bounds nothing from below."""


def _by_rdp(recorded: RecordedContributions, delta: float) -> EpsilonBounds:
    from dpsweep.accounting.individual.rdp import (
        rdp_epsilons,  # loads numba and compiled code, which takes half a second
    )

    return rdp_epsilons(recorded, delta), None


def _by_classic_rdp(recorded: RecordedContributions, delta: float) -> EpsilonBounds:
    from dpsweep.accounting.individual.rdp import classic_epsilons

    return classic_epsilons(recorded, delta), None


def _by_pld(recorded: RecordedContributions, delta: float) -> EpsilonBounds:
    from dpsweep.accounting.individual.exact_composition import pld_epsilons

    return pld_epsilons(recorded, delta)


INDIVIDUAL_ACCOUNTANTS: Mapping[str, Callable[[RecordedContributions, float], EpsilonBounds]] = {
    "rdp": _by_rdp,
    "rdp-classic": _by_classic_rdp,
    "pld": _by_pld,
}
"""Methods by name: recorded contributions, delta -> bounds of the rounds' pairs. ``pld`` is tight, and ``rdp-classic``
has the conversion of papers A and C."""

FILTERED = "filter"
"""`IndividualEpsilons.method` where a privacy filter enforced the epsilons."""
_ROWS = 1 << 16
"""Largest number of examples accounted at once."""
_ENTRIES = 1 << 23
"""Largest number of contributions accounted at once, so that memory does not grow with the number of snapshots."""


@dataclass(frozen=True)
class IndividualEpsilons:
    """Certified bounds on per-example epsilons: upper and lower [examples].

    Both are infinite for an example that contributed to a step without noise. upper holds for the given contributions.
    lower, with ``pld``, is a bound on the true epsilon of the worst run with these contributions. It is None for other
    methods, and where no lower bound is known of the run that took place (`CertifiedEpsilon`).
    """

    upper: Array
    lower: Array | None
    delta: float
    method: str
    kind: Claim


def individual_epsilons(
    steps: Sequence[int] | NDArray[np.integer[Any]],
    contributions: ArrayLike,
    trace: Trace,
    delta: float,
    method: str = "pld",
) -> IndividualEpsilons:
    """Return the epsilon of every example at ``delta``, under the adjacency of ``trace``.

    contributions [examples, snapshots] lie in [0, 1]: clipped gradient norm over sensitivity. The snapshot taken at
    steps[j] holds until steps[j + 1]. Each row's result depends on that row alone. The module and `IndividualEpsilons`
    say how strong the claim is.

    Raises: InvalidInput for an unknown method, a delta outside (0, 1), snapshots that do not start at step 0 or lie
    beyond the run, NaN or contributions outside [0, 1].

    If a privacy filter limited every example, upper is the epsilon of the filter's budget for every example (a
    guarantee), lower is None and the method is ``filter``. To account for the contributions measured in such a run
    instead, pass the trace without its filter.
    """
    delta = require_finite("delta", delta, above=0.0, below=1.0)
    account = lookup(INDIVIDUAL_ACCOUNTANTS, method, "individual accounting method")
    apart, left = rarest_apart(trace, delta)
    recorded = RecordedContributions.checked(steps, contributions, apart)
    if trace.filter is not None:
        enforced = np.full(len(recorded.values), enforced_epsilon(trace.filter, trace, delta))
        return IndividualEpsilons(enforced, None, delta, FILTERED, individual_claim(trace))
    rows = max(1, min(_ROWS, _ENTRIES // len(recorded.steps)))
    starts = range(0, max(len(recorded.values), 1), rows)
    blocks = [_account_block(recorded.of(slice(i, i + rows)), left, account) for i in starts]
    upper = np.concatenate([above for above, _ in blocks])
    below = [lower for _, lower in blocks if lower is not None] if is_attained_by(trace, 1) else []
    lower = np.concatenate(below) if below else None
    return IndividualEpsilons(upper, lower, delta, method, individual_claim(trace))


def individual_claim(trace: Trace) -> Claim:
    """Return how strong the claim of `individual_epsilons` for the trace is: a guarantee under a filter."""
    return trace.individual_kind if trace.filter is None else "guarantee"


def individual_reasons(trace: Trace) -> tuple[Reason, ...]:
    """Return why the claim of `individual_epsilons` for the trace is an estimate; empty if it is stronger."""
    return trace.individual_reasons if trace.filter is None else ()


def _account_block(
    recorded: RecordedContributions,
    delta: float,
    account: Callable[[RecordedContributions, float], EpsilonBounds],
) -> EpsilonBounds:
    upper, lower = account(recorded, delta)
    unprotected = recorded.unprotected()
    above = np.where(unprotected, np.inf, upper)
    return above, None if lower is None else np.where(unprotected, np.inf, lower)
