"""Devices that trials run on, by their names in torch."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.machine.memory import GPU_SHARE, DeviceUse, peak_bytes

_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
"""Environment variable with the GPUs that a process may use; Ray sets it to those that a worker has reserved."""
_RESERVE: Final = "reserve a GPU with resources.gpus where there is one, or set execution.device to auto or cpu"
_DRIVER: Final = Path("/proc/driver/nvidia/version")
_SAMPLE_PERIOD: Final = 1.0
"""Seconds between two samples of a GPU's utilization; NVML averages over up to one second."""
T = TypeVar("T")


def refuse_autocast() -> None:
    """Raise InvalidInput inside ``torch.autocast``, which would round norms and sums."""
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise InvalidInput(
            "torch.autocast is on around this call, where it would round norms and sums; leave its block, and choose "
            "the precision of the model's passes by autocast (execution.autocast of trials)"
        )


_LACK_OF_MEMORY: Final = ("DefaultCPUAllocator", "CUDA error: out of memory", "STATUS_ALLOC_FAILED")
"""Parts of errors about memory for which torch's allocator of CUDA did not ask: of the host, a context, a library."""


def lacks_memory(error: Exception) -> bool:
    """Return whether an error of torch says that the device has too little memory."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _LACK_OF_MEMORY)


@contextlib.contextmanager
def torch_defaults() -> Iterator[None]:
    """Undo what the caller has set for all of torch: default device and dtype, and inference mode.

    A tensor for which our code names no device or dtype is then on the CPU, or float32, wherever the caller is.
    Raises: InvalidInput as `refuse_autocast`.
    """
    refuse_autocast()
    device, dtype = torch.get_default_device(), torch.get_default_dtype()
    if device.type != "cpu":
        torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)
    try:
        with torch.inference_mode(False):
            yield
    finally:
        torch.set_default_dtype(dtype)
        if device.type != "cpu":
            torch.set_default_device(device)


@contextlib.contextmanager
def without_tf32() -> Iterator[None]:
    """Compute with float32 as it is: a GPU may round factors to TensorFloat-32 of 10 bits, oneDNN to bfloat16 of 7.

    Products and convolutions are then the same for an example alone and in a batch, but for the order of sums. Torch
    has newer settings of precision, which win, and older ones, whose readers fail where they differ from the newer.
    """
    before = float32_precisions()
    products = _if_readable(torch.get_float32_matmul_precision)
    convolutions = _if_readable(lambda: torch.backends.cudnn.allow_tf32)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    _set_precisions(["ieee"] * len(before))
    try:
        yield
    finally:
        if products is not None:
            torch.set_float32_matmul_precision(products)
        if convolutions is not None:
            torch.backends.cudnn.allow_tf32 = convolutions
        _set_precisions(before)


def float32_precisions() -> tuple[str, ...]:
    """Return how torch computes with float32: products, convolutions and recurrent layers, by CUDA and by oneDNN."""
    return tuple(each.fp32_precision for each in _operations())


def _set_precisions(precisions: Sequence[str]) -> None:
    for each, precision in zip(_operations(), precisions, strict=True):
        each.fp32_precision = precision


@functools.cache
def _operations() -> tuple[Any, ...]:
    known: Any = torch.backends  # whose attributes are made when it is imported
    cudnn, onednn = known.cudnn, known.mkldnn
    return known.cuda.matmul, cudnn.conv, cudnn.rnn, onednn.matmul, onednn.conv, onednn.rnn


def _if_readable(read: Callable[[], T]) -> T | None:
    with contextlib.suppress(RuntimeError):
        return read()
    return None


def choose_device(name: str) -> torch.device:
    """Return the device called ``name``; ``auto`` is the GPU if there is one, else the CPU.

    Raises: InvalidInput when the name is unknown or this machine has no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = known_device(name)
    if device.type == "cuda" and (device.index or 0) >= (found := torch.cuda.device_count()):
        remedy = _remedy() if os.environ.get(_VISIBLE) else _RESERVE
        raise InvalidInput(f"device is {name!r}, but torch finds {found} CUDA devices here: {gpus_seen()}; {remedy}")
    return device


def missing_gpu() -> str | None:
    """Return why torch sees no GPU in this process, and what to do about it, in words; None if it sees one."""
    return None if torch.cuda.is_available() else f"{gpus_seen()}; {_remedy()}"


def gpus_seen() -> str:
    """Return the build of torch, the driver, and the GPUs that the environment lets this process see, in words."""
    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    visible = os.environ.get(_VISIBLE)
    shown = f"{_VISIBLE} is not set" if visible is None else f"{_VISIBLE} is {visible!r}"
    return f"torch {torch.__version__} is {build}, {_driver()}, {shown}"


def _driver() -> str:
    """Return the version of NVIDIA's kernel driver, in words."""
    try:
        words = _DRIVER.read_text(encoding="utf-8", errors="replace").split("Module")[1].split()
    except (OSError, IndexError):
        return "no NVIDIA driver is loaded"
    return f"the NVIDIA driver is {next((word for word in words if word[0].isdigit()), 'of unknown version')}"


def _remedy() -> str:
    """Return the next step for a process that has a GPU which torch does not see."""
    if torch.version.cuda is None:
        return "install a build of torch with CUDA there"
    if not _DRIVER.exists():
        return "install NVIDIA's driver there, or give the container its devices"
    return "choose a build of torch that this driver supports, and devices that exist"


class DeviceMeter:
    """Measures the use of ``device`` by this process, from its construction on."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._began, self._next = device, time.monotonic(), 0.0
        self._samples = self._total = 0.0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def sample(self) -> None:
        """Take a sample of the GPU's utilization, if the last one is a second old; costs nothing on a CPU."""
        if self._device.type != "cuda" or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _SAMPLE_PERIOD
        try:
            percent = torch.cuda.utilization(self._device)
        except Exception:  # the library of NVML defines its own errors; it is optional, and not every GPU has a counter
            self._next = math.inf
            return
        self._samples, self._total = self._samples + 1.0, self._total + percent / 100.0

    def use(self) -> DeviceUse:
        """Return the use so far."""
        seconds = time.monotonic() - self._began
        if self._device.type == "cpu":
            return DeviceUse("cpu", _cpu_name(), peak_bytes(), seconds)
        name, peak = torch.cuda.get_device_name(self._device), torch.cuda.max_memory_allocated(self._device)
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        utilization = self._total / self._samples if self._samples else None
        return DeviceUse(f"cuda:{index}", name, peak, seconds, utilization)


def rounding_of(device: torch.device) -> str:
    """Return the version of torch and the name of the device: sums may be rounded otherwise by any other."""
    return (
        f"torch {torch.__version__} on {torch.cuda.get_device_name(device) if device.type == 'cuda' else _cpu_name()}"
    )


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def sent(values: Tensor, device: torch.device) -> Tensor:
    """Return ``values`` [...] from the CPU, copied to the device; for a GPU the host does not wait for the copy."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def known_device(name: str) -> torch.device:
    """Return the device called ``name`` in torch, be it here or not. Raises: InvalidInput for another name."""
    with contextlib.suppress(RuntimeError):
        device = torch.device(name)
        if device.type in ("cpu", "cuda"):
            return device
    raise InvalidInput(f"unknown device {name!r}; use auto, cpu, cuda or cuda:N")


def room_for_data(device: torch.device) -> float:
    """Return the bytes of data that a trial may keep on a device.

    On a GPU, half of its free memory times the share of it that the trial reserves. Models and gradients need the
    rest, and others that begin at the same time find the same memory free. On the CPU, any number, because the data are
    in its memory already.
    """
    share = float(os.environ.get(GPU_SHARE, "1"))
    return math.inf if device.type == "cpu" else share * torch.cuda.mem_get_info(device)[0] / 2
