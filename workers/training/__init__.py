"""Training of one model, step by step, and the records that accounting reads.

Other packages import only the modules in `__all__`.
"""

__all__ = [
    "audit_prospects",
    "augmentation",
    "batch_gradients",
    "classifier",
    "counters",
    "gradient_canaries",
    "history",
    "less_memory",
    "norm_recorder",
    "one_run_audit",
    "optimizers",
    "preprocessing",
    "private_training",
    "reproducible",
    "robust_ranges",
    "trainer",
    "trial_mechanism",
]
