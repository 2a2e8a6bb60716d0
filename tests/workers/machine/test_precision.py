"""Trials and engines compute with float32 as it is, by whichever of torch's settings a program has allowed less."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from dpsweep.workers.gradients.engine import GradientEngine
from dpsweep.workers.machine.devices import float32_precisions, without_tf32
from tests.workers.brute_force import per_example_loss

backends: Any = torch.backends
SETTINGS: dict[str, Callable[[], None]] = {
    "torch's own": lambda: None,
    "products": lambda: torch.set_float32_matmul_precision("medium"),
    "convolutions": lambda: setattr(backends.cudnn, "allow_tf32", True),
    "everything": lambda: setattr(backends, "fp32_precision", "tf32"),
    "cuDNN": lambda: setattr(backends.cudnn, "fp32_precision", "tf32"),
    "convolutions of cuDNN": lambda: setattr(backends.cudnn.conv, "fp32_precision", "tf32"),
    "products of cuBLAS": lambda: setattr(backends.cuda.matmul, "fp32_precision", "tf32"),
    "oneDNN": lambda: setattr(backends.mkldnn, "fp32_precision", "bf16"),
    "convolutions of oneDNN": lambda: setattr(backends.mkldnn.conv, "fp32_precision", "bf16"),
}


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    kinds = (backends, backends.cudnn, backends.mkldnn, backends.mkldnn.conv, backends.mkldnn.rnn)
    allowed = backends.cudnn.allow_tf32
    yield
    for each in kinds:
        each.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    backends.cudnn.allow_tf32 = allowed


@pytest.mark.parametrize("name", SETTINGS)
def test_nothing_is_rounded_and_settings_come_back(name: str) -> None:
    SETTINGS[name]()
    before = float32_precisions()
    with without_tf32():
        assert set(float32_precisions()) == {"ieee"}
        assert (torch.get_float32_matmul_precision(), backends.cudnn.allow_tf32) == ("highest", False)
    assert float32_precisions() == before


@pytest.mark.parametrize("name", SETTINGS)
def test_an_engine_takes_what_its_program_has_set(name: str) -> None:
    SETTINGS[name]()
    engine = GradientEngine(nn.Linear(5, 3), per_example_loss)
    assert bool(engine.norms(torch.randn(4, 5), torch.arange(4) % 3).norms.isfinite().all())
