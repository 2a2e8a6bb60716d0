"""Stored records of a sweep: its files, the states and results of its trials, and the lock on its folder.

Other packages import only the modules in `__all__`. `layout` and `states` load no torch; `results` does.
"""

__all__ = [
    "accounts",
    "attempts",
    "audits",
    "failures",
    "integrity",
    "layout",
    "limits",
    "manifest",
    "ownership",
    "published",
    "recording_progress",
    "release_modes",
    "remembered",
    "report_digests",
    "results",
    "safety",
    "states",
    "status",
    "status_snapshot",
    "turn",
]
