"""ChaCha20 against the vectors of RFC 8439, OpenSSL and a reference in plain Python; no block is ever used twice."""

from __future__ import annotations

import random
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

from dpsweep.accounting.errors import DpsweepError, InvalidInput
from dpsweep.workers.noise import chacha
from dpsweep.workers.noise.chacha import ChaChaStream, by_integer_operations, keystream, require_standard
from dpsweep.workers.noise.gaussian_sources import ChaChaGaussians
from dpsweep.workers.sampling.samplers import PoissonSampler, RowNumbers
from dpsweep.workers.spec import Component
from tests.workers.devices import DEVICE
from tests.workers.training.test_trainer import new_trainer
from tests.workers.trial_specs import small_trial

CPU = torch.device("cpu")
KEY = bytes(range(32))


def octets(words: torch.Tensor) -> bytes:
    return words.cpu().numpy().tobytes()


VECTORS = [
    (  # section 2.3.2
        (KEY, bytes.fromhex("000000090000004a00000000"), 1),
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e",
    ),
    (  # appendix A.1, vectors 1 to 5
        (bytes(32), bytes(12), 0),
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586",
    ),
    (
        (bytes(32), bytes(12), 1),
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
        "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f",
    ),
    (
        (bytes(31) + b"\1", bytes(12), 1),
        "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a"
        "8eca00bbb4a73bdad192b5c42f73f2fd4e273644c8b36125a64addeb006c13a0",
    ),
    (
        (b"\0\xff" + bytes(30), bytes(12), 2),
        "72d54dfbf12ec44b362692df94137f328fea8da73990265ec1bbbea1ae9af0ca"
        "13b25aa26cb4a648cb9b9d1be65b2c0924a66c54d545ec1b7374f4872e99f096",
    ),
    (
        (bytes(32), bytes(11) + b"\2", 0),
        "c2c64d378cd536374ae204b9ef933fcd1a8b2288b3dfa49672ab765b54ee27c7"
        "8a970e0e955c14f3a88e741b97c286f75f8fc299e8148362fa198a39531bed6d",
    ),
]


@pytest.mark.parametrize(("arguments", "expected"), VECTORS)
def test_the_vectors_of_rfc_8439(arguments: tuple[bytes, bytes, int], expected: str) -> None:
    for device in (CPU, DEVICE):
        assert octets(keystream(*arguments, 1, device)).hex() == expected
        assert octets(by_integer_operations(*arguments, 1, device)).hex() == expected


def block_in_plain_python(key: bytes, nonce: bytes, counter: int) -> bytes:
    """RFC 8439, section 2.3, on Python's integers."""
    start = list(struct.unpack("<16I", b"expand 32-byte k" + key + counter.to_bytes(4, "little") + nonce))
    state = list(start)

    def turn(into: int, by: int, bits: int) -> None:
        mixed = state[into] ^ state[by]
        state[into] = (mixed << bits | mixed >> (32 - bits)) % 2**32

    def quarter_round(a: int, b: int, c: int, d: int) -> None:
        for left, right, turned, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            state[left] = (state[left] + state[right]) % 2**32
            turn(turned, left, bits)

    for _ in range(10):
        for column in range(4):
            quarter_round(column, 4 + column, 8 + column, 12 + column)
        for column in range(4):
            quarter_round(column, 4 + (column + 1) % 4, 8 + (column + 2) % 4, 12 + (column + 3) % 4)
    return struct.pack("<16I", *((new + old) % 2**32 for new, old in zip(state, start, strict=True)))


@pytest.mark.parametrize("first", [0, 1, 2**31 - 3, 2**32 - 6])
def test_series_of_blocks_equal_openssl_and_plain_python(first: int) -> None:
    torch.manual_seed(first)
    key, nonce = (bytes(torch.randint(256, (size,)).tolist()) for size in (32, 12))
    expected = b"".join(block_in_plain_python(key, nonce, first + index) for index in range(6))
    by_openssl = Cipher(ChaCha20(key, first.to_bytes(4, "little") + nonce), None).encryptor().update(bytes(6 * 64))
    assert expected == by_openssl
    for device in (CPU, DEVICE):
        assert octets(by_integer_operations(key, nonce, first, 6, device)) == expected
        assert octets(keystream(key, nonce, first, 6, device)) == expected
        assert octets(keystream(key, nonce, first + 2, 3, device)) == expected[2 * 64 : 5 * 64]


def test_a_counter_that_would_begin_anew_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"34359738376 random words .* has 34359738368; draw them in several calls"):
        keystream(KEY, bytes(12), 2**32 - 1, 2, DEVICE)
    assert keystream(KEY, bytes(12), 2**32 - 1, 1, DEVICE).shape == (8,)
    assert keystream(KEY, bytes(12), 2**32, 0, DEVICE).shape == (0,)


def test_no_two_calls_share_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over series, uneven calls within them, and a stream that is restored as after the death of its process."""
    used: list[tuple[bytes, int]] = []
    original = chacha.keystream

    def recorded(key: bytes, nonce: bytes, first: int, blocks: int, device: torch.device) -> torch.Tensor:
        used.extend((nonce, first + index) for index in range(blocks))
        return original(key, nonce, first, blocks, device)

    monkeypatch.setattr(chacha, "keystream", recorded)
    stream, made = ChaChaStream(KEY, DEVICE), []
    for _ in range(4):
        for _ in range(3):
            series = stream.series()
            made += [series.words(count) for count in (1, 8, 0, 9, 70)]
        later = ChaChaStream(bytes(32), DEVICE)
        later.restore(stream.state())
        stream = later
    assert len(used) == len(set(used)) == 12 * (1 + 1 + 2 + 9)
    words = torch.cat(made).tolist()
    assert len(words) == len(set(words)) == 12 * 88


@pytest.mark.parametrize("noise_source", ["os_entropy", "os_entropy_secure"])
def test_no_two_draws_of_a_trial_are_the_same(
    noise_source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The initial bound, the queries of a step and its gradients, also after the trial was continued.

    Series that several draws or batches share are made again when a trial goes on, but what was taken from them is not
    given again.
    """
    used, given, batches = list[tuple[bytes, bytes, int]](), list[torch.Tensor](), list[tuple[int, ...]]()
    of_stream, of_calls, of_sampler = chacha.keystream, ChaChaGaussians.pieces, PoissonSampler.next_batch

    def recorded(key: bytes, nonce: bytes, first: int, blocks: int, device: torch.device) -> torch.Tensor:
        used.extend((key, nonce, first + index) for index in range(blocks))
        return of_stream(key, nonce, first, blocks, device)

    def handed_out(self: ChaChaGaussians, count: int, draws: int) -> Iterator[torch.Tensor]:
        for piece in of_calls(self, count, draws):
            given.append(piece.clone())
            yield piece

    def next_batch(self: PoissonSampler) -> RowNumbers:
        rows = of_sampler(self)
        batches.append(tuple(rows.tolist()))
        return rows

    monkeypatch.setattr(chacha, "keystream", recorded)
    monkeypatch.setattr(ChaChaGaussians, "pieces", handed_out)
    monkeypatch.setattr(PoissonSampler, "next_batch", next_batch)
    bound = {"median_multiple": 1.0, "noise_multiplier": 20.0, "rounds": 12}
    spec = small_trial(noise_source=noise_source, clipping=Component("quantile", {"bound": bound}))
    trainer = new_trainer(spec, tmp_path / "begun")
    for _ in range(3):
        trainer.step()
    drawn = len(given)
    again = new_trainer(spec, tmp_path / "continued")
    del given[drawn:]  # the new start had a key of its own
    again.restore(trainer.state())
    for _ in range(3):
        again.step()
    of_noise = trainer.state()["noise"]["key"]
    of_batches = trainer.state()["sampler"]["draws"]["key"]
    made = Counter(block for block in used if block[0] == of_batches)
    assert set(made.values()) == {2}, "before the trial was continued, and after"
    assert len(batches) == len(set(batches)) == 6
    assert len({nonce for key, nonce, _ in used if key == of_noise}) == 1  # of few draws
    assert len(given) == 12 + 6 * 2
    values = torch.cat(given).tolist()
    assert len(values) == len(set(values)) > 6 * trainer.num_parameters


def test_no_two_trials_or_attempts_share_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even attempts at one trial that repeat its seed, in a process whose random state is the same again.

    Of the ranks of a trial only the first draws noise; it is this process.
    """
    used: list[set[tuple[bytes, bytes, int]]] = []
    of_stream = chacha.keystream

    def recorded(key: bytes, nonce: bytes, first: int, blocks: int, device: torch.device) -> torch.Tensor:
        used[-1].update((key, nonce, first + index) for index in range(blocks))
        return of_stream(key, nonce, first, blocks, device)

    monkeypatch.setattr(chacha, "keystream", recorded)
    state = torch.get_rng_state()
    spec = small_trial(noise_source="os_entropy")
    for number, each in enumerate((spec, spec, replace(spec, key="another"), replace(spec, seed=spec.seed + 1))):
        torch.set_rng_state(state)
        random.seed(0)
        used.append(set())
        trainer = new_trainer(each, tmp_path / str(number))
        for _ in range(3):
            trainer.step()
    assert min(map(len, used)) > 6, "noise and batches of three steps"
    assert sum(map(len, used)) == len(set[tuple[bytes, bytes, int]]().union(*used))


def test_a_series_goes_on_where_its_last_call_ended() -> None:
    stream = ChaChaStream(KEY, DEVICE)
    state = stream.state()
    series = stream.series()
    parts = torch.cat([series.words(count) for count in (8, 64, 16)])
    stream.restore(state)
    assert torch.equal(stream.series().words(88), parts)
    assert not torch.equal(stream.series().words(88), parts)
    assert torch.equal(stream.again(series.number).words(88), parts)


def test_keys_of_the_system_differ() -> None:
    first, second = (ChaChaStream.from_os(DEVICE).series().words(8) for _ in range(2))
    assert not torch.equal(first, second)


def test_a_device_that_computes_another_cipher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    require_standard.cache_clear()
    require_standard(DEVICE)
    require_standard.cache_clear()
    monkeypatch.setattr(chacha, "has_kernels", lambda device: False)  # they have constants of their own
    monkeypatch.setattr(chacha, "_CONSTANTS", (1, 2, 3, 4))
    with pytest.raises(DpsweepError, match=r"another ChaCha20 on .*; set execution.device: cpu"):
        require_standard(DEVICE)
    require_standard.cache_clear()
