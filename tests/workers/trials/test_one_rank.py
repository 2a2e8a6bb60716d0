"""A group of one rank with a GPU: by NCCL where the tests run on one, and through the host where torch sees none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as distributed

from dpsweep.workers.spec import Component, ExecutionSpec, NormSpec, SamplingSpec, Shard, TrialSpec
from dpsweep.workers.trials import ranks
from dpsweep.workers.trials.ranks import RankLost, connected_ranks
from dpsweep.workers.trials.trial import run_trial
from tests.workers.devices import NAME
from tests.workers.trial_specs import DROPOUT_NET, small_trial
from tests.workers.trials.test_divided_model import TRAINED
from tests.workers.trials.test_ranks import TOLERANCE
from tests.workers.user_modules import code_of

EXECUTION = ExecutionSpec(device=NAME, micro_batch_size=5, checkpoint_every_epochs=0.5)
SMALL = small_trial(epochs=1, execution=EXECUTION, sampling=SamplingSpec("poisson", 26), norms=NormSpec("every_step"))
TRIALS: Mapping[str, tuple[TrialSpec, Shard | None]] = {
    "weights of single examples": (replace(SMALL, clipping=Component("individual")), None),
    "weights of layers": (replace(SMALL, clipping=Component("per_layer")), None),
    "weights of the whole batch": (replace(SMALL, clipping=Component("dpsgd_f"), model=DROPOUT_NET), None),
    "divided parameters": (replace(TRAINED, execution=EXECUTION), "all"),
}


@pytest.mark.parametrize("name", TRIALS)
def test_it_trains_as_a_process_alone(name: str, tmp_path: Path) -> None:
    spec, shard = TRIALS[name]
    run_trial(spec, str(tmp_path / "alone"), code=code_of(spec))
    with connected_ranks(0, 1, str(tmp_path / "meeting"), nccl=True, shard=shard) as group:
        run_trial(spec, str(tmp_path / "together"), code=code_of(spec), group=group)
    alone, together = (torch.load(tmp_path / each / "model.pt", weights_only=True) for each in ("alone", "together"))
    tolerance = TOLERANCE if shard else 0.0  # the last bits of products may follow where factors lie in memory
    for key, value in alone.items():
        torch.testing.assert_close(together[key], value, rtol=tolerance, atol=tolerance)


def test_a_rank_that_fails_does_not_wait_for_others_by_nccl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(distributed, "init_process_group", lambda backend, **options: ended.append(backend))
    monkeypatch.setattr(distributed, "destroy_process_group", lambda: ended.append("destroyed"))
    with pytest.raises(ValueError, match="of the model"), connected_ranks(0, 2, str(tmp_path / "meeting"), nccl=True):
        raise ValueError("an error of the model")
    assert ended == ["cpu:gloo,cuda:nccl"]


def test_an_error_of_nccl_is_said_beside_the_loss_of_a_rank() -> None:
    said = r"has ended, or NCCL failed: .* Duplicate GPU detected$"
    with pytest.raises(RankLost, match=said), ranks._reporting_lost_ranks():
        raise distributed.DistBackendError("NCCL error: Duplicate GPU detected\nLast error:")


def test_lack_of_memory_is_not_the_loss_of_a_rank() -> None:
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"), ranks._reporting_lost_ranks():
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes.")
