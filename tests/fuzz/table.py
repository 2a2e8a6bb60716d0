"""The outcomes as a table: a row per kind of case, with its worst gaps and the traces that gave them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tests.fuzz.judging import ROUNDING, Claim, Outcome


@dataclass(frozen=True)
class Row:
    """One kind of case; gaps are relative to the exact epsilon, widths to its upper bound."""

    kind: str
    outcomes: tuple[Outcome, ...]

    @property
    def claims(self) -> list[tuple[Outcome, Claim]]:
        return [(outcome, claim) for outcome in self.outcomes for claim in outcome.claims]

    @property
    def unsafe(self) -> tuple[Outcome, Claim] | None:
        """The claim that is the least above the exact epsilon, or the farthest below it."""
        return max(self.claims, key=lambda pair: max(pair[1].unsafe, pair[1].unsafe_lower), default=None)

    @property
    def loose(self) -> tuple[Outcome, Claim] | None:
        """The claim that is the farthest above the exact epsilon, of accountants that are to be tight."""
        return max(self.claims, key=lambda pair: pair[1].loose, default=None)

    @property
    def error(self) -> float:
        """The median width of the oracle's bounds."""
        widths = sorted(
            (c.truth.high - c.truth.low) / c.truth.high for _, c in self.claims if 0.0 < c.truth.high < float("inf")
        )
        return widths[len(widths) // 2] if widths else 0.0


def rows_of(outcomes: Sequence[Outcome]) -> list[Row]:
    kinds: defaultdict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        kinds[outcome.case.row].append(outcome)
    return [Row(kind, tuple(found)) for kind, found in sorted(kinds.items())]


_EDGES = (0.0, 1e-4, 1e-3, 1e-2, 0.05, 0.2, 1.0, float("inf"))
"""Bounds of the bins of the histogram of how far claims are above the exact epsilon, relative."""


def histogram(rows: Sequence[Row]) -> str:
    """How many claims of accountants that are to be tight are how far above the exact epsilon, and the wrong ones."""
    claims = [claim for row in rows for _, claim in row.claims if claim.is_judged]
    counts = [sum(low <= claim.loose < high for claim in claims) for low, high in pairwise(_EDGES)]
    bins = ", ".join(f"{count} below {high:g}" for count, (_, high) in zip(counts, pairwise(_EDGES), strict=True))
    everyone = [claim for row in rows for _, claim in row.claims]
    under = sum(claim.unsafe > ROUNDING for claim in everyone)
    over = sum(claim.unsafe_lower > ROUNDING for claim in everyone)
    known = sum(claim.lower is not None for claim in everyone)
    wrong = f"{under} under-stated, {over} of {known} lower bounds too high"
    return f"looseness of {len(claims)} tight claims: {bins}\n{wrong}"


def as_dict(row: Row) -> dict[str, Any]:
    """Plain values for JSON; the traces are in words."""
    return {
        "kind": row.kind,
        "traces": len(row.outcomes),
        "claims": len(row.claims),
        "findings": sum(1 for outcome in row.outcomes for _ in outcome.findings),
        "oracle_error": row.error,
        "unsafe": _gap(row.unsafe, "unsafe"),
        "loose": _gap(row.loose, "loose"),
        "seconds": max(outcome.seconds for outcome in row.outcomes),
        "mebibytes": max(outcome.kibibytes for outcome in row.outcomes) >> 10,
    }


def _gap(worst: tuple[Outcome, Claim] | None, side: str) -> dict[str, Any] | None:
    if worst is None:
        return None
    outcome, claim = worst
    gap = claim.loose if side == "loose" else max(claim.unsafe, claim.unsafe_lower)
    return {"gap": gap, "case": outcome.case.index, "claim": str(claim), "trace": str(outcome.case)}


def table(rows: Sequence[Row]) -> str:
    """The rows, and below them the case of each worst gap."""
    lines = [
        f"{'kind of case':28} {'traces':>6} {'claims':>6} {'wrong':>5} {'oracle':>8} {'below by':>9} {'case':>5} "
        f"{'above by':>9} {'case':>5} {'s':>5} {'MiB':>5}"
    ]
    for row in rows:
        plain = as_dict(row)
        below, above = plain["unsafe"] or {}, plain["loose"] or {}
        lines.append(
            f"{row.kind:28} {plain['traces']:6} {plain['claims']:6} {plain['findings']:5} {plain['oracle_error']:8.1g} "
            f"{below.get('gap', 0.0):9.1e} {below.get('case', ''):>5} {above.get('gap', 0.0):9.1e} "
            f"{above.get('case', ''):>5} {plain['seconds']:5.1f} {plain['mebibytes']:5}"
        )
    lines.append("below by: negative where every claim is above the exact epsilon; above by: of auto and pld, at least")
    return "\n".join(lines)
