"""Recording of a sweep in MLflow while it runs.

Other packages import only the modules in `__all__`. `opening`, `protocol` and `recorder` do not load MLflow.
"""

__all__ = [
    "abandoned",
    "access",
    "addresses",
    "deadlines",
    "embedded",
    "given_stores",
    "mlflow",
    "no_tracking",
    "opening",
    "protocol",
    "recorder",
    "registry",
]
