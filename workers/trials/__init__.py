"""A trial from its specification to its results, and what is checked or attacked around it.

Other packages import only the modules in `__all__`.
"""

__all__ = [
    "divisible",
    "exposure",
    "feasibility",
    "predicted_table",
    "probe",
    "ranks",
    "trained_model",
    "trial",
]
