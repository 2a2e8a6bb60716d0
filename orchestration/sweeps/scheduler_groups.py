"""Groups of trials that a scheduler may compare while they train. Pure.

A sweep compares clipping methods, noise schedules, targets and data. If a scheduler compared these too, it would stop
settings that the sweep asks about, judged by their first epochs. It therefore compares trials of one setting and one
seed, which differ only in hyperparameters such as the learning rate, the clipping bound or the batch size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from dpsweep.orchestration.sweeps.grid import GridPoint
from dpsweep.orchestration.sweeps.identity import content
from dpsweep.orchestration.sweeps.schema import SweepSpec
from dpsweep.workers.spec import Component, NoiseSpec


def rivals(point: GridPoint) -> str | None:
    """Return the name of the group of trials that a scheduler may compare this one with: its setting and seed.

    None for a baseline, which is never stopped because private trials are compared with it.
    """
    if not point.is_private:
        return None
    spec = point.spec
    level = 1.0 if point.target_epsilon is not None else spec.noise.initial_noise_multiplier
    compared = replace(
        spec,
        key="",
        clipping=_named(spec.clipping),
        noise=NoiseSpec(level, _named(spec.noise.schedule)),
        optimizer=Component("any"),
        learning_rate_schedule=Component("any"),
        averaging=None,
        augmentation=None,
        sampling=replace(spec.sampling, batch_size=1, max_batch_size=None),
        epochs=1,
        budget=None,
    )
    return content(compared, point.target_epsilon)


def unopposed(sweep: SweepSpec, points: Iterable[GridPoint]) -> tuple[str, ...]:
    """Return a warning if the sweep's scheduler stops trials, but every group of comparable trials has only one
    trial, or all end before it may stop one.
    """
    compared = [(group, point.spec.epochs) for point in points if (group := rivals(point)) is not None]
    if sweep.scheduler.name == "fifo":
        return ()
    longest, grace = max((epochs for _, epochs in compared), default=0), sweep.scheduler.grace_epochs
    if 0 < longest <= grace:
        return (
            f"scheduler {sweep.scheduler.name} stops no trial before its grace_epochs, {grace}, and no trial takes "
            f"more than {longest}, so it will stop none; set grace_epochs lower",
        )
    if max(Counter(group for group, _ in compared).values(), default=0) > 1:
        return ()
    return (
        f"scheduler {sweep.scheduler.name} compares private trials of one setting and seed, which differ in optimizer, "
        "learning rate, bound, batch size or epochs; no two of these do, so it will stop none",
    )


def _named(component: Component) -> Component:
    """Return the component without its parameters."""
    return Component(component.name)
