"""Training with differential privacy and per-example norms. Loads neither ray nor mlflow."""
