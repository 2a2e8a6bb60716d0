"""The models that were shown to treat the rows of whole batches independently, in this process or run.

At the size of a whole batch that depends on model and shapes alone, and takes as long as several epochs of a very short
training. It is therefore shown once for all trials that a worker process trains, and in an embedded run once for all
trials on this node. It is noted in the run's own folder, which only this user can enter and which the run removes when
it ends. Nothing is kept longer, as packages may change, or elsewhere, as others could forge it.
"""

from __future__ import annotations

import contextlib
import hashlib
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from dpsweep.accounting.errors import StorageError
from dpsweep.accounting.records.encryption import is_encrypting
from dpsweep.accounting.records.files import read_bytes, write_in_private_folder
from dpsweep.accounting.records.local_files import UnsafeFile, make_private_folder
from dpsweep.workers.gradients.hidden_state import UNKNOWN, HiddenState
from dpsweep.workers.gradients.modes import modes_of
from dpsweep.workers.machine.devices import float32_precisions
from dpsweep.workers.machine.folders import node_folder
from dpsweep.workers.own_code.code_digests import codes_of, own_loaded_modules


@dataclass(frozen=True)
class Proof:
    """That rows are independent. examples: of the largest batch for which it was shown.

    aligned: whether the first axis of all that layers read held the batch, one entry for each row.
    """

    examples: int
    aligned: bool


_PROOFS: Final[dict[str, Proof]] = {}
"""Proofs of this process, by digest."""

_FOLDER: Final = "proofs"
_FORM: Final = re.compile(r"([1-9][0-9]{0,9}) (aligned|other)")


def known_proof(digest: str | None, examples: int) -> Proof | None:
    """Return what was shown for a batch of at least this many examples."""
    if digest is None:
        return None
    known = _PROOFS.get(digest) or _noted_in_the_run(digest)
    return known if known is not None and known.examples >= examples else None


def note_proof(digest: str | None, proof: Proof) -> None:
    """Note what was shown. Without a digest, nothing is kept."""
    if digest is None:
        return
    _PROOFS[digest] = proof
    folder = _folder_of_the_run()
    if folder is None:
        return
    text = f"{proof.examples} {'aligned' if proof.aligned else 'other'}"
    with contextlib.suppress(OSError, StorageError, UnsafeFile):  # removed, or full: other processes show it again
        write_in_private_folder(f"{folder}/{digest}", text.encode())


def _noted_in_the_run(digest: str) -> Proof | None:
    folder = _folder_of_the_run()
    if folder is None:
        return None
    try:
        make_private_folder(str(folder))  # refuses one of another user, who could forge what is in it
        found = _FORM.fullmatch(read_bytes(f"{folder}/{digest}").decode())
    except (OSError, StorageError, UnsafeFile, UnicodeDecodeError):
        return None
    return None if found is None else Proof(int(found[1]), found[2] == "aligned")


def _folder_of_the_run() -> Path | None:
    """Return where this run notes proofs on this node; None if it is not embedded, or encrypts private files."""
    folder = node_folder()
    return None if folder is None or is_encrypting() else folder / _FOLDER


def digest_of_structure(model: nn.Module, loss: object, x: Tensor, y: Tensor, *others: object) -> str | None:
    """Return a sha256 of everything but the values of parameters, buffers and rows that decides how rows are treated.

    None if model or loss hold an object of a kind that is not looked into, as its content would not be in it.

    The structure of the model: classes, shapes, modes and every other attribute. The code: of all functions and classes
    of modules that are not installed packages, as it is loaded, and the versions of Python, torch and numpy. The shapes
    of single rows. others: settings of the engine.
    """
    hidden, digest = HiddenState(model, loss).contents(), hashlib.sha256()
    if any(UNKNOWN in values for values in hidden.values()):
        return None

    def add(part: object) -> None:
        digest.update(repr(part).encode())

    add((platform.python_version(), torch.__version__, np.__version__, others, _settings()))
    device = torch.cuda.get_device_name(x.device) if x.device.type == "cuda" else x.device.type
    add([(device, each.dtype, tuple(each.shape[1:])) for each in (x, y)])
    add([(name, type(module).__module__, type(module).__qualname__) for name, module in model.named_modules()])
    add([(name, p.shape, p.dtype, p.requires_grad) for name, p in model.named_parameters()])
    add([(name, buffer.shape, buffer.dtype) for name, buffer in model.named_buffers()])
    add(sorted(modes_of(model).items()))
    add(sorted(hidden.items()))
    for module in own_loaded_modules():
        add((module.__name__, sorted(codes_of(module))))
    return digest.hexdigest()


def _settings() -> tuple[object, ...]:
    """Return the settings of torch that decide how it computes."""
    cudnn = torch.backends.cudnn
    return (
        torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        (*float32_precisions(), cudnn.enabled, cudnn.benchmark, torch.backends.mkldnn.enabled),
    )
