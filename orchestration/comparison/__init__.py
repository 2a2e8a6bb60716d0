"""What results mean: metrics, settings averaged over seeds, and the joined record of a sweep. Pure.

Other rooms import from the modules in `__all__` only: `formats` and `metrics` load no torch, as `record` does.
"""

__all__ = [
    "across",
    "best",
    "claims",
    "densities",
    "entries",
    "evidence",
    "findings",
    "formats",
    "group_sizes",
    "individuals",
    "intervals",
    "inventory",
    "ledger",
    "metrics",
    "parameters",
    "plain_text",
    "rate_metrics",
    "record",
    "selected",
    "settings",
    "shown",
    "statistics",
    "stored",
    "table",
    "values",
    "winners",
]
