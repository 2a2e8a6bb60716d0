"""Recording of a sweep in MLflow while it runs.

Other packages import only the modules in `__all__`. `opening`, `tracker` and `recorder` do not load MLflow.
"""

__all__ = [
    "abandoned",
    "access",
    "addresses",
    "embedded",
    "given_stores",
    "logged_models",
    "opening",
    "plain_comparison",
    "recorder",
    "requests",
    "tracker",
]
