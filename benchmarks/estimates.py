"""Error of per-example epsilons that are estimated from norms not measured at every step.

    python benchmarks/estimates.py [--quick] [--json] [--case NAME] [--norms VALUE]

Each case is trained once for every value of norms.refreshes_per_epoch, with the same batches and noise. The norms of
some random examples are measured at every step as well. Printed for these are Pearson's r of the estimated epsilon and
the epsilon from every step's norms, and the mean and the largest difference. Further: the worst case, and the CPU
seconds of all norms of the trial, without the norms of every step. Adult, MNIST and CIFAR-10 are read where
`DPSWEEP_DATA` says.
"""

# ruff: noqa: E402

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

sys.path[0] = str(Path(__file__).resolve().parents[1])  # so that `benchmarks` is found wherever it starts

from benchmarks.cases import DELTA, DIGITS, KINDS, Case
from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.jobs.examples import AccountingJob, store_epsilons
from dpsweep.accounting.jobs.summaries import CountedEpsilons, Counting
from dpsweep.accounting.records.epsilon_files import StoredEpsilons
from dpsweep.accounting.records.traces import read_trace
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.orchestration.execution.completion import quality_of_estimates
from dpsweep.workers.spec import Component, DataSpec, Refreshes
from dpsweep.workers.training.norm_recorder import NormRecorder
from dpsweep.workers.trials.trial import run_trial

NORMS: Mapping[str, Refreshes] = {"when_sampled": "when_sampled", "1": 1.0, "3": 3.0}
CASES: Mapping[str, Case] = {  # bounds near the norms, or all examples would have the same epsilon
    each.name: each
    for each in (
        Case("adult_logistic", DataSpec("adult"), Component("logistic"), 256, 5, 0.5, tracked=1000),
        Case("adult_dpsgd_f", DataSpec("adult"), Component("logistic"), 256, 5, 0.5, tracked=1000, clipping="dpsgd_f"),
        Case(
            "mnist_cnn", DataSpec("mnist"), Component("cnn_dpsgdf"), 256, 5, 0.5, classes=DIGITS, rows=600, few=100,
            tracked=300,
        ),
        Case("adult_long", DataSpec("adult"), Component("logistic"), 256, 20, 0.5, tracked=1000),
        Case(
            "mnist_long", DataSpec("mnist"), Component("cnn_dpsgdf"), 256, 20, 0.5, classes=DIGITS, rows=600, few=100,
            tracked=300,
        ),
        Case(
            "cifar_resnet20", DataSpec("cifar10"), Component("resnet20_gn"), 64, 4, 0.02, bound=30.0, classes=KINDS,
            rows=32, few=8, tracked=60,
        ),
    )
}  # fmt: skip


def measured(case: Case, norms: str) -> dict[str, Any]:
    """Return one row of the table."""
    taken = 0.0

    def timed(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: NormRecorder, *values: Any) -> Any:
            nonlocal taken
            began = time.process_time()
            found = original(self, *values)
            if len(self._rows) > case.tracked:  # leaves out the norms measured at every step
                taken += time.process_time() - began
            return found

        return call

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(NormRecorder, "measure", timed(NormRecorder.measure)),
        mock.patch.object(NormRecorder, "renew_as_old_as", timed(NormRecorder.renew_as_old_as)),
    ):
        spec, files = case.spec(NORMS[norms]), TrialFiles(folder)
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
            row = measured(CASES[name].shortened() if options.quick else CASES[name], norms)
            shown = f"{row['case']:<16}{row['norms']:<14}" + "".join(f"{row[column]!s:>14}" for column in COLUMNS)
            print(json.dumps(row) if options.json else shown, flush=True)


if __name__ == "__main__":
    main()
