"""Recording of a sweep in MLflow while it runs.

Other packages import only the modules in `__all__`. `protocol` and `recorder` do not load MLflow.
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
    "protocol",
    "recorder",
    "registry",
]
