"""Accounting of stored trials, part by part: of their examples and users, in this process or as Ray tasks.

`dpsweep.accounting.jobs.parallel` is the only module that imports ray; it is not imported here.
"""

__all__ = [
    "examples",
    "parallel",
    "release",
    "summaries",
    "user_accounting",
    "working_directory",
]
