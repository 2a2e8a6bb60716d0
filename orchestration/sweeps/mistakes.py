"""The mistakes in a sweep file, one line each. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from pydantic import ValidationError

from dpsweep.orchestration.sweeps.text import shortly
from dpsweep.workers.field_bounds import place_of


def mistakes(error: ValidationError, content: Mapping[str, Any]) -> Iterator[str]:
    """Yield one line per mistake: its place in the sweep, what is expected there, and what was found."""
    wrong: dict[str, list[str]] = {}
    for item in error.errors(include_url=False, include_context=False):
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] not in ("value_error", "missing"):
            message = f"{message}, but got {shortly(item['input'])}"
        missing = [str(item["loc"][-1])] if item["type"] == "missing" else []
        place = ".".join([*place_of(item["loc"], content), *missing])
        wrong.setdefault(place, []).append(_missing(place) if missing else message)
    for place, messages in wrong.items():
        line = "; or ".join(dict.fromkeys(messages))
        yield f"{place}: {line}" if place else line


def _missing(place: str) -> str:
    *sections, key = (part for part in place.split(".") if not part.isdigit())  # without positions in lists
    example = EXAMPLES.get(".".join([*sections, key]))
    return "this key is missing" + (f"; add it, such as `{key}: {example}`" if example else "")


EXAMPLES: Final[Mapping[str, str]] = {
    "name": "my-sweep",
    "data": "digits",
    "model": "mlp",
    "sampling": "{method: poisson, batch_size: 256}",
    "sampling.method": "poisson",
    "sampling.batch_size": "256",
    "epochs": "20",
    "clipping": "[none, {name: flat, bound: 1}]",
    "privacy": "{target_epsilon: 3, delta: 1e-5}",
    "privacy.delta": "1e-5",
    "audit.canaries": "200",
    "attacks.rmia.reference_models": "4",
    "tune.parameters": "{clipping.bound: [0.5, 1, 2]}",
    "tune.privacy": "unaccounted  # research mode; or public, private_selection, exponential_mechanism",
}
"""A value of every key without a default, by its place, for the message that it is missing."""
