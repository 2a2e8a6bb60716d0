"""Trains what `dpsweep init` drafts for ten tables, beside models without privacy and a tuned script of Opacus.

    python -m benchmarks.drafts [--table NAME] [--rows 20000] [--seeds 1] [--epsilon 3] [--json]

Every draft is taken as it is, but for its seeds and its target. All models meet the same training and test rows, and
all scores are of the test rows: accuracy, and R² of regressions.

    constant   the most frequent class; R² is 0 then
    linear     scikit-learn's LogisticRegression or Ridge on standardised features, no privacy
    boosting   scikit-learn's HistGradientBoosting, no privacy
    baseline   the drafted setting without privacy, and its share of linear's score; the goal is 0.98 for every table
    private    the drafted DP-SGD at this epsilon, of which its own scaling of the numbers is a part
    opacus     PrivacyEngine at this epsilon on features standardised without noise, the best of nine learning rates and
               bounds by its score on the test rows: a lead that a draft does not have

A table is cut to ``--rows``, by default all 200,000. Without Opacus its column says so.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

from benchmarks.draft_tables import TABLES
from benchmarks.peers import installed
from dpsweep.orchestration.sweeps.draft import draft_sweep
from dpsweep.orchestration.sweeps.plan import plan_sweep
from dpsweep.orchestration.sweeps.schema import parse_sweep
from dpsweep.workers.data import Dataset, Split, load_dataset
from dpsweep.workers.trial import run_trial

GOAL: Final = 0.98
_RATES, _BOUNDS = (0.1, 0.5, 2.0), (0.3, 1.0, 3.0)
_EPOCHS: Final = 30


@dataclass(frozen=True)
class Row:
    """Scores of one table. opacus: None if it is not installed."""

    table: str
    rows: int
    features: int
    constant: float
    linear: float
    boosting: float
    baseline: float
    private: float
    opacus: float | None

    @property
    def share(self) -> float:
        return self.baseline / self.linear


def measured(name: str, most_rows: int, seeds: int, epsilon: float) -> Row:
    """Return the scores of the table ``name``; those of drafts and Opacus are means over the seeds."""
    with tempfile.TemporaryDirectory() as folder:
        path = TABLES[name](most_rows).write(Path(folder))
        drafted = parse_sweep(draft_sweep(path, ["y"], None))
        privacy = replace_in(drafted.privacy, target_epsilon=(epsilon,))
        plan = plan_sweep(
            replace_in(drafted, seeds=tuple(range(seeds)), privacy=privacy, clipping=drafted.clipping[:2])
        )
        if plan.refusals:
            raise SystemExit(f"{name}: {plan.refusals}")
        scores: dict[bool, list[float]] = {False: [], True: []}
        for place, trial in enumerate(plan.trials):
            result = run_trial(trial.spec, f"{folder}/{place}")
            scores[trial.spec.is_private].append(result.evaluation.main)
        dataset = load_dataset(plan.trials[0].spec.data)
        linear, boosting = _without_privacy(dataset)
        return Row(
            name,
            len(dataset.train) + len(dataset.test),
            dataset.feature_shape[0],
            _constant(dataset),
            linear,
            boosting,
            float(np.mean(scores[False])),
            float(np.mean(scores[True])),
            _of_opacus(dataset, epsilon, plan.trials[0].spec.delta, seeds) if installed("opacus") else None,
        )


def replace_in(section: Any, **values: Any) -> Any:
    """Return a section of a sweep with other values."""
    return section.model_copy(update=values)


def _constant(dataset: Dataset) -> float:
    if dataset.task == "regression":
        return 0.0
    return float((dataset.test.labels == dataset.train.labels.mode().values).float().mean())


def _table(split: Split) -> tuple[Any, Any]:
    return split.features.double().numpy(), split.labels.reshape(len(split)).numpy()


def _without_privacy(dataset: Dataset) -> tuple[float, float]:
    models = (
        (Ridge(1.0), HistGradientBoostingRegressor(random_state=0))
        if dataset.task == "regression"
        else (LogisticRegression(max_iter=300), HistGradientBoostingClassifier(random_state=0))
    )
    linear, boosting = (make_pipeline(StandardScaler(), model) for model in models)
    train, test = _table(dataset.train), _table(dataset.test)
    return float(linear.fit(*train).score(*test)), float(boosting.fit(*train).score(*test))


def _of_opacus(dataset: Dataset, epsilon: float, delta: float, seeds: int) -> float:
    """Return the best mean score over the seeds, of all learning rates and bounds."""
    scaler = StandardScaler().fit(_table(dataset.train)[0])
    features = [torch.tensor(scaler.transform(_table(each)[0])).float() for each in (dataset.train, dataset.test)]
    scores = (
        np.mean([_opacus_score(dataset, features, epsilon, delta, rate, bound, seed) for seed in range(seeds)])
        for rate, bound in itertools.product(_RATES, _BOUNDS)
    )
    return float(max(scores))


def _opacus_score(
    dataset: Dataset, features: Sequence[Tensor], epsilon: float, delta: float, rate: float, bound: float, seed: int
) -> float:
    from opacus import PrivacyEngine

    torch.manual_seed(seed)
    labels = dataset.train.labels
    is_regression = dataset.task == "regression"
    model = nn.Linear(features[0].shape[1], 1 if is_regression else dataset.num_classes)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    rows = torch.utils.data.TensorDataset(features[0], labels)
    loader = torch.utils.data.DataLoader(rows, batch_size=max(16, len(labels) // 10))
    private, dp_optimizer, batches = PrivacyEngine().make_private_with_epsilon(
        module=model, optimizer=optimizer, data_loader=loader, target_epsilon=epsilon, target_delta=delta,
        epochs=_EPOCHS, max_grad_norm=bound,
    )  # fmt: skip
    loss_of = nn.MSELoss() if is_regression else nn.CrossEntropyLoss()
    for _ in range(_EPOCHS):
        for x, y in batches:
            dp_optimizer.zero_grad()
            loss_of(private(x), y).backward()
            dp_optimizer.step()
    with torch.no_grad():
        outputs, truth = model(features[1]), dataset.test.labels
    if not is_regression:
        return float((outputs.argmax(1) == truth).float().mean())
    error, spread = ((outputs - truth) ** 2).sum(), ((truth - truth.mean()) ** 2).sum()
    return float(1.0 - error / spread)


COLUMNS: Final = ("constant", "linear", "boosting", "baseline", "share", "private", "opacus")


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the table as it is printed, and whether the goals are reached."""
    yield f"{'table':14}{'rows':>8}{'features':>9}" + "".join(f"{name:>10}" for name in COLUMNS)
    for row in rows:
        values: Mapping[str, float | None] = {**asdict(row), "share": row.share}
        shown = (f"{'absent' if (value := values[name]) is None else f'{value:.4f}':>10}" for name in COLUMNS)
        yield f"{row.table:14}{row.rows:8,}{row.features:9,}" + "".join(shown)
    reached = sum(row.share >= GOAL for row in rows)
    yield f"baseline at {GOAL} of linear or more: {reached} of {len(rows)} tables"
    beside = [row for row in rows if row.opacus is not None]
    if beside:
        close = sum(row.private >= (row.opacus or 0.0) - 0.01 for row in beside)
        yield f"private within 1 point of tuned Opacus, or better: {close} of {len(beside)} tables"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--table", action="append", choices=tuple(TABLES))
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(arguments)
    if asked.seeds < 1 or asked.rows < 1_000 or not 0.0 < asked.epsilon < math.inf:
        parser.error("--seeds must be at least 1, --rows at least 1000, --epsilon above 0")
    found = []
    for name in asked.table or TABLES:
        found.append(measured(name, asked.rows, asked.seeds, asked.epsilon))
        if not asked.json:
            print(list(lines(found[-1:]))[1], flush=True)
    print(json.dumps([asdict(row) for row in found], indent=1) if asked.json else "\n".join(lines(found)))


if __name__ == "__main__":
    main()
