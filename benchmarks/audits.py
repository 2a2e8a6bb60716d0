"""Lower bounds of one-run audits by gradient canaries, as shares of the claimed epsilon, on handwritten digits.

    python -m benchmarks.audits [--seeds 5,6,7] [--canaries 2000]

Rows are the claimed epsilon and the transcript. Columns are the best bound over the claim, by seed, and the accuracy
lost to an undisturbed run of the same seed. The seeds are not those that the audit's choices were made on (0 to 4).
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Final

import dpsweep
from dpsweep.orchestration.records.results import TrialResult

EPSILONS: Final = (1, 2, 4, 8)
TRANSCRIPTS: Final = ("iterates", "last_model")


def sweep(seeds: list[int], audit: dict[str, object] | None) -> dict[str, object]:
    """Return the sweep that docs/accounting.md describes, with or without an audit."""
    audited: dict[str, object] = {} if audit is None else {"audit": audit}
    return {
        "name": "audits",
        "data": "digits",
        "model": {"name": "mlp"},
        "optimizer": {"name": "sgd", "learning_rate": 0.5},
        "sampling": {"method": "poisson", "batch_size": 128},
        "epochs": 20,
        "clipping": {"name": "flat", "bound": 1.0},
        "seeds": seeds,
        "privacy": {"target_epsilon": list(EPSILONS), "delta": 1e-5},
        "norms": "off",
        "release": "raw",
        **audited,
    }


def measured(seeds: list[int], audit: dict[str, object] | None) -> dict[tuple[float, int], tuple[float, float]]:
    """Return the best bound, 0 without an audit, and the test accuracy, by claimed epsilon and seed."""
    with tempfile.TemporaryDirectory() as folder:
        done = dpsweep.run(sweep(seeds, audit), output=Path(folder) / "out", address="in-process", tracking_uri="none")
        found: dict[tuple[float, int], tuple[float, float]] = {}
        for trial in done.trials.values():
            assert isinstance(trial.result, TrialResult), f"{trial.key}: {trial.error}"
            shown = trial.result.attacks.audit
            bound = 0.0 if shown is None else shown.everyone.epsilon
            accuracy = trial.result.training.evaluation.accuracy
            assert accuracy is not None
            found[round(trial.result.worst_case.epsilon), trial.spec.seed] = (bound, accuracy)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="5,6,7", help="seeds of training, with commas")
    parser.add_argument("--canaries", type=int, default=2000)
    asked = parser.parse_args()
    seeds = [int(each) for each in asked.seeds.split(",")]
    undisturbed = measured(seeds, None)
    print("| claimed epsilon | transcript | best bound over the claim | accuracy lost, points |\n|---|---|---|---|")
    for transcript in TRANSCRIPTS:
        found = measured(seeds, {"canaries": asked.canaries, "kind": "gradient", "transcript": transcript})
        for epsilon in EPSILONS:
            shares = ", ".join(f"{found[epsilon, seed][0] / epsilon:.2f}" for seed in seeds)
            lost = ", ".join(f"{100 * (undisturbed[epsilon, seed][1] - found[epsilon, seed][1]):.1f}" for seed in seeds)
            print(f"| {epsilon} | `{transcript}` | {shares} | {lost} |")


if __name__ == "__main__":
    main()
