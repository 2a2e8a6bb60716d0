"""Worst cases that `dpsweep account` has computed, kept beside its results so that asking again costs nothing."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

import accounting
from accounting.accountants import account
from accounting.errors import DataCorruption
from accounting.estimates import PrivacyEstimate
from accounting.mechanism import Trace
from accounting.records import TrialFiles, list_folders, read_private_sealed, write_private_sealed

_STORED = TypeAdapter(dict[str, PrivacyEstimate])
_PACKAGES = ("dpsweep", "dp-accounting", "numpy", "scipy")
"""Packages that compute worst cases; with another version of one, what was stored is computed anew."""


def worst_case(folder: str, trace: Trace, delta: float, accountant: str, group_size: int = 1) -> PrivacyEstimate:
    """`accounting.accountants.account`, or its result in ``folder`` if the same code has stored it for the same claim.

    A damaged file counts as missing. Raises: as `account`, StorageError.
    """
    stored, claim = _read(folder), _digest(trace, delta, accountant, group_size)
    if claim not in stored:
        stored[claim] = account(trace, delta, accountant, group_size)
        if stored[claim].is_private:  # JSON has no infinity, which takes no time to compute
            values = {each: asdict(estimate) for each, estimate in stored.items()}
            write_private_sealed(_file(folder), json.dumps(values).encode())
    return stored[claim]


def damaged_worst_cases(trial: TrialFiles) -> Iterator[str]:
    """One line for each damaged file of worst cases beside the accountings of a trial; what is damaged is not used."""
    accounts = trial.accounted_again("").rstrip("/")
    for name in list_folders(accounts):
        try:
            read_private_sealed(_file(trial.accounted_again(name)), "delete it; what is missing is computed again")
        except DataCorruption as error:
            yield str(error)


def _read(folder: str) -> dict[str, PrivacyEstimate]:
    try:
        return _STORED.validate_json(read_private_sealed(_file(folder), "account the trial again") or b"{}")
    except (DataCorruption, ValidationError):
        return {}


def _file(folder: str) -> str:
    return f"{folder}/worst-cases.json"


def _digest(trace: Trace, delta: float, accountant: str, group_size: int) -> str:
    """Identifies all that determines a worst case: the run, the question and the code."""
    return hashlib.sha256(repr((_code(), trace, delta, accountant, group_size)).encode()).hexdigest()


@functools.cache
def _code() -> tuple[str, ...]:
    """Versions of the packages, and a sha256 of all source files of `accounting`, which may change within a version."""
    root, sources = Path(accounting.__file__).parent, hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        sources.update(f"{file.relative_to(root).as_posix()}\n".encode() + file.read_bytes())
    return (*map(importlib.metadata.version, _PACKAGES), sources.hexdigest())
