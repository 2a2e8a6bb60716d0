"""Stored records of a sweep: its files, the states and results of its trials, and the lock on its folder.

Other packages import only the modules in `__all__`. `layout` and `published` load no torch; `results` does.
"""

__all__ = [
    "attempts",
    "background",
    "integrity",
    "later_results",
    "layout",
    "limits",
    "ownership",
    "published",
    "release_modes",
    "remembered",
    "results",
    "status",
    "status_snapshot",
]
