"""Entry point of the command ``dpsweep``: starts it once it is known that Python finds our own packages."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_PACKAGES = ("accounting", "workers", "orchestration")


def main() -> None:
    """Run the command, or end with exit code 2 and one line where Python would import packages of somebody else."""
    found = other_package()
    if found is not None:
        print(f"error: {found}", file=sys.stderr)
        sys.exit(2)
    from orchestration.commands.main import main as command

    command()


def other_package() -> str | None:
    """One line that names the first of our packages that Python finds elsewhere or not at all; imports none of them."""
    ours = Path(__file__).resolve().parents[1]
    for package in _PACKAGES:
        spec = importlib.util.find_spec(package)
        places = [] if spec is None else [spec.origin] if spec.origin else [*(spec.submodule_search_locations or ())]
        found = [Path(place).resolve() for place in places if place]
        if ours / package / "__init__.py" not in found:
            other = f"{found[0]}; rename that one, or take its folder from PYTHONPATH" if found else "none; install it"
            return f"dpsweep needs its own package {package!r}, which lies in {ours}, but Python finds {other}"
    return None
