"""Per-example epsilons as Arrow files, written and noted part by part; their columns are defined only here.

The process that computes a part writes it, with a note beside it in ``part-00003.json``: the sha256 of the part and of
its inputs. Interrupted accounting continues from these notes. The manifest commits all parts at once; the notes of a
trial's first accounting are then deleted. Everything here is derived from single examples and private. A lower
bound that is not known is stored as NaN.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Final, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dpsweep.accounting.errors import DataCorruption, InvalidInput
from dpsweep.accounting.mechanism.estimates import Claim
from dpsweep.accounting.mechanism.reasons import Reason
from dpsweep.accounting.records.arrow_parts import PartRecord, PartStore, read_part, write_part
from dpsweep.accounting.records.files import delete, list_files
from dpsweep.accounting.records.json_text import parsed_json
from dpsweep.accounting.records.sealed import read_private_sealed, write_private_sealed

_NOTE = ".json"
_NOTE_AGAIN = "delete it: the trial's next accounting writes it anew"
_CLAIM = "individual_kind"
EPSILON_SCHEMA = pa.schema(
    [
        ("example_id", pa.int64()),
        ("group", pa.int32()),
        ("epsilon", pa.float64()),
        ("epsilon_lower", pa.float64()),
        ("loss", pa.float32()),
    ]
)


@dataclass(frozen=True)
class Epsilons:
    """Per-example privacy of a run; arrays have shape [examples]. ``upper`` and ``lower`` are the certified bounds on
    epsilon; ``lower`` is None where there is none, as with Renyi DP and for batches that may be cut or are shuffled.
    losses: the loss at the last snapshot. kind is the strength of upper
    (`dpsweep.accounting.mechanism.estimates.PrivacyEstimate`) for all examples. reasons: why it is an estimate; files
    hold the kind alone, and readers add the reasons of the trial.
    """

    example_ids: npt.NDArray[np.int64]
    groups: npt.NDArray[np.int32]
    upper: npt.NDArray[np.float64]
    lower: npt.NDArray[np.float64] | None
    losses: npt.NDArray[np.float32]
    delta: float
    method: str
    kind: Claim
    reasons: tuple[Reason, ...] = ()

    def of(self, examples: npt.NDArray[np.bool_]) -> Epsilons:
        """Return the epsilons of the examples chosen by a mask [examples]."""
        return replace(
            self,
            example_ids=self.example_ids[examples],
            groups=self.groups[examples],
            upper=self.upper[examples],
            lower=None if self.lower is None else self.lower[examples],
            losses=self.losses[examples],
        )

    @staticmethod
    def concatenate(parts: Sequence[Epsilons]) -> Epsilons:
        """Concatenate parts in the given order. Raises `InvalidInput` when delta, method or kind differ."""
        claims = {(part.delta, part.method, part.kind) for part in parts}
        if len(claims) != 1:
            raise InvalidInput(f"parts claim different (delta, method, kind): {sorted(claims)}; account them again")
        below = [part.lower for part in parts if part.lower is not None]
        return replace(
            parts[0],
            example_ids=np.concatenate([part.example_ids for part in parts]),
            groups=np.concatenate([part.groups for part in parts]),
            upper=np.concatenate([part.upper for part in parts]),
            lower=np.concatenate(below) if len(below) == len(parts) else None,
            losses=np.concatenate([part.losses for part in parts]),
        )


def write_epsilons(directory: str, part: int, epsilons: Epsilons, inputs: str) -> PartRecord:
    """Write one part and its note. inputs: digest of its inputs. Raises: StorageError."""
    record = write_part(directory, part, _to_table(epsilons))
    note = json.dumps({"inputs": inputs, "record": asdict(record)})
    write_private_sealed(_note(directory, part), note.encode())
    return record


def noted_epsilons(directory: str, part: int, inputs: str) -> tuple[PartRecord, Epsilons] | None:
    """Return the part that an interrupted run wrote from the same ``inputs``; None if there is none or it is
    damaged.
    """
    try:
        content = read_private_sealed(_note(directory, part), "account the trial again")
        note = parsed_json(content) if content else {}
        if note.get("inputs") != inputs:
            return None
        record = PartRecord(**note["record"])
        return record, _from_table(read_part(directory, EPSILON_SCHEMA, record), directory)
    except (DataCorruption, LookupError, TypeError, ValueError):
        return None


def forget_notes(directory: str) -> None:
    """Delete the notes beside committed parts; accounting the trial again then computes all parts again."""
    for name in list_files(directory):
        if name.endswith(_NOTE):
            delete(f"{directory}/{name}")


class StoredEpsilons:
    """The committed epsilons of a trial, with one part in memory at a time. records: of its parts, in order."""

    def __init__(self, directory: str) -> None:
        """Read the manifest. Raises `DataCorruption` when it is damaged or a part is missing."""
        self._store = PartStore(directory, EPSILON_SCHEMA)
        self.records = sorted(self._store.records.values())
        if not self.records or [record.part for record in self.records] != list(range(len(self.records))):
            raise DataCorruption(f"{directory}: a part of the epsilons is missing; account the trial again")

    def __iter__(self) -> Iterator[Epsilons]:
        """Yield the parts in order, each verified. Raises `DataCorruption` when one is damaged."""
        return (_from_table(self._store.read(record), self._store.directory) for record in self.records)


def read_epsilons(directory: str) -> Epsilons:
    """Return all committed parts, in part order, verified. Raises `DataCorruption` when a part is missing or
    damaged.
    """
    return Epsilons.concatenate(list(StoredEpsilons(directory)))


def verify_epsilons(directory: str) -> None:
    """Read every committed part and its note. Raises `DataCorruption` for a missing or damaged part or damaged note."""
    stored = StoredEpsilons(directory)
    for _ in stored:
        pass
    for record in stored.records:
        uri = _note(directory, record.part)
        content = read_private_sealed(uri, _NOTE_AGAIN)
        if content is not None and parsed_json(content).get("record") != asdict(record):
            raise DataCorruption(f"{uri} does not belong to the part beside it; {_NOTE_AGAIN}")


def _note(directory: str, part: int) -> str:
    return f"{directory}/part-{part:05d}{_NOTE}"


def _to_table(epsilons: Epsilons) -> pa.Table:
    claim = {"delta": repr(float(epsilons.delta)), "method": epsilons.method, _CLAIM: epsilons.kind}
    lower = np.full_like(epsilons.upper, np.nan) if epsilons.lower is None else epsilons.lower
    columns = (epsilons.example_ids, epsilons.groups, epsilons.upper, lower, epsilons.losses)
    return pa.table(dict(zip(EPSILON_SCHEMA.names, columns, strict=True)), schema=EPSILON_SCHEMA.with_metadata(claim))


def _from_table(table: pa.Table, directory: str) -> Epsilons:
    """Raises: DataCorruption for a table that makes no claim, or an unknown one."""
    ids, groups, upper, below, losses = (column.to_numpy() for column in table.columns)
    lower = None if np.isnan(below).any() else below
    try:
        claim = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
        return Epsilons(
            ids, groups, upper, lower, losses, float(claim["delta"]), claim["method"], _CLAIMS[claim[_CLAIM]]
        )
    except (LookupError, ValueError):
        raise DataCorruption(
            f"{directory}: a part of the epsilons does not say what they are; account the trial again"
        ) from None


_CLAIMS: Final[Mapping[str, Claim]] = {claim: claim for claim in get_args(Claim)}
