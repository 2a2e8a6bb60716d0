"""Allocator settings for processes that train, the peak memory of a process, and the use of a device.

Free of torch, so that results can be read without it.

A private step keeps every output gradient until all norms are known. By default glibc returns such large blocks to the
system as soon as they are freed, and the next step causes new page faults. They are a fifth of the time of a ResNet20
step on two cores (docs/performance.md).
"""

from __future__ import annotations

import resource
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import NonNegativeFloat, NonNegativeInt, TypeAdapter, ValidationError

from dpsweep.accounting.errors import DataCorruption
from dpsweep.accounting.records.files import exists, read_bytes, write_bytes_atomically

GPU_SHARE: Final = "DPSWEEP_GPU_SHARE"
"""Environment variable of a process whose trial reserves less than a GPU: how much of it."""
ALLOCATOR: Mapping[str, str] = {
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),  # the largest that glibc accepts
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
    "MALLOC_ARENA_MAX": "1",  # Ray trains in a thread, whose own arena would ignore the threshold
}
"""Environment variables that make a process keep freed memory until it ends; its peak does not change.

glibc reads them when a process starts; other C libraries ignore them.
"""


def peak_bytes() -> int:
    """Return the peak memory of this process, in bytes.

    Falls back to `getrusage`, because on Linux its value includes the peak of the parent process.
    """
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace").splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@dataclass(frozen=True)
class DeviceUse:
    """The device that trained a trial in its last attempt; with several ranks, that of rank 0.

    `device`: its name in torch, such as ``cuda:0``.
    `name`: of the hardware.
    `peak_bytes`: on a GPU the peak of torch's allocations, on a CPU the peak memory of the whole process.
    `seconds`: for which it trained.
    `utilization`: mean share of time in which the GPU computed, by NVML; None on a CPU and without NVML.
    All of it is public and covered by no epsilon.
    """

    device: str
    name: str
    peak_bytes: NonNegativeInt
    seconds: NonNegativeFloat
    utilization: float | None = None


_USE: TypeAdapter[DeviceUse] = TypeAdapter(DeviceUse)


def write_device_use(uri: str, use: DeviceUse) -> None:
    """Store the use. Raises: StorageError."""
    write_bytes_atomically(uri, _USE.dump_json(use))


def read_device_use(uri: str) -> DeviceUse | None:
    """Return the stored use; None if there is none. Raises: DataCorruption if the file is damaged."""
    if not exists(uri):
        return None
    try:
        return _USE.validate_json(read_bytes(uri))
    except ValidationError as error:
        raise DataCorruption(f"{uri} is damaged; delete it, which loses nothing but the use of the device") from error
