"""Sweeps: from YAML to trials, to privacy results, to MLflow and a report."""
