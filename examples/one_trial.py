"""Train and account one trial in this process, without Ray or MLflow, and compute individual epsilons."""

import sys

import numpy as np

from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.individual.epsilons import individual_epsilons
from dpsweep.accounting.records.shards import NormShards
from dpsweep.accounting.records.traces import read_trace
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.workers.spec import Component, DataSpec, NoiseSpec, SamplingSpec, TrialSpec
from dpsweep.workers.trials.trained_model import load_trained
from dpsweep.workers.trials.trial import run_trial


def main(folder: str) -> None:
    spec = TrialSpec(
        key="tumours",
        data=DataSpec("breast_cancer"),
        model=Component("logistic"),
        sampling=SamplingSpec("poisson", batch_size=64),
        clipping=Component("flat", {"bound": 1.0}),
        noise=NoiseSpec(2.0),
        epochs=3,
        delta=1e-5,
        seed=0,
    )
    result = run_trial(spec, folder)  # a second call resumes, or returns the stored result
    files = TrialFiles(folder)
    trace = read_trace(files.trace)
    worst = account(trace, spec.delta)
    print(f"accuracy {result.evaluation.accuracy:.3f}; worst case: epsilon {worst.epsilon:.3f} by {worst.accountant}")
    norms = NormShards(files.norms).read(0)  # private data; the first part, at most 65,536 examples
    epsilons = individual_epsilons(norms.steps, norms.contributions, trace, spec.delta, "pld")
    print(f"{len(epsilons.upper)} examples: median epsilon {np.median(epsilons.upper):.3f}, {epsilons.kind}")
    logits = load_trained(files, spec).logits(np.zeros((2, 30)))
    print(f"logits of two examples: shape {logits.shape}")


if __name__ == "__main__":
    main(sys.argv[1])
