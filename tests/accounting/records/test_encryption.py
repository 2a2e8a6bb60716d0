"""Private files are encrypted where there is a key, and only there; the stored bytes tell nothing but their length."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from dpsweep.accounting.errors import DataCorruption, InvalidInput
from dpsweep.accounting.records.arrow_parts import MANIFEST
from dpsweep.accounting.records.encryption import KEY_VARIABLE, decrypted, encrypted, new_key_check, require_key
from dpsweep.accounting.records.epsilon_files import noted_epsilons, read_epsilons
from dpsweep.accounting.records.files import list_files
from dpsweep.accounting.records.sealed import (
    read_private,
    read_private_sealed,
    write_private,
    write_private_sealed,
)
from dpsweep.accounting.records.shards import NormShards
from dpsweep.accounting.records.trial_files import TrialFiles
from tests.accounting.stored_trial import account_trial, job_of, snapshot, write_norms, write_trial
from tests.known import known

KEY, OTHER = "5a" * 32, "a5" * 32
MIB = 2**20
HEADER = 20 + 32 + 16


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    return KEY


@pytest.mark.parametrize("size", [0, 1, 15, 16, MIB - 1, MIB, MIB + 1, 2 * MIB, 3 * MIB + 5])
def test_what_is_encrypted_is_decrypted(key: str, size: int) -> None:
    content = secrets.token_bytes(size)
    stored = encrypted("a", content)
    assert len(stored) == HEADER + size + 16 * max(1, -(-size // MIB))
    assert decrypted("elsewhere", stored) == content, "a folder can be moved"
    assert content[:32] not in stored or size < 4


def test_the_format_is_what_the_documentation_says(key: str) -> None:
    """Decrypted here by HKDF and AES-GCM alone: a sweep can be read without this code."""
    content = secrets.token_bytes(MIB + 7)
    stored = encrypted("a", content)
    magic, salt, check = stored[:20], stored[20:52], stored[52:68]
    assert magic == b"dpsweep-encrypted-1\n"
    derived = HKDF(hashes.SHA256(), 48, salt, b"dpsweep 1 file").derive(bytes.fromhex(KEY))
    assert derived[32:] == check
    cipher, cut = AESGCM(derived[:32]), HEADER + MIB + 16
    first = cipher.decrypt(bytes(12), stored[HEADER:cut], None)
    last = cipher.decrypt(bytes(10) + b"\x01\x01", stored[cut:], None)
    assert first + last == content


def test_no_two_contents_share_a_key_and_nonce(key: str) -> None:
    contents = [b"", b"a", b"b", b"a" * 100, *(bytes([n]) * 50 for n in range(50))]
    stored = [encrypted(uri, content) for content in contents for uri in ("x", "y", "xy")]
    assert len({each[20:52] for each in stored}) == len(stored), "another file or content, another salt and so key"
    assert encrypted("x", b"a") == encrypted("x", b"a"), "work that is repeated stores the same bytes"
    assert encrypted("ab", b"c")[20:52] != encrypted("a", b"bc")[20:52]
    zeros = encrypted("x", bytes(3 * MIB))
    segments = [zeros[HEADER + n * (MIB + 16) : HEADER + (n + 1) * (MIB + 16)] for n in range(3)]
    assert len(set(segments)) == 3, "equal segments have other nonces"


def segment(number: int) -> slice:
    return slice(HEADER + number * (MIB + 16), HEADER + (number + 1) * (MIB + 16))


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "a flipped bit": lambda stored: stored[:-20] + bytes([stored[-20] ^ 1]) + stored[-19:],
    "a flipped bit of the salt": lambda stored: stored[:30] + bytes([stored[30] ^ 1]) + stored[31:],
    "a segment less": lambda stored: stored[: segment(1).stop],
    "all segments less": lambda stored: stored[:HEADER],
    "half a header": lambda stored: stored[:40],
    "swapped segments": lambda stored: stored[:HEADER] + stored[segment(1)] + stored[segment(0)] + stored[segment(2)],
    "a segment more": lambda stored: stored + stored[segment(2)],
    "a byte more": lambda stored: stored + b"\0",
    "a tag that is cut": lambda stored: stored[: segment(2).start + 3],
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found(key: str, name: str) -> None:
    stored = encrypted("a", bytes(2 * MIB + 100))
    with pytest.raises(
        (DataCorruption, InvalidInput), match=r"^a (is damaged: it was cut or altered|was encrypted with)"
    ):
        decrypted("a", DAMAGE[name](stored))


def test_a_wrong_or_missing_key_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    stored = encrypted("f", b"content")
    monkeypatch.setenv(KEY_VARIABLE, OTHER)
    with pytest.raises(InvalidInput, match=r"^f was encrypted with another key than DPSWEEP_KEY holds; set its own$"):
        decrypted("f", stored)
    monkeypatch.delenv(KEY_VARIABLE)
    with pytest.raises(InvalidInput, match=r"^f is encrypted; set DPSWEEP_KEY to its key$"):
        decrypted("f", stored)
    assert decrypted("f", b"content") == encrypted("f", b"content") == b"content", "without a key nothing is encrypted"
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    with pytest.raises(InvalidInput, match=r"^f was begun without encryption, but DPSWEEP_KEY is set; unset it, or "):
        decrypted("f", b"content")


@pytest.mark.parametrize("text", ["hunter2", KEY[:-1], KEY + "0", "zz" * 32, KEY + "\n"])
def test_what_is_no_key_is_refused_without_telling_it(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(KEY_VARIABLE, text)
    with pytest.raises(InvalidInput, match=f"^DPSWEEP_KEY has {len(text)} characters that are no key, but must be 64 "):
        encrypted("f", b"")
    with pytest.raises(InvalidInput) as refused:
        new_key_check()
    assert text.strip() not in str(refused.value)


def test_a_check_tells_one_key_from_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    check = known(new_key_check())
    assert check != new_key_check(), "two sweeps with one key do not show it"
    assert KEY not in repr(check)
    require_key(check, "it")
    with pytest.raises(InvalidInput, match=r"^it was begun without encryption, but DPSWEEP_KEY is set"):
        require_key(None, "it")
    monkeypatch.setenv(KEY_VARIABLE, OTHER)
    with pytest.raises(InvalidInput, match=r"^it was encrypted with another key"):
        require_key(check, "it")
    monkeypatch.delenv(KEY_VARIABLE)
    with pytest.raises(InvalidInput, match=r"^it is encrypted; set DPSWEEP_KEY"):
        require_key(check, "it")
    assert new_key_check() is None
    require_key(None, "it")


@pytest.mark.parametrize("has_key", [False, True], ids=["plain", "encrypted"])
def test_private_files_are_the_owners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_key: bool) -> None:
    if has_key:
        monkeypatch.setenv(KEY_VARIABLE, KEY)
    path = tmp_path / "private" / "a" / "lines"
    write_private_sealed(str(path), b'{"a": "line"}')
    assert read_private_sealed(str(path), "") == b'{"a": "line"}'
    assert (b"line" in path.read_bytes()) != has_key
    write_private(str(path), b"line")
    assert read_private(str(path)) == b"line"
    assert (b"line" in path.read_bytes()) != has_key
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_the_epsilons_of_a_trial_are_those_without_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms, manifests, notes and epsilons: no float of them is on disk, and hashes are of what is stored."""
    plain, hidden = str(tmp_path / "plain"), str(tmp_path / "hidden")
    write_trial(plain)
    expected = account_trial(job_of(plain, 1e-5))
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    write_trial(hidden)
    found = account_trial(job_of(hidden, 1e-5))
    for name in ("example_ids", "groups", "upper", "lower", "losses"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    files = TrialFiles(hidden)
    for line in read_private(f"{files.epsilons}/{MANIFEST}").decode().splitlines():
        digest = known(re.search('"sha256":"([0-9a-f]{64})"', line))
        stored = {hashlib.sha256(path.read_bytes()).hexdigest() for path in Path(files.epsilons).iterdir()}
        assert digest[1] in stored
    for part in Path(files.norms).glob("*/*.arrow"):
        (listed,) = json.loads(read_private(str(part.with_name("manifest.json"))))["objects"]
        pieces, start = list[str](), 0
        for size in listed["sizes"]:
            pieces.append(hashlib.sha256(part.read_bytes()[start : start + size]).hexdigest())
            start += size
        assert "".join(pieces) == listed["digests"]
        assert start == part.stat().st_size
    held = [path.read_bytes() for path in Path(files.private).rglob("*") if path.is_file()]
    assert len(held) > 12
    assert all(each.startswith(b"dpsweep-encrypted-1\n") for each in held)
    assert not [each for each in held if b"ARROW" in each or b"sha256" in each]
    monkeypatch.delenv(KEY_VARIABLE)
    with pytest.raises(InvalidInput, match=r"norms/complete.json is encrypted; set DPSWEEP_KEY to its key$"):
        NormShards(files.norms)
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    with pytest.raises(InvalidInput, match="was begun without encryption"):
        NormShards(TrialFiles(plain).norms)


def test_a_replay_stores_the_same_bytes_and_goes_on(tmp_path: Path, key: str) -> None:
    root = str(tmp_path)
    write_trial(root)
    norms = TrialFiles(root).norms
    before = {name: Path(norms, name).read_bytes() for name in list_files(norms)}
    write_norms(norms, 8, *(snapshot(step, 50) for step in (40, 80)))
    assert {name: Path(norms, name).read_bytes() for name in list_files(norms)} == before
    with pytest.raises(DataCorruption, match="with other rows than a replay produced"):
        write_norms(norms, 8, snapshot(40, 50, seed=1))
    Path(norms, "complete.json").unlink()
    write_norms(norms, 8, snapshot(80, 50), snapshot(100, 50))
    assert NormShards(norms).steps == (0, 40, 80, 100)


def test_damage_to_an_encrypted_part_is_named(tmp_path: Path, key: str) -> None:
    root = str(tmp_path)
    write_trial(root)
    job = job_of(root, 1e-5)
    account_trial(job)
    for path in (Path(TrialFiles(root).epsilons, "part-00001.arrow"), Path(TrialFiles(root).epsilons, MANIFEST)):
        stored = path.read_bytes()
        path.write_bytes(stored[:-1] + bytes([stored[-1] ^ 1]))
        with pytest.raises(DataCorruption, match=f"{path.name}( is damaged|: its sha256 differs)"):
            read_epsilons(job.folder)
        path.write_bytes(stored)
    assert noted_epsilons(job.folder, 0, "") is None
    part, other = (Path(TrialFiles(root).norms, f"step=000000{step}/object-00000.arrow") for step in ("40", "80"))
    stored = part.read_bytes()
    for damaged in (stored[:-1] + bytes([stored[-1] ^ 1]), other.read_bytes()):
        part.write_bytes(damaged)
        with pytest.raises(DataCorruption, match=r"step=00000040/object-00000\.arrow"):
            NormShards(TrialFiles(root).norms).verify()
