"""The command line: what users type and what the terminal shows.

Other rooms import from the modules in `__all__` only. Commands load heavy modules when they run.
"""

__all__ = [
    "main",
]
