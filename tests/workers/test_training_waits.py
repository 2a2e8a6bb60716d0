"""How often a whole step of training waits for the device: norms, noise and update, with all that is recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from accounting.records import TrialFiles
from tests.workers.gradients.test_synchronisations import Waits
from tests.workers.trial_specs import small_trial
from workers.imports import NO_CODE
from workers.recording import closed_afterwards
from workers.reproducible import reproducible
from workers.spec import Component, NormSpec
from workers.trial import begin


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norms": NormSpec("when_sampled"), "noise_source": "os_entropy"},
        {"norms": NormSpec("off"), "averaging": Component("ema"), "clipping": Component("automatic")},
    ],
    ids=["refreshed", "when sampled", "off"],
)
def test_a_step_waits_once(changes: dict[str, Any], tmp_path: Path) -> None:
    spec = small_trial(**changes)
    with reproducible(spec.execution, spec.seed):
        trainer = begin(spec, TrialFiles(str(tmp_path)), NO_CODE, ()).trainer
        with closed_afterwards(trainer.recorders):
            trainer.step()  # takes norms, if they are not off
            waits = Waits()
            with waits:
                trainer.advance()
    assert waits.counts.total() == 1, waits.counts
