"""Check that the files of a trained trial are unchanged since it wrote them.

A digest is computed without noise: an attacker who knows all rows but one can test guesses of that row against the
digest of a private file. Digests of private files are therefore stored in ``private/``; ``result.json`` holds only the
digests of public files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shlex
from collections.abc import Iterator, Mapping

from dpsweep.accounting.errors import START_ANEW, DataCorruption
from dpsweep.accounting.records.arrow_parts import MANIFEST
from dpsweep.accounting.records.epsilon_files import verify_epsilons
from dpsweep.accounting.records.files import digest_of, exists, list_files, write_bytes_atomically
from dpsweep.accounting.records.json_text import parsed_json
from dpsweep.accounting.records.local_files import UnsafeFile
from dpsweep.accounting.records.sealed import (
    read_private_sealed,
    read_sealed,
    write_private,
    write_private_sealed,
    write_sealed,
)
from dpsweep.accounting.records.shards import NormShards, has_norms
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.accounting.records.user_files import verify_users
from dpsweep.orchestration.store.later_results import ACCOUNT_AGAIN
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.store.results import StoredResult
from dpsweep.workers.machine.stored_tensors import noted_when_written


def write_public_reports(files: SweepFiles, contents: Mapping[str, bytes], sensitive: bool) -> None:
    """Write files of the report, given by path, and note the sha256 of each beside those noted before.

    `sensitive`: whether the files show exact statistics; then they and their digests are readable by their owner only.
    Raises: StorageError.
    """
    for uri, content in contents.items():
        write_bytes_atomically(uri, content, sensitive)
    digests = _noted(files) | {_name(files, uri): _sha256(content) for uri, content in contents.items()}
    write_sealed(files.report_digests, json.dumps(digests).encode(), sensitive)


def write_private_report(files: SweepFiles, content: bytes) -> None:
    """Write the private report, and note its sha256 in ``private/``. Raises: StorageError."""
    stored = write_private(files.private_report, content)
    digests = {_name(files, files.private_report): _sha256(stored)}
    write_private_sealed(files.private_report_digests, json.dumps(digests).encode())


def _noted(files: SweepFiles) -> dict[str, str]:
    """Return the digests of public files noted before; empty if they are damaged, which writing mends."""
    with contextlib.suppress(DataCorruption):
        return dict(parsed_json(read_sealed(files.report_digests, "") or b"{}"))
    return {}


def changed_report_files(files: SweepFiles) -> Iterator[str]:
    """Yield one line for each file of the report that is missing or has changed."""
    again = f"`dpsweep report {shlex.quote(files.root)}` writes it again"
    for read, uri in ((read_sealed, files.report_digests), (read_private_sealed, files.private_report_digests)):
        try:
            content = read(uri, again)
        except DataCorruption as error:
            yield str(error)
            continue
        for name, noted in parsed_json(content or b"{}").items():
            found = f"{files.root}/{name}"
            if not exists(found):
                yield f"{found}: it is missing; {again}"
            elif digest_of(found) != noted:
                yield f"{found}: its sha256 differs from the one noted when it was written; {again}"


def _sha256(content: bytes | memoryview) -> str:
    return hashlib.sha256(content).hexdigest()


def _name(files: SweepFiles, uri: str) -> str:
    return uri.removeprefix(f"{files.root}/")


_PRIVATE = "private/"
_STEP = "/step="


def note_digests(files: TrialFiles) -> dict[str, str]:
    """Store the sha256 of a trial's private files in ``private/``; return the sha256 of its public files by name.

    Files whose digests the worker noted as it wrote them are not read. Not included: ``result.json``, a checkpoint,
    which is deleted next, and the digests themselves. Files that `dpsweep account` writes later carry their own
    checksums, and the manifests of snapshots hold the checksums of shards.
    """
    later, known = files.accounted_again(""), noted_when_written(files)
    others = (files.result, files.private_digests)
    digests = {
        name: known.get(name) or digest_of(uri)
        for name in list_files(files.root)
        if (uri := f"{files.root}/{name}") not in others
        and not uri.startswith((later, files.checkpoint))
        and not (name.startswith(_PRIVATE) and (name.endswith(".arrow") or _STEP in name))
    }
    return _keep_private(digests, files)


def met_other_data(files: TrialFiles, data_digest: str) -> bool:
    """Return whether the trial stored the fingerprint of other data than those with this `Dataset.digest`.

    Raises: as `digest_of_its_data`.
    """
    return digest_of_its_data(files) not in (None, data_digest)


def digest_of_its_data(files: TrialFiles) -> str | None:
    """Return the `Dataset.digest` of the data that a trial was trained on; None if it was deleted.

    Raises: DataCorruption if it is damaged.
    """
    next_step = f"restore it from a backup, or {START_ANEW}"
    content = read_private_sealed(files.data_fingerprint, next_step)
    if content is None:
        return None
    stored = parsed_json(content).get("data")
    if not isinstance(stored, str):
        raise DataCorruption(f"{files.data_fingerprint} holds no fingerprint of data; {next_step}")
    return stored


def damages(files: TrialFiles, result: StoredResult) -> Iterator[str]:
    """Yield one line for each damaged or missing file: what is wrong with it, and what to do. Reads every file of the
    trial.

    Not reported: a directory that was deleted entirely, such as the one with all norms, and attacks and outcomes that
    were deleted, without which less is shown.
    """
    optional = (files.attacks, files.membership, files.outcomes)
    private: dict[str, str] = {}
    try:
        private = _private_digests(files)
    except DataCorruption as error:
        yield str(error)
    noted = {f"{files.root}/{name}": sha256 for name, sha256 in (result.digests | private).items()}
    there = {uri: sha256 for uri, sha256 in noted.items() if uri not in optional or exists(uri)}
    changed: list[str] = []
    for uri, sha256 in there.items():
        try:
            if _is_changed(uri, sha256, files):
                changed.append(uri)
                yield _changed(uri, _accounted_anew(files) if _is_accounted(uri, files) else START_ANEW)
        except UnsafeFile as error:
            changed.append(uri)
            yield str(error)
    accounts = [f"{files.root}/{name.removesuffix(f'/{MANIFEST}')}" for name in _accounts(files)]
    for directory, is_there, verify, next_step in (
        *((norms, has_norms, _verify_norms, START_ANEW) for norms in (files.norms, files.exact_norms)),
        (files.users, _has_parts, verify_users, START_ANEW),
        (files.epsilons, _has_parts, verify_epsilons, _accounted_anew(files)),
        *((account, _has_parts, verify_epsilons, ACCOUNT_AGAIN) for account in accounts),
    ):
        if is_there(directory) and not any(uri.rpartition("/")[0] == directory for uri in changed):
            try:
                verify(directory)
            except DataCorruption as error:
                yield str(error).replace(START_ANEW, next_step)


def _is_accounted(uri: str, files: TrialFiles) -> bool:
    """Return whether the file holds epsilons of examples, or their summary."""
    return uri == files.private_summary or uri.startswith(f"{files.epsilons}/")


def _accounted_anew(files: TrialFiles) -> str:
    """Return what to do about damaged epsilons: with the norms they are computed again, which costs no privacy."""
    return f"delete {files.result} and resume, which accounts the trial again" if has_norms(files.norms) else START_ANEW


def require_unaltered(files: TrialFiles, result: StoredResult, uri: str) -> None:
    """Raise DataCorruption if the public file ``uri`` of a trained trial is missing or has changed since training."""
    name = uri.removeprefix(f"{files.root}/")
    if name in result.digests and (not exists(uri) or digest_of(uri) != result.digests[name]):
        raise DataCorruption(_changed(uri, START_ANEW))


def require_unaltered_model(files: TrialFiles, result: StoredResult) -> None:
    """Raise DataCorruption if the model, its code, or what prepares its inputs is missing or has changed."""
    code = (f"{files.root}/{name}" for name in result.digests if f"{files.root}/{name}".startswith(f"{files.code}/"))
    for uri in (files.model, files.inputs, *code):
        require_unaltered(files, result, uri)


def _is_changed(uri: str, noted: str, files: TrialFiles) -> bool:
    """Return whether the file has another sha256 than the ``noted`` one, or is missing.

    A private file may be missing together with all others of its folder: private folders are left out on purpose.
    """
    if exists(uri):
        return digest_of(uri) != noted
    return not uri.startswith(f"{files.private}/") or bool(list_files(uri.rpartition("/")[0]))


def _changed(uri: str, next_step: str) -> str:
    reason = "its sha256 differs from the one noted when training ended" if exists(uri) else "it is missing"
    return f"{uri}: {reason}; restore the file from a backup, or {next_step}"


def _keep_private(digests: Mapping[str, str], files: TrialFiles) -> dict[str, str]:
    """Store the digests of private files in ``private/``; return the others."""
    private = {name: noted for name, noted in digests.items() if name.startswith(_PRIVATE)}
    write_private_sealed(files.private_digests, json.dumps(private).encode())
    return {name: noted for name, noted in digests.items() if not name.startswith(_PRIVATE)}


def _private_digests(files: TrialFiles) -> dict[str, str]:
    """Return the digests of private files by name; empty if ``private/`` was deleted entirely. Raises: DataCorruption
    if they are damaged, or missing while other private files exist."""
    next_step = f"delete {files.result} and resume, which rebuilds both"
    content = read_private_sealed(files.private_digests, next_step)
    if content is None and list_files(files.private):
        raise DataCorruption(f"{files.private_digests} is missing; restore it from a backup, or {next_step}")
    return {} if content is None else dict(parsed_json(content))


def _accounts(files: TrialFiles) -> list[str]:
    """Manifests of the folders that `dpsweep account` wrote, relative to the trial."""
    folder = files.accounted_again("")
    inside = folder.removeprefix(f"{files.root}/")
    return [f"{inside}{name}" for name in list_files(folder) if name.endswith(MANIFEST)]


def _has_parts(directory: str) -> bool:
    return exists(f"{directory}/{MANIFEST}")


def _verify_norms(directory: str) -> None:
    NormShards(directory).verify()
