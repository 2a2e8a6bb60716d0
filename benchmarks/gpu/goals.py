"""The goals on a GPU, as ratios of measured figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

THROUGHPUT, MEMORY, NOISE, TOGETHER = 0.8, 1.2, 0.03, 4.0
OF_STEPS: Final = ("wrn16_4_bf16", "wrn16_4_float32", "vit_b16_bf16", "bert_base_bf16", "gpt2_lora_bf16")
OURS: Final = ("plain", "plain_recorded", "dpsweep", "dpsweep_recorded", "dpsweep_with_noise", "norm_pass")
"""Methods that are no peers."""
Figures = Mapping[str, Mapping[str, Any]]


def goals(phases: Figures) -> list[dict[str, object]]:
    """Return each goal with its value and whether it is met; both are None where it was not measured."""
    steps, alone = phases.get("steps", {}), phases.get("together", {}).get("throughput", {})
    found = [goal for name in OF_STEPS for goal in _of_step(name, steps.get(name))]
    together = alone.get("together") and alone["together"] / alone["alone"]
    return [*found, _at_least("throughput of trials that share the device over that of one", together, TOGETHER)]


def _of_step(name: str, result: Mapping[str, Any] | None) -> Iterator[dict[str, object]]:
    """Yield the goals of a private step: beside a plain one, beside peers, in memory, and of its noise."""
    step = {} if result is None else result
    peers = [step[method] for method in step.get("samples", {}) if method not in OURS]
    memory = step.get("peak_mb", {})
    private, plain = step.get("dpsweep_recorded", step.get("dpsweep")), memory.get("plain")
    yield _at_least(f"{name}: throughput over that of a plain step", private and 1.0 / private, THROUGHPUT)
    yield _at_least(f"{name}: throughput over that of the best peer", min(peers) / private if peers else None, 1.0)
    yield _at_most(
        f"{name}: peak memory over that of a plain step", memory["dpsweep"] / plain if plain else None, MEMORY
    )
    noise = private and step["secret_noise_ms"] / (step["plain_ms"] * private + step["secret_noise_ms"])
    yield _at_most(f"{name}: share of keyed noise in a step", noise, NOISE)


def _at_least(name: str, value: float | None, bound: float) -> dict[str, object]:
    return _goal(name, value, "at_least", bound, lambda measured: measured >= bound)


def _at_most(name: str, value: float | None, bound: float) -> dict[str, object]:
    return _goal(name, value, "at_most", bound, lambda measured: measured <= bound)


def _goal(
    name: str, value: float | None, kind: str, bound: float, reached: Callable[[float], bool]
) -> dict[str, object]:
    measured = {"value": None, "met": None} if value is None else {"value": round(value, 4), "met": reached(value)}
    return {"goal": name, kind: bound, **measured}
