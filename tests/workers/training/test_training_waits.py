"""How often a whole step of training waits for the device: norms, noise and update, with all that is recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.workers.own_code.imports import NO_CODE
from dpsweep.workers.spec import Component, NormSpec
from dpsweep.workers.training.norm_recorder import closed_afterwards
from dpsweep.workers.training.reproducible import reproducible
from dpsweep.workers.trials.trial_setup import set_up
from tests.workers.gradients.test_synchronisations import Waits
from tests.workers.trial_specs import small_trial


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("changes", "waits"),
    [
        ({}, 1),
        ({"norms": NormSpec("when_sampled"), "noise_source": "os_entropy"}, 1),
        ({"norms": NormSpec("off"), "averaging": Component("ema"), "clipping": Component("automatic")}, 1),
        ({"norms": NormSpec("when_sampled"), "clipping": Component("quantile")}, 2),
        *(({"clipping": Component(name)}, 2) for name in ("quantile", "dpsgd_f", "naive", "global_adaptive")),
    ],
    ids=[
        *("refreshed", "when sampled", "off", "when sampled, bounds change"),
        *("quantile", "dpsgd_f", "naive", "global_adaptive"),
    ],
)
def test_a_step_waits_once_and_once_more_for_the_answer_to_a_query(
    changes: dict[str, Any], waits: int, tmp_path: Path
) -> None:
    spec = small_trial(**changes)
    with reproducible(spec.execution, spec.seed):
        trainer = set_up(spec, TrialFiles(str(tmp_path)), NO_CODE, ()).trainer
        with closed_afterwards(trainer.stores):
            trainer.step()  # takes norms, if they are not off, and verifies the model
            trainer.step()  # may compare it again
            counted = Waits()
            with counted:
                trainer.advance()
    assert counted.counts.total() == waits, counted.counts
