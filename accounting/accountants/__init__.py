"""Accountants of one run, of a chosen run, and of several runs together.

Other packages import only the modules in `__all__`.
"""

__all__ = [
    "account",
    "joint_cost",
    "methods",
    "one_run",
    "paper_only",
    "selection",
]
