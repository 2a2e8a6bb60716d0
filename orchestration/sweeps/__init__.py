"""What is asked: the sweep file, its grid of trials, and the plan of each.

Other rooms import from the modules in `__all__` only: `text` and `schema` load no torch, as `plan` and `draft` do.
"""

__all__ = [
    "combinations",
    "draft",
    "fields",
    "grid",
    "growth",
    "plan",
    "resources",
    "scheduler_groups",
    "schema",
    "search",
    "selection",
    "text",
    "tune",
    "user_code",
]
