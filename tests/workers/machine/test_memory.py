"""What a process says of its memory."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from dpsweep.accounting.errors import DataCorruption, InvalidInput
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.workers.machine import devices
from dpsweep.workers.machine.devices import DeviceMeter, choose_device, missing_gpu, room_for_data
from dpsweep.workers.machine.memory import GPU_SHARE, DeviceUse, read_device_use
from dpsweep.workers.spec import ExecutionSpec
from dpsweep.workers.training.history import Progress
from dpsweep.workers.training.less_memory import LackOfMemory
from dpsweep.workers.training.reproducible import explained
from dpsweep.workers.trials.trial import run_trial
from tests.known import known
from tests.workers.devices import NAME
from tests.workers.trial_specs import small_trial


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux alone says the peak of a program by itself")
def test_a_started_program_does_not_inherit_the_peak_of_its_parent() -> None:
    """The parent fills 400 MB; a child that it starts holds far less, whatever `getrusage` says."""
    child = "from dpsweep.workers.machine.memory import peak_bytes; print(peak_bytes())"
    parent = (
        "import subprocess, sys; from dpsweep.workers.machine.memory import peak_bytes; "
        "held = bytearray(b'1' * (400 << 20)); "
        f"print(peak_bytes()); sys.exit(subprocess.run([sys.executable, '-c', {child!r}]).returncode)"
    )
    printed = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, check=True).stdout.split()
    of_parent, of_child = sorted(map(int, printed), reverse=True)
    assert of_parent > 400 << 20
    assert of_child < 200 << 20


def test_the_peak_grows_with_what_is_held() -> None:
    program = (
        "from dpsweep.workers.machine.memory import peak_bytes; before = peak_bytes(); held = b'1' * (64 << 20); "
        "print(peak_bytes() - before)"
    )
    grown = int(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout)
    assert 60 << 20 < grown < 80 << 20


without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@without_gpu
@pytest.mark.parametrize("visible", [None, "", "0"])
def test_who_has_reserved_a_gpu_is_not_told_to_reserve_one(
    visible: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray shows a worker the GPUs that it has reserved."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(InvalidInput) as refused:
        choose_device("cuda")
    text = str(refused.value)
    assert f"torch {torch.__version__} is built " in text
    assert "driver" in text
    assert "CUDA_VISIBLE_DEVICES is" in text
    assert ("reserve a GPU" in text) == (visible != "0")
    assert "reserve" not in (missing_gpu() or "reserve")


def test_a_build_without_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "is built without CUDA" in (missing_gpu() or "")
    assert (missing_gpu() or "").endswith("install a build of torch with CUDA there")


def test_the_version_of_the_driver_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "version"
    told.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue Jun  6 22:20:39 UTC 2023\n")
    monkeypatch.setattr(devices, "_DRIVER", told)
    assert "the NVIDIA driver is 535.54.03" in devices.gpus_seen()


def test_a_trial_says_what_trained_it(tmp_path: Path) -> None:
    reported: list[Progress] = []
    run_trial(small_trial(), str(tmp_path), on_progress=reported.append)
    stored = known(read_device_use(TrialFiles(str(tmp_path)).device))
    assert stored.device == (NAME if NAME == "cpu" else "cuda:0")
    assert (stored.utilization is None) == (NAME == "cpu")
    assert stored.name
    assert stored.peak_bytes > 2**20
    assert stored.seconds > 0.0
    assert {progress.device.device for progress in reported if progress.device} == {stored.device}
    Path(TrialFiles(str(tmp_path)).device).write_text("{}")
    with pytest.raises(DataCorruption, match="damaged"):
        read_device_use(TrialFiles(str(tmp_path)).device)


def test_a_gpu_without_the_library_of_nvml_is_measured_without_utilization(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch says of a GPU stands in for one: allocations, name, and NVML's share of busy time."""
    shares, clock = iter([40, 80]), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * 2**20)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: next(shares))
    meter = DeviceMeter(torch.device("cuda:0"))
    for clock[0] in (1.0, 1.5, 2.5):
        meter.sample()
    assert meter.use() == DeviceUse("cuda:0", "Tesla T4", 3 * 2**20, 2.5, (0.4 + 0.8) / 2.0)

    def missing(device: torch.device) -> int:
        raise ModuleNotFoundError("pynvml")

    monkeypatch.setattr(torch.cuda, "utilization", missing)
    alone = DeviceMeter(torch.device("cuda:0"))
    clock[0] = 9.0
    alone.sample()
    assert alone.use() == DeviceUse("cuda:0", "Tesla T4", 3 * 2**20, 6.5)


def test_trials_that_share_a_gpu_do_not_claim_the_same_memory_for_their_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (800, 1000))
    assert room_for_data(torch.device("cuda")) == 400.0
    monkeypatch.setenv(GPU_SHARE, "0.25")
    assert room_for_data(torch.device("cuda")) == 100.0


@pytest.mark.parametrize(
    "said", ["CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "CUDA error: out of memory"]
)
def test_memory_that_a_library_of_a_gpu_lacks_is_lack_of_memory(said: str) -> None:
    with pytest.raises(LackOfMemory, match="'cuda' does not suffice"), explained(ExecutionSpec(device="cuda")):
        raise RuntimeError(said)
