"""The closed description of a run that trainer, planner and accountants share: samplings, noise, releases, traces.

Other packages import only the modules in `__all__`.
"""

__all__ = [
    "buffered",
    "correlated",
    "estimates",
    "filters",
    "noise_strategies",
    "plain",
    "random_trials",
    "reasons",
    "reductions",
    "rounds",
    "samplings",
    "schedules",
    "toeplitz",
    "trace",
    "units",
]
