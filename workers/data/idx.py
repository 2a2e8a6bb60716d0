"""MNIST and Fashion-MNIST: idx files, gzipped or not."""

from __future__ import annotations

import gzip
import math
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dpsweep.accounting.errors import DataCorruption
from dpsweep.workers.data.base import Source, make_split
from dpsweep.workers.data.preparations import pixels
from dpsweep.workers.data.source_files import locate, reading

_CLOTHES = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
_LARGEST = 2**30
"""Maximum number of unpacked bytes of a file; MNIST has 47 million."""


def mnist(root: str | None = None) -> Source:
    """Return 60,000 + 10,000 handwritten digits of 28 x 28 pixels; groups are the digits."""
    names = tuple(str(digit) for digit in range(10))
    return _load("mnist", "MNIST", root, names, 0.1307, 0.3081)


def fashion_mnist(root: str | None = None) -> Source:
    """Return 60,000 + 10,000 pictures of clothes of 28 x 28 pixels; groups are the ten classes."""
    return _load("fashion_mnist", "FashionMNIST", root, _CLOTHES, 0.2860, 0.3530)


def _load(source: str, folder: str, root: str | None, names: tuple[str, ...], mean: float, std: float) -> Source:
    def download(cache: Path) -> None:
        import torchvision  # late: importing it takes seconds

        getattr(torchvision.datasets, folder)(root=str(cache), download=True)

    def read(name: str) -> npt.NDArray[np.uint8]:
        places = tuple(f"{below}{name}{suffix}" for below in (f"{folder}/raw/", "") for suffix in ("", ".gz"))
        return read_idx(locate(source, places, root, download))

    train_images, train_labels = read("train-images-idx3-ubyte"), read("train-labels-idx1-ubyte")
    test_images, test_labels = read("t10k-images-idx3-ubyte"), read("t10k-labels-idx1-ubyte")
    return Source(
        source,
        make_split(train_images[:, None], train_labels),
        make_split(test_images[:, None], test_labels, first_id=len(train_labels)),
        names,
        names,
        pixels((mean,), (std,)),
        (f"pixels scaled by the published mean {mean} and standard deviation {std}",),
    )


def read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """Return an idx file of unsigned bytes: magic 00 00 08 d, then d sizes (big-endian uint32), then the data."""
    opener = gzip.open if path.suffix == ".gz" else open
    with reading(path), opener(path, "rb") as file:
        content = file.read(_LARGEST)
    start = 4 + 4 * content[3] if content[:3] == b"\x00\x00\x08" and len(content) > 3 else len(content) + 1
    if len(content) < start:
        raise DataCorruption(f"{path} is not an idx file of unsigned bytes; fetch it again")
    shape = tuple(int(size) for size in np.frombuffer(content[4:start], dtype=">u4"))
    if len(content) - start != math.prod(shape):
        raise DataCorruption(
            f"{path} says it holds {shape}, but has {len(content) - start} bytes of data; fetch it again"
        )
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)
