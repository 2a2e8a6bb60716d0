"""Models that people bring, each planned and run for three steps: ``python -m tests.models``."""
