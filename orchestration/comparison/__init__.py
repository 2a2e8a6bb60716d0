"""Evaluation of results: metrics, settings averaged over seeds, and the joined record of a sweep. Pure.

Other packages import only the modules in `__all__`. `formats` and `metrics` load no torch; `record` does.
"""

__all__ = [
    "across_sweeps",
    "best",
    "claims",
    "entries",
    "evidence",
    "extremes",
    "findings",
    "formats",
    "group_references",
    "intervals",
    "inventory",
    "ledger",
    "metrics",
    "parameters",
    "power",
    "publishing",
    "rate_metrics",
    "record",
    "sanity",
    "settings",
    "spoken",
    "statistics",
    "stored",
    "trials_table",
    "tuning_notes",
    "values",
]
