"""What results mean: metrics, settings averaged over seeds, and the joined record of a sweep. Pure.

Other rooms import from the modules in `__all__` only: `formats` and `metrics` load no torch, as `record` does.
"""

__all__ = [
    "across",
    "claims",
    "formats",
    "individuals",
    "inventory",
    "ledger",
    "metrics",
    "plain_text",
    "record",
    "settings",
    "shown",
    "statistics",
    "stored",
    "table",
    "winners",
]
