"""The device that trained a trial, and how much of it was used. Free of torch, so that results can be read without."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import TypeAdapter, ValidationError

from dpsweep.accounting.errors import DataCorruption
from dpsweep.accounting.records.files import exists, read_bytes, write_bytes_atomically


@dataclass(frozen=True)
class DeviceUse:
    """The device that trained a trial in its last attempt; with several ranks, that of rank 0.

    `device`: its name in torch, such as ``cuda:0``. `name`: of the hardware. `peak_bytes`: on a GPU the peak of torch's
    allocations, on a CPU the peak memory of the whole process. `seconds`: for which it trained. `utilization`: mean
    share of time in which the GPU computed, by NVML; None on a CPU and without NVML. All of it is public and covered by
    no epsilon.
    """

    device: str
    name: str
    peak_bytes: int
    seconds: float
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
