"""Trace -> (epsilon, delta): of rows or of users, of a run that is released in any case or of one that was selected."""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from dpsweep.accounting.accountants.one_run import ACCOUNTANTS, account_one
from dpsweep.accounting.accountants.selection import CHOICE, account_selected
from dpsweep.accounting.errors import UnsupportedMechanism, require_finite
from dpsweep.accounting.mechanism.estimates import PrivacyEstimate, of_group
from dpsweep.accounting.mechanism.reductions import by_rows
from dpsweep.accounting.mechanism.rounds import require_group_size
from dpsweep.accounting.mechanism.trace import Trace
from dpsweep.accounting.mechanism.units import Example, User


def account(trace: Trace, delta: float, accountant: str = "auto", group_size: int = 1) -> PrivacyEstimate:
    """Return (epsilon, delta) of ``trace`` under its own adjacency, for groups of ``group_size`` examples or users.

    The result's ``kind`` says whether this is a guarantee. A trace without noise has epsilon infinity and the kind
    ``none``; if the noise followed earlier results, kind is at best ``estimate``. The epsilon that a filter enforced
    for every example is returned instead, as accountant ``filter``, if it is lower or if only it is a guarantee. For a
    private selection the result is the epsilon after the selection (`dpsweep.accounting.accountants.selection`).

    Raises: UnsupportedMechanism when the accountant does not cover the trace, InvalidInput for an unknown accountant or
    a delta outside (0, 1).
    """
    delta, group_size = require_finite("delta", delta, above=0.0, below=1.0), require_group_size(group_size)
    match trace.unit:
        case Example():
            pass
        case User():
            rows, size = by_rows(trace, group_size)
            of_users = of_group(account(rows, delta, accountant, size), group_size, trace.unit)
            return replace(of_users, adjacency=trace.adjacency)
        case _:
            assert_never(trace.unit)
    if trace.selection is not None:
        return account_selected(replace(trace, selection=None), trace.selection, delta, accountant, group_size)
    return account_one(trace, delta, accountant, group_size)


def account_again(trace: Trace, delta: float, claimed: str, group_size: int = 1) -> PrivacyEstimate:
    """Return the cost that a claim is compared with, by the accountant that it names, ``claimed``.

    By ``auto`` where that is no accountant, such as ``filter``, or does not cover the trace: a bound of ``pld`` may
    bear the name of a method that covers its rounds alone. Raises: as `account`.
    """
    named = claimed.removeprefix(CHOICE)
    name = named if named in ACCOUNTANTS else "auto"
    try:
        return account(trace, delta, name, group_size)
    except UnsupportedMechanism:
        return account(trace, delta, "auto", group_size)
