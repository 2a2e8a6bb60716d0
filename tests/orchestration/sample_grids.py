"""A small sweep that the tests of orchestration share."""

from __future__ import annotations

import yaml

SMALL = """
name: small
data: {name: digits, keep: {8: 0.1}}
model: {name: mlp, hidden: [16]}
sampling: {method: poisson, batch_size: 128}
epochs: 2
clipping: [none, {name: flat, bound: 1.0}, dpsgd_f]
noise: [constant, {name: exponential, decay: 0.1}]
seeds: [0, 1]
privacy: {target_epsilon: 5, delta: 1e-5}
"""


def small(**changes: object) -> str:
    """The small sweep with top-level keys replaced."""
    return yaml.safe_dump({**yaml.safe_load(SMALL), **changes})
