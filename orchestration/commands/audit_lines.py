"""Lines on how much an audit can show, as ``dpsweep plan`` prints it."""

from __future__ import annotations

from dpsweep.orchestration.comparison.formats import number, percent
from dpsweep.workers.training.audit_prospects import GOALS, SIMULATED, AuditProspect


def prospect_line(found: AuditProspect) -> str:
    """Return how much of its claim the audit can show, how many canaries are enough, and their cost."""
    audit, shown, goal = found.audit, found.shown, f"{GOALS[found.audit.transcript]:g} of the claim"
    canaries = f"{audit.canaries:,} canaries ({audit.kind}, {audit.transcript})"
    simulated = f"{number(shown[0])} to {number(shown[-1])} in {SIMULATED} simulated runs"
    enough = f"no number that fits shows {goal}" if found.enough is None else f"{found.enough:,} canaries show {goal}"
    return (
        f"audit of ε {number(found.claim)} by {canaries}: shows about {number(shown[len(shown) // 2])} at most "
        f"({simulated}, whose canaries leak all that may leak); {enough}; {_cost(found)}"
    )


def _cost(found: AuditProspect) -> str:
    if found.audit.kind == "rows":
        return f"about {percent(found.left_out)} of the training examples are left out"
    if found.noise_factor is None:
        return "the canaries move the model as further noise would"
    return f"the canaries move the model about as far as if noise were {percent(found.noise_factor - 1.0)} larger"
