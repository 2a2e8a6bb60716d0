"""docs/training.md names every component that a sweep can ask for."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpsweep.workers.clipping import CLIPPING
from dpsweep.workers.noise.noise_sources import NOISE_SOURCES
from dpsweep.workers.sampling.samplers import SAMPLERS
from dpsweep.workers.training.augmentation import AUGMENTATIONS
from dpsweep.workers.training.optimizers import AVERAGES, LEARNING_RATE_SCHEDULES, OPTIMIZERS

TEXT = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
REGISTRIES = [CLIPPING, SAMPLERS, NOISE_SOURCES, OPTIMIZERS, LEARNING_RATE_SCHEDULES, AVERAGES, AUGMENTATIONS]


@pytest.mark.parametrize("name", sorted({name for registry in REGISTRIES for name in registry}))
def test_component_is_documented(name: str) -> None:
    assert any(f"{before}{name}{after}" in TEXT for before in "` " for after in "`,")
