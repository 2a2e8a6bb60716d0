"""Per-example gradient norms and weighted sums of per-example gradients, at about the cost of a plain step.

Other rooms import only the modules in `__all__`.
"""

__all__ = [
    "checks",
    "deterministic_passes",
    "divided",
    "engine",
    "layers",
    "micro_batches",
    "modes",
    "pass_results",
    "planners",
    "reached",
    "rows_at_once",
]
