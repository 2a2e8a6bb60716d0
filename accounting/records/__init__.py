"""Stored data: atomic files, traces, norm shards, per-example epsilons, and the names of a trial's files."""

from accounting.records.arrow_tables import read_table
from accounting.records.encryption import KEY_VARIABLE, KeyCheck, is_encrypting, new_key_check, require_key
from accounting.records.epsilons import (
    Epsilons,
    StoredEpsilons,
    commit_epsilons,
    forget_notes,
    noted_epsilons,
    read_epsilons,
    verify_epsilons,
    write_epsilons,
)
from accounting.records.files import (
    closed_to_strangers,
    delete,
    delete_folder,
    delete_if_empty,
    exists,
    list_files,
    list_folders,
    make_private_file,
    make_private_folder,
    modified,
    open_filesystem,
    read_bytes,
    write_bytes_atomically,
)
from accounting.records.group_files import read_groups
from accounting.records.layout import TrialFiles
from accounting.records.part_files import PartFiles
from accounting.records.parts import MANIFEST, PartRecord
from accounting.records.private_files import read_encrypted, read_private, write_private
from accounting.records.sealed import (
    read_once_unsealed,
    read_private_sealed,
    read_sealed,
    write_private_sealed,
    write_sealed,
)
from accounting.records.shards import (
    NormShards,
    NormShardWriter,
    NormSnapshot,
    PartNorms,
    check_contributions,
    delete_norms,
    has_norms,
    read_contributions,
)
from accounting.records.traces import read_trace, write_trace
from accounting.records.user_rows import ShareOfRows, SortedRows, noted_rows, shares_of, write_rows
from accounting.records.users import OwnedPart, StoredUsers, verify_users, write_users

__all__ = [
    "KEY_VARIABLE",
    "MANIFEST",
    "Epsilons",
    "KeyCheck",
    "NormShardWriter",
    "NormShards",
    "NormSnapshot",
    "OwnedPart",
    "PartFiles",
    "PartNorms",
    "PartRecord",
    "ShareOfRows",
    "SortedRows",
    "StoredEpsilons",
    "StoredUsers",
    "TrialFiles",
    "check_contributions",
    "closed_to_strangers",
    "commit_epsilons",
    "delete",
    "delete_folder",
    "delete_if_empty",
    "delete_norms",
    "exists",
    "forget_notes",
    "has_norms",
    "is_encrypting",
    "list_files",
    "list_folders",
    "make_private_file",
    "make_private_folder",
    "modified",
    "new_key_check",
    "noted_epsilons",
    "noted_rows",
    "open_filesystem",
    "read_bytes",
    "read_contributions",
    "read_encrypted",
    "read_epsilons",
    "read_groups",
    "read_once_unsealed",
    "read_private",
    "read_private_sealed",
    "read_sealed",
    "read_table",
    "read_trace",
    "require_key",
    "shares_of",
    "verify_epsilons",
    "verify_users",
    "write_bytes_atomically",
    "write_epsilons",
    "write_private",
    "write_private_sealed",
    "write_rows",
    "write_sealed",
    "write_trace",
    "write_users",
]
