"""Recording a sweep in MLflow while it runs.

Other rooms import from the modules in `__all__` only: `protocol` and `recorder` load no MLflow.
"""

__all__ = [
    "addresses",
    "embedded",
    "mlflow",
    "no_tracking",
    "protocol",
    "recorder",
    "registry",
]
