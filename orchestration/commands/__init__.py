"""The command line: commands, their options and their output.

Other rooms import from the modules in `__all__` only. Commands load heavy modules when they run.
"""

__all__ = [
    "main",
]
