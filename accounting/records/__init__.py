"""What is stored: files, norm shards, traces and epsilons, and the names of a trial's files."""

from accounting.records.layout import TrialFiles
from accounting.records.shards import (
    Epsilons,
    NormShards,
    NormShardWriter,
    NormSnapshot,
    read_epsilons,
    write_epsilons,
)
from accounting.records.traces import read_trace, write_trace

__all__ = [
    "Epsilons",
    "NormShardWriter",
    "NormShards",
    "NormSnapshot",
    "TrialFiles",
    "read_epsilons",
    "read_trace",
    "write_epsilons",
    "write_trace",
]
