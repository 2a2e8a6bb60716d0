"""Stored results of `dpsweep account` and `dpsweep audit`; they are private data of the examples."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from dpsweep.accounting.errors import DataCorruption
from dpsweep.accounting.records.files import exists, list_files, list_folders
from dpsweep.accounting.records.json_text import parsed_json
from dpsweep.accounting.records.sealed import read_private_sealed, write_private_sealed
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.store.published import PublishedAccount, PublishedAudit
from dpsweep.workers.evaluation.attack_results import AuditResult
from dpsweep.workers.spec import AuditKind, AuditSpec, Transcript

ACCOUNT_AGAIN = "delete its folder, and account the trial again"
"""The last advice in messages about damaged results of `dpsweep account`."""


def account_file(folder: str) -> str:
    """Return the result file in the folder of one accounting."""
    return f"{folder}/account.json"


def write_account(folder: str, values: dict[str, Any]) -> None:
    """Store the result of one accounting as JSON, with what it was not asked for as an earlier one found it.

    Raises: StorageError, and DataCorruption for a damaged earlier one.
    """
    stored = read_private_sealed(account_file(folder), ACCOUNT_AGAIN)
    earlier: dict[str, Any] = parsed_json(stored) if stored else {}
    try:
        groups = {group["group_size"]: group for group in (*earlier.get("groups", ()), *values["groups"])}
    except (KeyError, TypeError) as error:
        raise DataCorruption(f"{account_file(folder)} lacks values; {ACCOUNT_AGAIN}") from error
    users = {"users": earlier["users"]} if "users" in earlier else {}
    whole = {**users, **values, "groups": [groups[size] for size in sorted(groups)]}
    write_private_sealed(account_file(folder), json.dumps(whole).encode())


def read_accounts(trial: TrialFiles) -> tuple[PublishedAccount, ...]:
    """Return the stored results for a trial, in the order of folder names; leaves out those still being computed.

    Raises: DataCorruption for a damaged file, InvalidInput for one that is encrypted with another key.
    """
    names = list_folders(trial.accounted_again("").rstrip("/"))
    folders = {name: read_private_sealed(account_file(trial.accounted_again(name)), ACCOUNT_AGAIN) for name in names}
    return tuple(_account(name, trial, parsed_json(content)) for name, content in folders.items() if content)


def _account(name: str, trial: TrialFiles, values: dict[str, Any]) -> PublishedAccount:
    try:
        individuals, users = values["individuals"], values.get("users")
        found = {
            "name": name,
            **{field: values[field] for field in ("delta", "accountant", "kind", "reasons")},
            "epsilon": _or_infinite(values["epsilon"]),
            **{field: individuals[field] for field in ("method", "mean", "median")},
            "individual_kind": individuals["kind"],
            "group_epsilons": {group["group_size"]: _or_infinite(group["epsilon"]) for group in values["groups"]},
            "group_means": {group["name"]: group["mean"] for group in individuals["groups"]},
            "of_users": users and {**users, "median": users["statistics"]["median"]},
        }
        return _ACCOUNTS.validate_python(found)
    except (KeyError, TypeError, AttributeError, ValidationError) as error:
        raise DataCorruption(f"{account_file(trial.accounted_again(name))} lacks values; {ACCOUNT_AGAIN}") from error


def _or_infinite(epsilon: float | None) -> float:
    """Return a stored epsilon, which is null if it is infinite (`PrivacyEstimate.as_dict`)."""
    return math.inf if epsilon is None else epsilon


_ACCOUNTS: Final = TypeAdapter(PublishedAccount)
_NEXT_STEP: Final = "delete it, and audit the trial again"
_SUFFIX: Final = ".json"


@dataclass(frozen=True)
class AuditRecord:
    """A run that was audited: a copy of a trial's settings, trained with canaries and then deleted.

    `key`: of the trial.
    `canaries`, `kind`, `transcript`, `confidence`: as of `dpsweep.workers.spec.AuditSpec`.
    `seed`: of the copy.
    `delta`: where bounds and claim hold.
    `claim`: epsilon that the trial claims.
    `lower_bound`: on epsilon, the best of all tests; 0 proves nothing.
    `of_canary`: epsilon that a made-up canary pays, at most the claim; of rows, the claim. A bound above it contradicts
    the claim.
    `lower_bounds`: of each test.
    `groups`: of the canaries of each group with enough to prove anything.
    `guesses`, `correct`: of the test with the best bound; 0 if that counts none.
    `seconds`: duration of the copy.
    `number`: among the audits of the trial of this kind, from 1. All are kept, because whoever audits until a bound is
    low has shown nothing.
    """

    key: str
    canaries: int
    kind: AuditKind
    transcript: Transcript
    confidence: float
    seed: int
    delta: float
    claim: float
    of_canary: float
    lower_bound: float
    lower_bounds: dict[str, float]
    groups: dict[str, float]
    guesses: int
    correct: int
    seconds: float
    number: int = 1

    @property
    def name(self) -> str:
        """Kind of audit, and its number from the second on."""
        return f"{self.kind}-{self.transcript}-{self.canaries}{f'-{self.number}' if self.number > 1 else ''}"


_RECORDS: Final = TypeAdapter(AuditRecord)


def audit_schema() -> dict[str, Any]:
    """Return the JSON schema of a stored audit."""
    return _RECORDS.json_schema()


def record_of(key: str, result: AuditResult, canaries: int, seed: int, claim: float, seconds: float) -> AuditRecord:
    """Return the record of an audit of the trial called ``key``."""
    best = result.everyone
    return AuditRecord(
        key=key,
        canaries=canaries,
        kind=result.kind,
        transcript=result.transcript,
        confidence=result.confidence,
        seed=seed,
        delta=result.delta,
        claim=claim,
        of_canary=claim if result.of_canary is None else result.of_canary,
        lower_bound=best.epsilon,
        lower_bounds={test.name: test.lower_bound for test in result.tests},
        groups={group.name: group.epsilon for group in result.groups},
        guesses=best.guesses,
        correct=best.correct,
        seconds=seconds,
    )


def write_audit(files: SweepFiles, record: AuditRecord) -> tuple[AuditRecord, str]:
    """Store the result of an audit beside earlier ones of its kind. Returns it, and its file. Raises: StorageError."""
    folder = files.audits(record.key)
    while exists(uri := f"{folder}/{record.name}{_SUFFIX}"):
        record = replace(record, number=record.number + 1)
    write_private_sealed(uri, _RECORDS.dump_json(record))
    return record, uri


def stored_audit(files: SweepFiles, key: str, audit: AuditSpec, seed: int) -> tuple[AuditRecord, str] | None:
    """Return what the same audit of the trial found before, and its file; None if there was none.

    seed: of the copy. Raises: as `read_audits`.
    """
    folder = files.audits(key)
    for uri in (f"{folder}/{name}" for name in list_files(folder) if name.endswith(_SUFFIX)):
        found = _audit(uri)
        was = AuditSpec(found.canaries, found.confidence, found.kind, found.transcript)
        if (was, found.seed) == (audit, seed):
            return found, uri
    return None


def read_audits(files: SweepFiles, key: str) -> tuple[PublishedAudit, ...]:
    """Return the stored audits of a trial, by kind and in the order in which they were made.

    Raises: DataCorruption for a damaged file, InvalidInput for one that is encrypted with another key.
    """
    folder = files.audits(key)
    found = [_audit(f"{folder}/{name}") for name in list_files(folder) if name.endswith(_SUFFIX)]
    found.sort(key=lambda each: (each.kind, each.transcript, each.canaries, each.number))
    return tuple(map(_published, found))


def _audit(uri: str) -> AuditRecord:
    try:
        return _RECORDS.validate_json(read_private_sealed(uri, _NEXT_STEP) or b"")
    except ValidationError as error:
        raise DataCorruption(f"{uri} holds no audit; {_NEXT_STEP}") from error


def _published(found: AuditRecord) -> PublishedAudit:
    return PublishedAudit(**{each.name: getattr(found, each.name) for each in fields(PublishedAudit)})
