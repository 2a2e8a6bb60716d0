"""Planted bugs that the tests must notice: `python -m tests.mutants` runs them one by one on a copy of the checkout."""
