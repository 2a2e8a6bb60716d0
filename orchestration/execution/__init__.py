"""Running a sweep: backends (Ray Tune or this process), the coordinator, and accounting as each trial ends.

Other rooms import from the modules in `__all__` only: `environment` must be imported before Ray.
"""

__all__ = [
    "again",
    "ahead",
    "backend",
    "coordinator",
    "disk_space",
    "environment",
    "job_package",
    "keeping",
    "object_stores",
    "prediction",
    "probing",
    "removal",
    "status_file",
    "submission",
    "taking",
    "upkeep",
]
