"""The composition root: runs a sweep from its file to its report.

sweep file -> plan -> trials under Ray Tune -> accounting as each trial ends -> results -> MLflow -> report

`stage` runs one sweep file through this flow. `run` puts stages in a row: with ``tune`` the candidates, as their own
sweep, and then the best of each setting, which `winners` chooses; with ``--until`` ever more seeds.
"""

from dpsweep.orchestration.pipeline.progress import ConsoleDisplay
from dpsweep.orchestration.pipeline.record_again import record_again, render_again, show_accounts
from dpsweep.orchestration.pipeline.run import require_room_for_seeds, run_sweep
from dpsweep.orchestration.pipeline.stage import NoDisplay, Outcome, RunRequest

__all__ = [
    "ConsoleDisplay",
    "NoDisplay",
    "Outcome",
    "RunRequest",
    "record_again",
    "render_again",
    "require_room_for_seeds",
    "run_sweep",
    "show_accounts",
]
