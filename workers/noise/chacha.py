"""ChaCha20 (RFC 8439): uniform bits from a secret key, the same on every device.

On a CPU OpenSSL computes them. Another device computes them itself, so that noise for a model on a GPU needs neither
the host nor copies. CUDA does so in one kernel where Triton can compile it, other devices by operations of torch.
"""

from __future__ import annotations

import functools
import struct
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpsweep.accounting.errors import DpsweepError, InvalidInput
from dpsweep.accounting.records.keystream import fresh_key
from dpsweep.workers.machine.triton_support import has_triton

if TYPE_CHECKING:  # importing it late keeps it away from research mode
    from cryptography.hazmat.primitives.ciphers import CipherContext

KEY_BYTES: Final = 32
NONCE_BYTES: Final = 12
WORDS: Final = 8
"""Number of 64-bit words in one block."""
MOST_BLOCKS: Final = 2**32
"""Number of blocks for one key and nonce: the block counter has 32 bits."""

_CONSTANTS: Final = struct.unpack("<4i", b"expand 32-byte k")


class ChaChaStream:
    """Series of uniform 64-bit words on a device, from one key; each series has its own nonce.

    Guarantee: without the 256-bit key the words are computationally indistinguishable from uniform ones, if ChaCha20 is
    a pseudo-random function. No block of the keystream is used twice: the nonce is the number of the series, and within
    a series the block counter is the position. The words do not depend on the device.
    """

    def __init__(self, key: bytes, device: torch.device) -> None:
        if device.type != "cpu":
            require_standard(device)
        self._key, self._series, self.device = key, 0, device

    @staticmethod
    def from_os(device: torch.device) -> ChaChaStream:
        """Return a stream with a fresh key from the operating system."""
        return ChaChaStream(fresh_key(), device)

    def series(self) -> Series:
        """Return the next series of words; it shares no keystream block with any other series of this key."""
        self._series += 1
        return self.again(self._series - 1)

    def again(self, number: int, block: int = 0) -> Series:
        """Return the series with this number from a block on, to make its words once more."""
        return Series(self._key, number, self.device, block)

    def state(self) -> dict[str, Any]:
        """Return the key and number of the next series, for `restore`; as secret as the words drawn."""
        return {"key": self._key, "series": self._series}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of `state`."""
        self._key, self._series = state["key"], state["series"]


class Series:
    """The words of one key and nonce, in order. number: the series number, which is the nonce. block: the first one."""

    def __init__(self, key: bytes, number: int, device: torch.device, block: int = 0) -> None:
        self._key, self.number, self._device = key, number, device
        self._nonce, self._next_block = number.to_bytes(NONCE_BYTES, "little"), block

    def words(self, count: int) -> Tensor:
        """Return the next ``count`` words, int64 [count] with uniform bits; the rest of the last block is discarded."""
        blocks = -(-count // WORDS)
        return keystream(self._key, self._nonce, self._taken(blocks), blocks, self._device)[:count]

    def add_noise(self, values: Tensor, draws: int, scale: float, grid: float) -> None:
        """Add the sum of the next ``draws`` normal values (1 or 4) times ``scale`` to each of ``values`` [n], in place.

        The results are rounded to multiples of ``grid``. The device must be one on which `has_kernels`.
        """
        from dpsweep.workers.noise import fused_kernels

        first = self._taken(-(-len(values) * draws // WORDS))
        fused_kernels.add_noise(values, self._key, self._nonce, first, draws, scale, grid)

    def with_noise_from(self, place: int, values: Tensor, draws: int, scale: float, grid: float) -> Tensor:
        """Return ``values`` [n] as `add_noise` of a longer tensor changes those from ``place`` on.

        Where they begin within a block of words, noise is drawn from its start.
        """
        block, skipped = divmod(place * draws, WORDS)
        padded = torch.cat([values.new_zeros(skipped // draws), values])
        again = Series(self._key, self.number, self._device, block)
        again.add_noise(padded, draws, scale, grid)
        return padded[skipped // draws :]

    def _taken(self, blocks: int) -> int:
        """Return the first of the next blocks, which no other call takes. Raises: InvalidInput beyond the last one."""
        first = self._next_block
        _require_blocks(first + blocks)
        self._next_block += blocks
        return first


class ChaChaBits:
    """Uniform bits of a `ChaChaStream` on the CPU as numpy arrays; every call draws from a new series."""

    def __init__(self, key: bytes) -> None:
        self._stream = ChaChaStream(key, torch.device("cpu"))

    @staticmethod
    def from_os() -> ChaChaBits:
        """Return a stream with a fresh key from the operating system."""
        return ChaChaBits(fresh_key())

    def octets(self, count: int) -> NDArray[np.uint8]:
        """Return ``count`` uniform bytes."""
        return self.words(-(-count // 8)).view(np.uint8)[:count]

    def words(self, count: int) -> NDArray[np.uint64]:
        """Return ``count`` uniform 64-bit words."""
        drawn: NDArray[np.uint64] = self._stream.series().words(count).numpy().view("<u8")
        return drawn

    def state(self) -> dict[str, Any]:
        """Return the key and number of the next series, for `restore`; as secret as the numbers drawn."""
        return self._stream.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of `state`."""
        self._stream.restore(state)


def keystream(key: bytes, nonce: bytes, first: int, blocks: int, device: torch.device) -> Tensor:
    """Return the blocks ``first`` to ``first + blocks - 1`` of the keystream, as int64 [8 blocks], little-endian.

    Raises: InvalidInput beyond the last block of a nonce, where the counter would start again at 0.
    """
    _require_blocks(first + blocks)
    if blocks == 0:
        return torch.empty(0, dtype=torch.int64, device=device)
    if device.type == "cpu":
        return _by_openssl(key, nonce, first, blocks)
    by = _by_kernel if has_kernels(device) else by_integer_operations
    return by(key, nonce, first, blocks, device)


def _require_blocks(last: int) -> None:
    if last > MOST_BLOCKS:
        raise InvalidInput(
            f"{last * WORDS} random words are asked for at once, but one nonce of ChaCha20 has "
            f"{MOST_BLOCKS * WORDS}; draw them in several calls"
        )


def _by_openssl(key: bytes, nonce: bytes, first: int, blocks: int) -> Tensor:
    made = bytearray(64 * blocks)
    encryptor = _ENCRYPTORS.of(key)
    encryptor.reset_nonce(first.to_bytes(4, "little") + nonce)
    encryptor.update_into(bytes(len(made)), made)
    return torch.frombuffer(made, dtype=torch.int64)


def _encryptor(key: bytes) -> CipherContext:
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

    return Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()


class _Encryptors(threading.local):
    """Cache of OpenSSL ciphers by key, one per thread. Making a cipher takes ten times as long as a short series."""

    def __init__(self) -> None:
        self.of = functools.lru_cache(maxsize=8)(_encryptor)


_ENCRYPTORS: Final = _Encryptors()


def by_integer_operations(key: bytes, nonce: bytes, first: int, blocks: int, device: torch.device) -> Tensor:
    """Return `keystream` on any device: RFC 8439, section 2.3, on all blocks at once."""
    start = torch.empty(16, blocks, dtype=torch.int32, device=device)
    for row, value in enumerate((*_CONSTANTS, *struct.unpack("<8i", key))):
        start[row] = value
    start[12] = torch.arange(first, first + blocks, device=device).to(torch.int32)
    for row, value in enumerate(struct.unpack("<3i", nonce), start=13):
        start[row] = value
    a, b, c, d = start.clone().split(4)
    for _ in range(10):
        _quarter_rounds(a, b, c, d)
        b, c, d = b.roll(-1, 0), c.roll(-2, 0), d.roll(-3, 0)
        _quarter_rounds(a, b, c, d)
        b, c, d = b.roll(1, 0), c.roll(2, 0), d.roll(3, 0)
    return start.add_(torch.cat([a, b, c, d])).mT.flatten().view(torch.int64)


def _quarter_rounds(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> None:
    """The quarter round of RFC 8439, section 2.1, in place on four columns [4, blocks] at once; sums wrap around."""
    for left, right, turned, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
        turned.bitwise_xor_(left.add_(right))
        low = turned.bitwise_right_shift(32 - bits).bitwise_and_((1 << bits) - 1)  # the shift copies the sign
        torch.add(low, turned, alpha=1 << bits, out=turned)


def _by_kernel(key: bytes, nonce: bytes, first: int, blocks: int, device: torch.device) -> Tensor:
    from dpsweep.workers.noise import fused_kernels

    made = torch.empty(WORDS * blocks, dtype=torch.int64, device=device)
    fused_kernels.write_words(made, key, nonce, first)
    return made


@functools.cache
def has_kernels(device: torch.device) -> bool:
    """Return whether `dpsweep.workers.noise.fused_kernels` run on the device and give the words of RFC 8439."""
    return has_triton(device) and torch.equal(_by_kernel(_KEY, _NONCE, _FIRST, _CHECKED, device).cpu(), _standard())


@functools.cache
def require_standard(device: torch.device) -> None:
    """Check, once for each device, that it computes the same blocks as OpenSSL for a fixed public key.

    Raises: DpsweepError when they differ.
    """
    if has_kernels(device):
        return
    if not torch.equal(by_integer_operations(_KEY, _NONCE, _FIRST, _CHECKED, device).cpu(), _standard()):
        raise DpsweepError(
            f"torch {torch.__version__} computes another ChaCha20 on {device} than RFC 8439 defines, so noise that is "
            "made there would not be secret; set execution.device: cpu, or use another version of torch"
        )


_KEY, _NONCE, _FIRST, _CHECKED = bytes(range(KEY_BYTES)), bytes(range(NONCE_BYTES)), 2**31 - 500, 1000
"""Public key, nonce, first block and number of blocks by which a device is checked."""


def _standard() -> Tensor:
    return _by_openssl(_KEY, _NONCE, _FIRST, _CHECKED)
