"""Running a sweep: backends (Ray Tune or this process), the coordinator, and accounting as each trial ends.

Other rooms import from the modules in `__all__` only: `environment` must be imported before Ray.
"""

__all__ = [
    "audit_copies",
    "backend",
    "backends",
    "coordinator",
    "environment",
    "given_data",
    "notices",
    "prediction",
    "publication",
    "reaccounting",
    "reuse",
    "same_code",
    "session",
    "shared_connection",
    "status_file",
    "storage_checks",
    "submission",
    "upkeep",
]
