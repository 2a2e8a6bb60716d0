"""Stored results of `dpsweep account`, one file per delta and method; they are private data of the examples."""

from __future__ import annotations

import json
from typing import Any

from dpsweep.accounting.errors import DataCorruption
from dpsweep.accounting.records import TrialFiles, list_folders, parsed_json, read_private_sealed, write_private_sealed
from dpsweep.orchestration.records.published import PublishedAccount

ACCOUNT_AGAIN = "delete its folder, and account the trial again"
"""The last advice in messages about damaged results of `dpsweep account`."""


def account_file(folder: str) -> str:
    """Return the result file in the folder of one accounting."""
    return f"{folder}/account.json"


def write_account(folder: str, values: dict[str, Any]) -> None:
    """Store the result of one accounting as JSON. Raises: StorageError."""
    write_private_sealed(account_file(folder), json.dumps(values).encode())


def read_accounts(trial: TrialFiles) -> tuple[PublishedAccount, ...]:
    """Return the stored results for a trial, in the order of folder names; leaves out those still being computed.

    Raises: DataCorruption for a damaged file, InvalidInput for one that is encrypted with another key.
    """
    names = list_folders(trial.accounted_again("").rstrip("/"))
    folders = {name: read_private_sealed(account_file(trial.accounted_again(name)), ACCOUNT_AGAIN) for name in names}
    return tuple(_account(name, trial, parsed_json(content)) for name, content in folders.items() if content)


def _account(name: str, trial: TrialFiles, values: dict[str, Any]) -> PublishedAccount:
    try:
        individuals = values["individuals"]
        return PublishedAccount(
            name=name,
            delta=values["delta"],
            method=individuals["method"],
            epsilon=values["epsilon"],
            accountant=values["accountant"],
            kind=values["kind"],
            individual_kind=individuals["kind"],
            mean=individuals["mean"],
            median=individuals["median"],
            group_epsilons={group["group_size"]: group["epsilon"] for group in values["groups"]},
            group_means={group["name"]: group["mean"] for group in individuals["groups"]},
            reasons=tuple(values["reasons"]),
        )
    except (KeyError, TypeError) as error:
        raise DataCorruption(f"{account_file(trial.accounted_again(name))} lacks values; {ACCOUNT_AGAIN}") from error
