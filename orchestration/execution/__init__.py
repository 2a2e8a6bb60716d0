"""Running a sweep: backends (Ray Tune or this process), the coordinator, and accounting as each trial ends.

Other rooms import from the modules in `__all__` only: `environment` must be imported before Ray.
"""

__all__ = [
    "audit_copies",
    "backend",
    "backends",
    "coordinator",
    "disk_space",
    "early_start",
    "environment",
    "given_data",
    "job_package",
    "notices",
    "object_stores",
    "planning",
    "prediction",
    "probing",
    "publication",
    "reaccounting",
    "removal",
    "reuse",
    "same_code",
    "shared_connection",
    "status_file",
    "submission",
    "upkeep",
]
