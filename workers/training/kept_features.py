"""Features that a frozen network makes of every split, kept for other trials and for resuming."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from dpsweep.accounting.errors import DataCorruption, InvalidInput
from dpsweep.workers.data import Dataset, Form, Scaling, Split, once_on_node
from dpsweep.workers.machine.checkpoint import fingerprint, load_checkpoint, save_checkpoint

Change = Callable[[Tensor], Tensor]
"""Transformation of a split: stored features [n, ...] -> new features [n, ...]."""


def in_blocks(rows: int, change: Change) -> Change:
    """Return ``change``, applied to ``rows`` rows at a time."""
    return lambda features: torch.cat([change(block) for block in torch.split(features, rows)])


def kept_in(folder: str, owner: str, change: Change) -> Change:
    """Return ``change`` with results cached in private files of ``folder``, each named by a hash of all its inputs.

    A damaged file is written again.
    """

    def kept(features: Tensor) -> Tensor:
        key = _key(owner, features)
        uri = f"{folder if '://' in folder else os.path.realpath(folder)}/{key}.features"
        stored = None
        with contextlib.suppress(DataCorruption):
            stored = load_checkpoint(uri, key)
        if stored is None:
            stored = {"features": change(features)}
            try:
                save_checkpoint(uri, key, stored)
            except FileNotFoundError as error:
                raise InvalidInput(f"cache {folder!r} cannot be made ({error}); name another folder") from error
        found: Tensor = stored["features"]
        return found

    return kept


def shared_on_node(owner: str, width: int, blocks: Callable[[Tensor], Iterator[Tensor]]) -> Change:
    """Return the change to float32 features [n, width] by ``blocks``, made once for all trials of a run on this node.

    owner: what the features are made by, besides the rows.
    """

    def shared(features: Tensor) -> Tensor:
        found = once_on_node(
            lambda: _key(owner, features),
            [Form(torch.float32, (width,))],
            len(features),
            lambda: ([block.numpy()] for block in blocks(features)),
        )
        return torch.cat([*blocks(features)]) if found is None else found[0]

    return lambda features: shared(features) if len(features) else torch.zeros(0, width)


def _key(owner: str, features: Tensor) -> str:
    rows = hashlib.sha256(features.contiguous().numpy().tobytes()).hexdigest()
    return fingerprint(owner, tuple(features.shape), rows)


def require_folder(cache: str) -> None:
    """Refuse a local folder that can be neither written nor created. Other URIs are checked on first use only."""
    if "://" in cache:
        return
    folder = Path(cache).absolute()
    there = next(level for level in (folder, *folder.parents) if level.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise InvalidInput(f"cache {cache!r} is no folder that can be written: see {there}, or name another folder")


def with_features(dataset: Dataset, change: Change, note: str) -> Dataset:
    """Return ``dataset`` with ``change`` applied to the stored features of every split."""

    def changed(split: Split) -> Split:
        return replace(split, features=change(split.features))

    return replace(
        dataset,
        train=changed(dataset.train),
        test=changed(dataset.test),
        public=None if dataset.public is None else changed(dataset.public),
        preparation=Scaling(),
        notes=(*dataset.notes, note),
        held_out=None if dataset.held_out is None else changed(dataset.held_out),
    )
