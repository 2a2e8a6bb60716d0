"""Noise, lengths and schedules that meet a budget, before anything trains.

Other packages import only the modules in `__all__`.
"""

__all__ = [
    "budgets",
    "calibrate",
    "planning",
    "so_far",
]
