"""Stored data: atomic files, traces, norm shards, per-example epsilons, and the names of a trial's files.

Other rooms import only the modules in `__all__`.
"""

__all__ = [
    "arrow_parts",
    "arrow_tables",
    "encryption",
    "epsilon_files",
    "files",
    "json_text",
    "keystream",
    "local_files",
    "parquet_tables",
    "part_files",
    "recorded_contributions",
    "sealed",
    "shards",
    "traces",
    "trial_files",
    "user_files",
    "user_rows",
]
