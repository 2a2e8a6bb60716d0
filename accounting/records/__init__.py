"""Stored data: atomic files, traces, norm shards, per-example epsilons, and the names of a trial's files."""

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
    open_filesystem,
    read_bytes,
    write_bytes_atomically,
)
from accounting.records.layout import TrialFiles
from accounting.records.parts import MANIFEST
from accounting.records.sealed import read_sealed, write_sealed
from accounting.records.shards import (
    Epsilons,
    NormShards,
    NormShardWriter,
    NormSnapshot,
    PartFiles,
    PartNorms,
    check_contributions,
    read_contributions,
    read_epsilons,
    write_epsilons,
)
from accounting.records.traces import read_trace, write_trace

__all__ = [
    "MANIFEST",
    "Epsilons",
    "NormShardWriter",
    "NormShards",
    "NormSnapshot",
    "PartFiles",
    "PartNorms",
    "TrialFiles",
    "check_contributions",
    "closed_to_strangers",
    "delete",
    "delete_folder",
    "delete_if_empty",
    "exists",
    "list_files",
    "list_folders",
    "make_private_file",
    "make_private_folder",
    "open_filesystem",
    "read_bytes",
    "read_contributions",
    "read_epsilons",
    "read_sealed",
    "read_trace",
    "write_bytes_atomically",
    "write_epsilons",
    "write_sealed",
    "write_trace",
]
