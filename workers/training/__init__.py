"""Training of one model, step by step, and the records that accounting reads.

Other packages import only the modules in `__all__`.
"""

__all__ = [
    "audit",
    "augmentation",
    "batch_gradients",
    "classifier",
    "counters",
    "history",
    "less_memory",
    "optimizers",
    "parts",
    "preprocessing",
    "private_training",
    "reasons",
    "recording",
    "reproducible",
    "requirements",
    "robust_ranges",
    "run_state",
    "trainer",
    "trial_mechanism",
]
