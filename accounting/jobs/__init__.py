"""Accounting of stored trials, part by part: of their examples and users, in this process or as Ray tasks.

`dpsweep.accounting.jobs.parallel` is the only module that imports ray; it is not imported here.
"""

from dpsweep.accounting.jobs.examples import (
    AccountingJob,
    Numbered,
    Part,
    PartResult,
    PartwiseJob,
    Result,
    Scatter,
    account_all,
    account_in_process,
    account_part,
    epsilons_of_part,
    inputs_of,
    store_epsilons,
)
from dpsweep.accounting.jobs.summaries import CountedEpsilons, Counting, EpsilonSummary, Members, Moments, summarise
from dpsweep.accounting.jobs.user_accounting import account_users

__all__ = [
    "AccountingJob",
    "CountedEpsilons",
    "Counting",
    "EpsilonSummary",
    "Members",
    "Moments",
    "Numbered",
    "Part",
    "PartResult",
    "PartwiseJob",
    "Result",
    "Scatter",
    "account_all",
    "account_in_process",
    "account_part",
    "account_users",
    "epsilons_of_part",
    "inputs_of",
    "parallel",
    "release",
    "store_epsilons",
    "summarise",
    "working_directory",
]
