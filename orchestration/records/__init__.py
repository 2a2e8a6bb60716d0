"""What is kept: the files of a sweep, the states and results of its trials, and who may write them.

Other rooms import from the modules in `__all__` only: `layout` and `states` load no torch, as `results` does.
"""

__all__ = [
    "accounts",
    "attempts",
    "failures",
    "integrity",
    "layout",
    "limits",
    "manifest",
    "ownership",
    "published",
    "release_modes",
    "results",
    "snapshot",
    "states",
    "status",
]
