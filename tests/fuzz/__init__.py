"""Random traces against independent oracles: `python -m tests.fuzz` says how far claims are from the exact epsilons."""
