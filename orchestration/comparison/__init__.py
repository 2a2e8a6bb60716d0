"""Meaning of results: metrics, settings averaged over seeds, intervals, verdicts, and the joined record of a sweep.

In the order of the data: `stored` reads a `record`, `claims` checks it, and `publishing` makes of it what may be shown.
`settings` averages over seeds. `evidence` finds intervals of `metrics` from `tallies` of resampled test examples.
`findings` compares settings by them; `best`, `across_sweeps` and the report start from there.

Other packages import only the modules in `__all__`. `formats` and `metrics` load no torch; `record` does.
"""

__all__ = [
    "across_sweeps",
    "best",
    "claims",
    "evidence",
    "extremes",
    "findings",
    "formats",
    "group_references",
    "intervals",
    "inventory",
    "ledger",
    "metric_types",
    "metrics",
    "parameters",
    "power",
    "publishing",
    "rate_metrics",
    "record",
    "sanity",
    "settings",
    "statistics",
    "stored",
    "trials_table",
    "tuning_notes",
    "values",
    "wording",
]
