"""Let a study of Optuna choose learning rate and bound, and say what all its runs cost together.

A sweep's own section `tune` does this with fewer words, and by private selection at a lower cost.
"""

import sys
from pathlib import Path

import optuna

import dpsweep
from dpsweep.accounting import account_together
from dpsweep.parts import Clipping, Optimizer

DELTA = 1e-5


def main(folder: str, candidates: int = 3) -> None:
    traces = []

    def objective(trial: optuna.Trial) -> float:
        sweep = dpsweep.Sweep(
            name=f"candidate-{trial.number}",
            data="breast_cancer",
            model="logistic",
            sampling={"method": "poisson", "batch_size": 64},
            epochs=3,
            clipping=Clipping.flat(bound=trial.suggest_float("bound", 0.1, 2.0, log=True)),
            optimizer=Optimizer.sgd(learning_rate=trial.suggest_float("learning_rate", 0.1, 4.0, log=True)),
            privacy={"target_epsilon": 1.0, "delta": DELTA},
            noise_source="os_entropy_secure",
        )
        done = dpsweep.run(sweep, output=Path(folder, sweep["name"]), address="in-process", tracking_uri="none")
        (trained,) = done.trials.values()
        assert trained.result is not None, trained.error
        traces.append(trained.trace)
        return trained.result.evaluation.accuracy

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0))
    study.optimize(objective, n_trials=candidates)
    found = study.best_trial
    print(f"best of {candidates}: accuracy {found.value:.3f} with {found.params}")
    together = account_together(traces, DELTA)
    print(f"all of them saw the data: epsilon {together.epsilon:.2f} together ({together.kind}), 1.00 each")


if __name__ == "__main__":
    main(sys.argv[1])
