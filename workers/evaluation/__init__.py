"""Scores, rates and outcomes of models as data, and the predictions that they come from.

Other packages import only the modules in `__all__`.
"""

__all__ = [
    "attack_results",
    "outcomes",
    "predictions",
    "rates",
    "references",
    "scores",
]
