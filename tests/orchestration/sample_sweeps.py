"""Results of a sweep as a quickstart would publish them: made up, but consistent with each other."""

from __future__ import annotations

import functools
import math
import random
import statistics
from dataclasses import replace

from dpsweep.accounting import AttackRisk, PoissonSampling, attack_risk, parse_schedule, planned_trace, privacy_curve
from dpsweep.orchestration.store.published import (
    Density,
    EpsilonHistogram,
    EstimateQuality,
    GroupEpsilon,
    IndividualStatistics,
    Label,
    PublishedAttack,
    PublishedCourse,
    PublishedDepartures,
    PublishedEpoch,
    PublishedGroup,
    PublishedPrivacy,
    PublishedQuality,
    PublishedSweep,
    PublishedTrial,
    TrialState,
)
from dpsweep.orchestration.store.release_modes import Disclosure

EPOCHS = 30
DIGITS = tuple(f"digit {digit}" for digit in range(10))
BASELINE = dict(zip(DIGITS, (0.99, 0.96, 0.98, 0.96, 0.98, 0.97, 0.99, 0.98, 0.83, 0.95), strict=True))
PRICE = {"flat": 0.05, "dpsgd_f": 0.035, "individual": 0.055, "automatic": 0.04}
RARE = {"flat": 0.34, "dpsgd_f": 0.12, "individual": 0.30, "automatic": 0.26}


def _quality(clipping: str, gain: float, noise: random.Random, baseline: bool) -> PublishedQuality:
    groups = []
    for name, accuracy in BASELINE.items():
        price = 0.0 if clipping == "none" else (RARE if name == "digit 8" else PRICE)[clipping] - gain
        served = accuracy - max(0.0, price * (2.2 - 1.2 * accuracy)) + noise.gauss(0.0, 0.012)
        served = min(served, 1.0)
        change = served - accuracy if baseline and clipping != "none" else None
        groups.append(PublishedGroup(name, 36, served, -math.log(max(served, 0.05)), change))
    total = statistics.fmean(group.main or 0.0 for group in groups)
    changes = [group.accuracy_change for group in groups if group.accuracy_change is not None]
    return PublishedQuality(
        accuracy=total,
        loss=-math.log(total),
        accuracy_change=statistics.fmean(changes) if changes else None,
        groups=tuple(groups),
        fairness={"accuracy_difference": max(g.main or 0.0 for g in groups) - min(g.main or 0.0 for g in groups)},
    )


def _individuals(
    worst: float, noise: random.Random, disclosure: str, quality: PublishedQuality
) -> IndividualStatistics:
    samples = sorted(worst * min(1.0, 0.1 + noise.betavariate(1.6, 3.2)) for _ in range(1300))
    width = worst / 20
    counts = [0.0] * 20
    for sample in samples:
        counts[min(19, int(sample / width))] += 1
    noisy = disclosure == "private"
    groups = tuple(
        GroupEpsilon(
            group.name,
            worst * (0.92 - 0.65 * (group.main or 0.0)) + noise.gauss(0.0, 0.02),
            0.03,
            130.0,
            None if noisy else -0.31,
        )
        for group in quality.groups
    )
    return IndividualStatistics(
        disclosure="private" if noisy else "raw",
        kind="estimate",
        mean=statistics.fmean(samples),
        median=None if noisy else statistics.median(samples),
        groups=groups,
        histogram=EpsilonHistogram(
            tuple(width * j for j in range(21)), tuple(c + noise.gauss(0.0, 4.0) * noisy for c in counts)
        ),
        release_epsilon=0.1 if noisy else None,
        estimates=None if noisy else EstimateQuality(100, 0.9912, 0.0123, 0.0789, _density(0.5, worst)),
        loss_correlation=None if noisy else 0.87,
        loss_density=None if noisy else _density(0.1, worst),
    )


def _course(group: PublishedGroup, private: bool, noise: random.Random) -> PublishedCourse:
    """Gradients of groups that are served badly stay large; small groups have more noise."""
    norms = tuple(
        4.0 - 3.0 * (group.main or 0.0) * (epoch + 1) / EPOCHS + noise.random() / 9 for epoch in range(EPOCHS)
    )
    examples = 20 if group.name == "digit 8" else 130
    return PublishedCourse(
        examples,
        losses=tuple(norm / 5 for norm in norms),
        norms=norms,
        biases=tuple(norm - 1.0 if private else 0.0 for norm in norms),
        noises=(60.0 / examples if private else 0.0,) * EPOCHS,
    )


def _density(low: float, high: float) -> Density:
    """Four cells on a diagonal, and one beside it."""
    edges = tuple(low + (high - low) * place / 4 for place in range(5))
    return Density(edges, edges, ((40, 0, 0, 0), (2, 30, 0, 0), (0, 0, 20, 0), (0, 0, 0, 10)))


def _history(clipping: str, schedule: str, sigma: float) -> tuple[PublishedEpoch, ...]:
    def bounds(epoch: int) -> dict[str, float]:
        if clipping == "dpsgd_f":
            decay = math.exp(-epoch / 12)
            return {
                name: 1.0 + (0.5 + 0.1 * k + (1.2 if name == "digit 8" else 0.0)) * decay
                for k, name in enumerate(DIGITS)
            }
        return {"all": 1.0} if clipping == "flat" else {}

    def level(epoch: int) -> float:
        return sigma * math.exp(-0.02 * epoch) if schedule == "exponential" else sigma

    return tuple(
        PublishedEpoch(
            epoch,
            (epoch + 1) * 23,
            level(epoch),
            bounds(epoch),
            {"test_accuracy": 0.9 - 0.7 * math.exp(-epoch / 6), "epsilon": 3.0 * math.sqrt((epoch + 1) / EPOCHS)},
        )
        for epoch in range(EPOCHS)
    )


@functools.cache
def sample_trial(
    clipping: str = "flat",
    schedule: str = "constant",
    seed: int = 0,
    *,
    target: float = 3.0,
    disclosure: str = "raw",
    baseline: bool = True,
    **labels: Label,
) -> PublishedTrial:
    """One finished trial; clipping ``none`` is the non-private baseline."""
    noise = random.Random(f"{clipping} {schedule} {seed} {target}")
    private = clipping != "none"
    quality = _quality(clipping, 0.015 * (schedule == "exponential") + 0.02 * math.log(target), noise, baseline)
    spent = target - 0.004 * noise.random()
    if disclosure == "raw":
        groups = (replace(group, training=_course(group, private, noise)) for group in quality.groups)
        quality = replace(quality, groups=tuple(groups))
    return PublishedTrial(
        key="-".join(str(part) for part in (clipping, schedule, seed, *labels.values())),
        labels={"clipping": clipping, "schedule": schedule if private else "none", "seed": seed, **labels},
        state=TrialState.FINISHED,
        privacy=PublishedPrivacy(
            spent if private else math.inf,
            1e-5,
            "pld",
            group_epsilons={1: spent, 2: spent * 2.1, 4: spent * 4.7, 8: spent * 12.0} if private else {},
            risks=_risks() if private else {},
        ),
        quality=quality,
        individuals=_individuals(spent, noise, disclosure, quality) if private and disclosure != "none" else None,
        attacks=tuple(PublishedAttack(name, 72, 0.5625 if private else 0.6875, 0.06) for name in DIGITS)
        if disclosure == "raw"
        else (),
        departures=tuple(PublishedDepartures(name, 130, tuple(range(EPOCHS))) for name in DIGITS)
        if disclosure == "raw" and clipping == "individual"
        else (),
        history=_history(clipping, schedule, 6.0 / target + 0.4 * (schedule == "exponential")) if private else (),
        started=1.7e9,
        ended=1.7e9 + 7.5 + 3 * noise.random(),
    )


@functools.cache
def _risks() -> dict[int, AttackRisk]:
    trace = planned_trace(parse_schedule("constant", 1.2), PoissonSampling(0.02), 2, 50, 5000)
    return {size: attack_risk(privacy_curve(trace, size)) for size in (1, 2, 4, 8)}


@functools.cache
def sample_sweep(
    disclosure: Disclosure = "raw", targets: tuple[float, ...] = (3.0,), baseline: bool = True
) -> PublishedSweep:
    """Clipping x schedule x two seeds (x target), the shared baseline, and one trial that failed."""
    trials = [sample_trial("none", "none", seed, disclosure=disclosure) for seed in (0, 1)] if baseline else []
    for target in targets:
        extra: dict[str, Label] = {"target_epsilon": target} if len(targets) > 1 else {}
        trials += [
            sample_trial(clipping, schedule, seed, target=target, disclosure=disclosure, baseline=baseline, **extra)
            for clipping in ("flat", "dpsgd_f", "individual")
            for schedule in ("constant", "exponential")
            for seed in (0, 1)
        ]
    failed = PublishedTrial(
        "automatic-constant-0",
        {"clipping": "automatic", "schedule": "constant", "seed": 0},
        TrialState.FAILED,
        error="the training worker was lost three times: out of memory <node 10.0.0.7>",
    )
    return PublishedSweep(
        name="quickstart",
        trials=(*trials, failed),
        delta=1e-5,
        disclosure=disclosure,
        created="2026-01-12 14:05 UTC",
        provenance={
            "dpsweep": "0.1.0",
            "python": "3.11.7",
            "torch": "2.11.0",
            "git commit": "1f3c0de",
            "CPU": "2 cores",
        },
    )
