"""Worst-case costs of a run, by every accountant and group size of its sweep, and its bounds on attacks."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.attacks import AttackRisk, attack_risk, privacy_curve
from dpsweep.accounting.mechanism.estimates import PrivacyEstimate
from dpsweep.accounting.mechanism.reasons import Reason, weakened
from dpsweep.accounting.mechanism.trace import Trace
from dpsweep.orchestration.sweeps.planned import PlannedTrial, worst_cases
from dpsweep.orchestration.sweeps.schema import SweepSpec


@dataclass(frozen=True)
class Costs:
    """Worst-case costs of a run: by the sweep's accountant, by the ``others``, and for each group size of the sweep.

    `risks`: bounds on every attack, for one record and for each group size; none for a run without noise or a
    selection.
    """

    worst_case: PrivacyEstimate
    others: tuple[PrivacyEstimate, ...]
    groups: tuple[PrivacyEstimate, ...]
    risks: tuple[AttackRisk, ...] = ()

    def weakened(self, reasons: Iterable[Reason]) -> Costs:
        """Return the same numbers, claimed as estimates for these reasons; unchanged without any."""
        return Costs(
            weakened(self.worst_case, reasons),
            tuple(weakened(each, reasons) for each in self.others),
            tuple(weakened(each, reasons) for each in self.groups),
            tuple(weakened(each, reasons) for each in self.risks),
        )


def costs_as_planned(planned: PlannedTrial, sweep: SweepSpec) -> Costs:
    """Return costs of a run that went as planned."""
    return _with_groups(planned.trace, planned.spec.delta, sweep, (planned.worst_case, *planned.others))


def costs(trace: Trace, delta: float, sweep: SweepSpec) -> Costs:
    """Return costs of any run. Raises: UnsupportedMechanism if an accountant of the sweep does not cover it."""
    return _with_groups(trace, delta, sweep, worst_cases(trace, delta, sweep))


def _with_groups(trace: Trace, delta: float, sweep: SweepSpec, single: tuple[PrivacyEstimate, ...]) -> Costs:
    """Add costs of groups and bounds on attacks to the estimates for a single record.

    Groups of more than one record are accounted by privacy loss distributions; no other accountant covers them under
    sampling. A selection has no privacy curve, and so no bounds on attacks.
    """
    sizes = sweep.accounting.group_sizes
    bounded = sorted({1, *sizes}) if trace.is_private and trace.selection is None else ()
    return Costs(
        worst_case=single[0],
        others=single[1:],
        groups=tuple(_of_group(trace, delta, size) if size > 1 else single[0] for size in sizes),
        risks=tuple(_risk(trace, size) for size in bounded),
    )


# Trials that differ only in the seed have the same trace.
@functools.lru_cache(maxsize=256)
def _of_group(trace: Trace, delta: float, size: int) -> PrivacyEstimate:
    return account(trace, delta, "pld", size)


@functools.lru_cache(maxsize=256)
def _risk(trace: Trace, size: int) -> AttackRisk:
    return attack_risk(privacy_curve(trace, size))
