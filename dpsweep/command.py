"""Entry point of the command ``dpsweep``: checks that Python finds our own packages, then starts the command."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_PACKAGES = ("accounting", "workers", "orchestration")


def main() -> None:
    """Run the command, or exit with code 2 and one line if Python would import other packages of the same names."""
    found = other_package()
    if found is not None:
        print(f"error: {found}", file=sys.stderr)
        sys.exit(2)
    from dpsweep.orchestration.commands.main import main as command

    command()


def other_package() -> str | None:
    """Check where Python finds our packages, without importing them.

    Returns one line about the first package that Python finds elsewhere or not at all; None if all are found.
    """
    ours = Path(__file__).resolve().parents[1]
    for package in _PACKAGES:
        spec = importlib.util.find_spec(package)
        places = [] if spec is None else [spec.origin] if spec.origin else [*(spec.submodule_search_locations or ())]
        found = [Path(place).resolve() for place in places if place]
        if ours / package / "__init__.py" not in found:
            other = f"{found[0]}; rename that one, or take its folder from PYTHONPATH" if found else "none; install it"
            return f"dpsweep needs its own package {package!r}, which lies in {ours}, but Python finds {other}"
    return None
