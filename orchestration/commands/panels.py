"""The groups of commands in ``dpsweep --help``, and the example at the end of each command's help."""

from __future__ import annotations

from typing import Any, Final

RUN: Final = "Run"
CLUSTER: Final = "Cluster"
RESULTS: Final = "Results"
PRIVACY: Final = "Privacy"


def listed(panel: str, example: str) -> dict[str, Any]:
    """Return options of ``app.command``: the group, and the epilog with an example. example: arguments after
    ``dpsweep``.
    """
    return {"rich_help_panel": panel, "epilog": f"Example: dpsweep {example}"}
