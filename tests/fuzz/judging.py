"""What accounting claims of a case, with time, memory and warnings, beside the oracle's bounds."""

from __future__ import annotations

import math
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.errors import UnsupportedMechanism
from dpsweep.accounting.individual import individual_epsilons
from dpsweep.accounting.pld import epsilon_of_examples
from tests.fuzz.cases import Case, case_of
from tests.fuzz.lattice import Bracket
from tests.fuzz.oracles import exact
from tests.fuzz.rounds import Members

GUARANTEES = ("auto", "pld", "rdp", "rdp-classic", "gdp", "zcdp", "strong")
TIGHT = ("auto", "pld")
"""Accountants whose distance above the exact epsilon is judged."""
LOOSE = 0.05
"""Claims that are farther above the exact epsilon get a remark."""
SECONDS, KIBIBYTES = 10.0, 1 << 20
ROUNDING = 1e-8
"""Relative; of the oracle's own bounds."""
_NOTHING = 1e-9
"""Epsilons below it are taken for this one: there the exact one is lost in rounding."""


@dataclass(frozen=True)
class Claim:
    """What one accountant says of the members, and the oracle's bounds on the truth."""

    accountant: str
    upper: float
    lower: float | None
    kind: str
    truth: Bracket

    @property
    def unsafe(self) -> float:
        """How far the claim is below the exact epsilon, relative; positive if it is understated."""
        return self.truth.low / max(self.upper, _NOTHING) - 1.0 if self.truth.low > _NOTHING else -1.0

    @property
    def unsafe_lower(self) -> float:
        """The same for the claimed lower bound, which may not be above the exact epsilon."""
        if self.lower is None or self.lower <= _NOTHING:
            return -1.0
        return self.lower / max(self.truth.high, _NOTHING) - 1.0

    @property
    def is_judged(self) -> bool:
        """Whether the claim is to be tight, and the oracle has an upper bound to compare it with."""
        return self.truth.high < math.inf and self.accountant in TIGHT

    @property
    def loose(self) -> float:
        """How far the claim is above the exact epsilon at least, relative; 0 if it may be exact."""
        if not self.is_judged:
            return 0.0
        return max(self.upper / max(self.truth.high, _NOTHING) - 1.0, 0.0) if self.upper > _NOTHING else 0.0


@dataclass(frozen=True)
class Outcome:
    """All claims about one case, what the slowest took, and what is wrong with them."""

    case: Case
    claims: tuple[Claim, ...]
    seconds: float
    kibibytes: int
    fault: str = ""

    @property
    def findings(self) -> Iterator[str]:
        """One line for each defect."""
        if self.fault:
            yield self.fault
        if self.seconds > SECONDS:
            yield f"took {self.seconds:.1f} s"
        if self.kibibytes > KIBIBYTES:
            yield f"took {self.kibibytes >> 10} MiB"
        for claim in self.claims:
            if claim.unsafe > ROUNDING:
                yield f"understated: {claim}"
            if claim.unsafe_lower > ROUNDING:
                yield f"lower bound overstated: {claim}"
            if self.case.trace.noise_follows_results and claim.kind != "estimate":
                yield f"called a {claim.kind} although the noise followed results: {claim}"

    @property
    def remarks(self) -> Iterator[str]:
        """One line for each claim that is not wrong, but loose."""
        yield from (f"loose by {claim.loose:.3g}: {claim}" for claim in self.claims if claim.loose > LOOSE)


def judged(case: Case) -> Outcome:
    """Ask every accountant that covers the case; warnings are errors. The oracle comes after the clock."""
    reset = Path("/proc/self/clear_refs")
    if reset.exists():
        reset.write_text("5")  # peak memory from here on
    resident, said, clock = _peak(), list[Said](), [time.process_time()]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for one in _said(case):
                said.append(one)
                clock.append(time.process_time())
    except Exception:
        lines = traceback.format_exc().strip().splitlines()
        return Outcome(case, (), time.process_time() - clock[0], 0, f"raised {lines[-1]} ({lines[-3].strip()})")
    seconds, peak = max((after - before for before, after in pairwise(clock)), default=0.0), _peak() - resident
    truths: dict[Members, Bracket] = {}
    for members, *_ in said:
        if members not in truths:
            truths[members] = exact(case, members)
    claims = tuple(Claim(name, upper, lower, kind, truths[members]) for members, name, upper, lower, kind in said)
    return Outcome(case, claims, seconds, peak)


def judged_number(seed: int, index: int) -> Outcome:
    """The outcome of one case; here, because a spawned process does not find what `__main__` defines."""
    return judged(case_of(seed, index))


def _peak() -> int:
    """Largest memory of this process since it was reset, in KiB; 0 where the system does not tell."""
    status = Path("/proc/self/status")
    return int(status.read_text().partition("VmHWM:")[2].split()[0]) if status.exists() else 0


Said = tuple[Members, str, float, float | None, str]


def _said(case: Case) -> Iterator[Said]:
    yield from _ASKED[case.unit](case)


def _of_equals(case: Case) -> Iterator[Said]:
    size = len(case.members.contributions)
    for name in GUARANTEES if size == 1 else GUARANTEES[1:]:  # auto is the least of others, at the cost of all
        try:
            found = account(case.trace, case.delta, name, size)
        except UnsupportedMechanism:
            continue
        yield case.members, name, found.epsilon, found.lower_epsilon, found.kind


def _of_user(case: Case) -> Iterator[Said]:
    for name in GUARANTEES:
        try:
            found = account(case.trace, case.delta, name)
        except UnsupportedMechanism:
            continue
        yield case.members, name, found.epsilon, found.lower_epsilon, found.kind


def _of_rows(case: Case) -> Iterator[Said]:
    values = np.array(case.members.contributions, np.float32)
    for name in ("pld", "rdp"):
        found = individual_epsilons(case.members.steps, values, case.trace, case.delta, name)
        for place, row in enumerate(case.members.contributions):
            bound = None if found.lower is None else float(found.lower[place])
            yield Members(case.members.steps, (row,)), name, float(found.upper[place]), bound, found.kind


def _of_members(case: Case) -> Iterator[Said]:
    values = np.array(case.members.contributions, np.float32)
    found = epsilon_of_examples(case.trace, case.members.steps, values, case.delta)
    yield case.members, "pld", found.upper, None, found.kind  # the lower bound is that of rounded contributions


_ASKED: dict[str, Callable[[Case], Iterator[Said]]] = {
    "example": _of_equals,
    "group": _of_equals,
    "rows": _of_rows,
    "members": _of_members,
    "user": _of_user,
}
