"""Sweep files: their schema, the grid of trials that they ask for, and the plan of each trial.

Other packages import only the modules in `__all__`. `text` and `schema` load no torch; `plan` and `draft` do.
"""

__all__ = [
    "combinations",
    "draft",
    "fields",
    "former_defaults",
    "grid",
    "growth",
    "plan",
    "reasons",
    "resources",
    "scheduler_groups",
    "schema",
    "search",
    "selection",
    "text",
    "tune",
    "user_code",
]
