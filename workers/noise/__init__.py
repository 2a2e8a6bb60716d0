"""Gaussian noise from seeded and secret sources, and its correlation over steps.

Other packages import only the modules in `__all__`.
"""

__all__ = [
    "chacha",
    "gaussian_sources",
    "noise_sources",
    "step_noise",
]
