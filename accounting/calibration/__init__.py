"""Noise, lengths and schedules that meet a budget, before anything trains.

Other packages import only the modules in `__all__`.
"""

__all__ = [
    "budgets",
    "parameter_search",
    "planned_runs",
    "so_far",
]
