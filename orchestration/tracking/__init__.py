"""Recording a sweep in MLflow while it runs.

Other rooms import from its modules: an export here would make `protocol` and `recorder` load MLflow.
"""
