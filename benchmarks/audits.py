"""Lower bounds of one-run audits by gradient canaries, as shares of the claimed epsilon.

    python -m benchmarks.audits [--data digits] [--kinds poisson,fixed] [--claims 1,2] [--seeds 5,6,7] [--canaries 2000]
        [--transcripts iterates,last_model]

Rows are mechanisms and the transcript. Columns are the best bound over each claim, by seed, and after "of" the mean
of simulated audits (`dpsweep plan`). Accuracy lost and CPU time follow, both against an undisturbed run of the same
seed, as means over claims and seeds. The seeds are not those that the audit's choices were made on (0 to 4).
All runs of a seed draw the same noise, coins and batches: they share their luck, whatever the claim or the mechanism.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

import dpsweep
from dpsweep.accounting.records.traces import read_trace
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.store.results import TrialResult
from dpsweep.workers.data.bundled import digits
from dpsweep.workers.data.cifar import CLASSES, cifar10
from dpsweep.workers.evaluation.attack_results import read_attacks
from dpsweep.workers.training.audit_prospects import simulated

TRANSCRIPTS: Final = ("iterates", "last_model")

POISSON: Final = {"method": "poisson", "batch_size": 128}
KINDS: Final[Mapping[str, Mapping[str, Any]]] = {
    "poisson": {},
    "fixed": {"sampling": {**POISSON, "method": "fixed"}},
    "shuffle": {"sampling": {**POISSON, "method": "shuffle"}},
    "random allocation": {"sampling": {**POISSON, "method": "random_allocation"}},
    "banded": {
        "sampling": {**POISSON, "method": "cyclic_poisson", "cycle_length": 4},
        "noise": {"name": "banded", "bands": 4},
    },
    "dpsgd_f": {"clipping": {"name": "dpsgd_f", "bound": 1.0}},
    "filter": {"clipping": {"name": "filter", "bound": 1.0}, "norms": {"refreshes_per_epoch": 1}},
    "rows of users": {"of_users": "els"},
    "users": {"of_users": "uls", "sampling": {**POISSON, "batch_size": 64}},
}
DATA: Final[Mapping[str, Mapping[str, Any]]] = {
    "digits": {"model": {"name": "mlp"}, "optimizer": {"name": "sgd", "learning_rate": 0.5}, "epochs": 20},
    "cifar10": {
        "data": {"name": "cifar10", "keep": dict.fromkeys(CLASSES, 200)},
        "model": {"name": "cnn_papernot"},
        "optimizer": {"name": "sgd", "learning_rate": 0.5},
        "epochs": 5,
    },
}


def users_of(data: str) -> dict[str, Any]:
    """Return digits, or 2,500 pictures of CIFAR-10, as the rows of users with two each."""
    source = digits() if data == "digits" else cifar10()
    split = source.train if data == "digits" else source.train.select(np.arange(2500))
    return {
        "features": source.preparation(split.features),
        "labels": split.labels,
        "groups": split.labels,
        "users": np.arange(len(split)) // 2,
        "classes": list(range(10)),
        "group_names": [str(label) for label in range(10)],
        "test_fraction": 0.2,
    }


def sweep(
    data: str, kind: str, claims: list[float], seeds: list[int], audit: dict[str, object] | None
) -> dict[str, object]:
    """Return the sweep of a kind of mechanism, with or without an audit."""
    of_kind = dict(KINDS[kind])
    privacy: dict[str, object] = {"target_epsilon": claims, "delta": 1e-5}
    of_data: dict[str, object] = {"data": "digits", **DATA[data]}
    if way := of_kind.pop("of_users", None):
        of_data["data"] = users_of(data)
        privacy |= {"unit": "user", "user_sampling": way, "max_records_per_user": 2}
    return {
        "name": "audits",
        "sampling": POISSON,
        "clipping": {"name": "flat", "bound": 1.0},
        "seeds": seeds,
        "privacy": privacy,
        "norms": "off",
        **of_data,
        **of_kind,
        **({} if audit is None else {"audit": audit}),
    }


@dataclass(frozen=True)
class Measured:
    """`bounds`: best one over the claim, by claim and seed; 0 without an audit.
    `ceilings`: mean of simulated ones, by claim.
    `accuracy`: mean.
    `seconds`: of CPU, of the runs.
    """

    bounds: dict[tuple[float, int], float]
    ceilings: dict[float, float]
    accuracy: float
    seconds: float


def measured(data: str, kind: str, claims: list[float], seeds: list[int], audit: dict[str, object] | None) -> Measured:
    """Return what the sweep of a kind has found."""
    begun = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        asked = sweep(data, kind, claims, seeds, audit)
        done = dpsweep.run(asked, output=Path(folder) / "out", address="in-process", tracking_uri="none")
        seconds = time.process_time() - begun
        bounds, ceilings, accuracies = dict[tuple[float, int], float](), dict[float, float](), list[float]()
        for trial in done.trials.values():
            assert isinstance(trial.result, TrialResult), f"{trial.key}: {trial.error}"
            files = SweepFiles(done.folder).trial(trial.key)
            stored = read_attacks(files.attacks)  # users have no release: raw
            claim = trial.result.worst_case.epsilon
            assert claim is not None
            accuracy = trial.result.training.evaluation.accuracy
            assert accuracy is not None
            bounds[round(claim), trial.spec.seed] = (
                0.0 if stored.audit is None else stored.audit.everyone.epsilon / claim
            )
            accuracies.append(accuracy)
            if trial.spec.audit is not None and round(claim) not in ceilings:
                parameters = trial.result.training.parameters
                bounds_of = simulated(trial.spec, trial.spec.audit, read_trace(files.trace), parameters)
                ceilings[round(claim)] = float(np.mean(list(bounds_of(trial.spec.audit.canaries)))) / claim
    return Measured(bounds, ceilings, float(np.mean(accuracies)), seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=DATA, default="digits")
    parser.add_argument("--kinds", default=",".join(KINDS), help="mechanisms, with commas")
    parser.add_argument("--claims", default="1,2,4,8", help="epsilons to train for, with commas")
    parser.add_argument("--seeds", default="5,6,7", help="seeds of training, with commas")
    parser.add_argument("--canaries", type=int, default=2000)
    parser.add_argument("--transcripts", default=",".join(TRANSCRIPTS), help="with commas")
    asked = parser.parse_args()
    seeds = [int(each) for each in asked.seeds.split(",")]
    claims = [float(each) for each in asked.claims.split(",")]
    titles = " | ".join(f"ε = {epsilon:g}" for epsilon in claims)
    print(f"| mechanism | transcript | {titles} | accuracy lost, points | time |")
    print("|---" * (4 + len(claims)) + "|", flush=True)
    for kind in asked.kinds.split(","):
        undisturbed = measured(asked.data, kind, claims, seeds, None)
        for transcript in asked.transcripts.split(","):
            audit = {"canaries": asked.canaries, "kind": "gradient", "transcript": transcript}
            found = measured(asked.data, kind, claims, seeds, audit)
            of_claims = [
                f"{', '.join(f'{found.bounds[each, seed]:.2f}' for seed in seeds)} of {found.ceilings[each]:.2f}"
                for each in claims
            ]
            lost, slower = 100 * (undisturbed.accuracy - found.accuracy), found.seconds / undisturbed.seconds
            print(f"| {kind} | `{transcript}` | {' | '.join(of_claims)} | {lost:.1f} | {slower:.2f} |", flush=True)


if __name__ == "__main__":
    main()
