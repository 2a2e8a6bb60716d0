"""The self-contained HTML report of a sweep.

Other rooms import from the modules in `__all__` only: `owner`, for `dpsweep owner-report`, loads no plotly.
"""

__all__ = [
    "board",
    "catalogue",
    "first_screen",
    "owner",
    "page",
    "prose",
    "writing",
]
