"""Recording a sweep in MLflow while it runs."""
