"""Gaussian and Rényi formulas, and rounding to the safe side.

Other packages import only the modules in `__all__`.
"""

__all__ = [
    "gaussian",
    "renyi",
    "roots",
    "rounding",
]
