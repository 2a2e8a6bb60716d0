"""Evaluation of results: metrics, settings averaged over seeds, and the joined record of a sweep. Pure.

Other packages import only the modules in `__all__`. `formats` and `metrics` load no torch; `record` does.
"""

__all__ = [
    "across_sweeps",
    "best",
    "claims",
    "densities",
    "entries",
    "evidence",
    "findings",
    "fitting",
    "formats",
    "group_sizes",
    "hidden_groups",
    "importance",
    "individuals",
    "intervals",
    "inventory",
    "ledger",
    "metrics",
    "parameters",
    "plain_text",
    "power",
    "publishing",
    "rate_metrics",
    "record",
    "sanity",
    "settings",
    "spoken",
    "statistics",
    "stored",
    "told_reasons",
    "trials_table",
    "values",
    "winners",
]
