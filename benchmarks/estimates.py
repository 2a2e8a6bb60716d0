"""How well epsilons of single examples are estimated from norms that are not taken at every step.

    python benchmarks/estimates.py [--quick] [--json] [--case NAME] [--norms VALUE]

Each case is trained once for every value of norms.refreshes_per_epoch, by the same batches and noise, so that the
trials differ in nothing but the norms. Of some random examples the norms are taken at every step as well. Printed are
Pearson's r of their estimated epsilon and that from every step's norms, the mean and the largest difference, and the
CPU seconds of all norms of the trial but those of every step, beside the worst case. Adult, MNIST and CIFAR-10 are read
where `DPSWEEP_DATA` says.
"""

# ruff: noqa: E402

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

sys.path[0] = str(Path(__file__).resolve().parents[1])  # this file's own folder would shadow the package accounting

from accounting.accountants import account
from accounting.jobs import AccountingJob, store_epsilons
from accounting.records import StoredEpsilons, TrialFiles, read_trace
from accounting.summaries import CountedEpsilons, Counting
from orchestration.execution.estimate_quality import quality_of_estimates
from workers.recording import NormRecorder
from workers.spec import Component, DataSpec, NoiseSpec, NormSpec, SamplingSpec, TrialSpec
from workers.trial import run_trial

DELTA = 1e-5
NORMS: Mapping[str, float | str] = {"when_sampled": "when_sampled", "1": 1.0, "3": 3.0}
DIGITS: Sequence[str] = tuple("0123456789")
KINDS: Sequence[str] = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)


@dataclass(frozen=True)
class Case:
    """A trial. tracked: examples with norms of every step. bound: near the norms, or all examples would pay alike.
    rows, few: kept of each of ``classes``, and with --quick.
    """

    name: str
    data: DataSpec
    model: Component
    batch_size: int
    epochs: int
    learning_rate: float
    noise_multiplier: float
    tracked: int
    bound: float
    classes: Sequence[str] = ()
    rows: int | None = None
    few: int | None = None

    def spec(self, norms: float | str, quick: bool) -> TrialSpec:
        kept = self.few if quick else self.rows
        return TrialSpec(
            key=self.name,
            data=self.data if kept is None else replace(self.data, keep=dict.fromkeys(self.classes, kept)),
            model=self.model,
            sampling=SamplingSpec("poisson", self.batch_size),
            clipping=Component("flat", {"bound": self.bound}),
            noise=NoiseSpec(self.noise_multiplier),
            epochs=self.epochs,
            delta=DELTA,
            seed=0,
            optimizer=Component("sgd", {"learning_rate": self.learning_rate}),
            norms=NormSpec(refreshes_per_epoch=norms, exact_examples=min(self.tracked, 200) if quick else self.tracked),
        )


CASES: Mapping[str, Case] = {
    each.name: each
    for each in (
        Case("adult_logistic", DataSpec("adult"), Component("logistic"), 256, 5, 0.5, 1.0, 1000, 1.0),
        Case("mnist_cnn", DataSpec("mnist"), Component("cnn_dpsgdf"), 256, 5, 0.5, 1.0, 300, 1.0, DIGITS, 600, 100),
        Case("cifar_resnet20", DataSpec("cifar10"), Component("resnet20_gn"), 64, 4, 0.02, 1.0, 60, 30.0, KINDS, 32, 8),
    )
}


def measured(case: Case, norms: str, quick: bool) -> dict[str, Any]:
    """One row of the table."""
    taken = 0.0
    original = NormRecorder.measure

    def measure(self: NormRecorder, first: int | None = None) -> Any:
        nonlocal taken
        began = time.process_time()
        found = original(self, first)
        if len(self._rows) > case.tracked:  # not those with norms of every step
            taken += time.process_time() - began
        return found

    with tempfile.TemporaryDirectory() as folder, mock.patch.object(NormRecorder, "measure", measure):
        spec, files = case.spec(NORMS[norms], quick), TrialFiles(folder)
        run_trial(spec, folder)
        trace = read_trace(files.trace)
        worst = account(trace, DELTA, "rdp").epsilon
        job = AccountingJob(files.root, DELTA, "rdp", counting=Counting(worst), folder=files.epsilons)
        found = CountedEpsilons(store_epsilons(job), StoredEpsilons(files.epsilons))
        quality = quality_of_estimates(files, found.parts, trace, worst)
    return {
        "case": case.name,
        "norms": norms,
        "examples": trace.dataset_size,
        "steps": trace.steps,
        "tracked": quality.examples,
        "worst_case": round(worst, 3),
        "r": None if quality.correlation is None else round(quality.correlation, 4),
        "mean_error": round(quality.mean_error, 4),
        "largest_error": round(quality.largest_error, 3),
        "norm_cpu_s": round(taken, 2),
    }


COLUMNS = ("examples", "steps", "tracked", "worst_case", "r", "mean_error", "largest_error", "norm_cpu_s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rows")
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    parser.add_argument("--case", action="append", choices=CASES, help="only this case (may be repeated)")
    parser.add_argument("--norms", action="append", choices=NORMS, help="only this value (may be repeated)")
    options = parser.parse_args()
    if not options.json:
        print(f"{'case':<16}{'norms':<14}" + "".join(f"{column:>14}" for column in COLUMNS))
    for name in options.case or CASES:
        for norms in options.norms or NORMS:
            row = measured(CASES[name], norms, options.quick)
            shown = f"{row['case']:<16}{row['norms']:<14}" + "".join(f"{row[column]!s:>14}" for column in COLUMNS)
            print(json.dumps(row) if options.json else shown, flush=True)


if __name__ == "__main__":
    main()
