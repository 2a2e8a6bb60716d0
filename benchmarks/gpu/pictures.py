"""Pictures in the format of MNIST, of random content, for a machine that has no data."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from dpsweep.workers.data.source_files import DATA_VARIABLE


def written(folder: Path, rows: int) -> dict[str, str]:
    """Write ``rows`` training examples and a sixth as many to test. Returns the environment that names the folder.

    Each class is a fixed random picture under noise, so that a model can learn it.
    """
    generator, raw = np.random.default_rng(0), folder / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    kinds = generator.integers(0, 256, (10, 28, 28))
    for name, count in (("train", rows), ("t10k", max(20, rows // 6))):
        labels = np.arange(count) % 10
        pictures = np.clip(kinds[labels] + generator.normal(0.0, 64.0, (count, 28, 28)), 0, 255)
        _write(raw / f"{name}-images-idx3-ubyte", pictures.astype(np.uint8))
        _write(raw / f"{name}-labels-idx1-ubyte", labels.astype(np.uint8))
    return {DATA_VARIABLE: str(folder)}


def _write(path: Path, values: np.typing.NDArray[np.uint8]) -> None:
    """An idx file of unsigned bytes: magic 00 00 08 d, then d sizes (big-endian uint32), then the data."""
    header = struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
    path.write_bytes(header + values.tobytes())
