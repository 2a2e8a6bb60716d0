"""Trains what `dpsweep init` drafts for ten tables, beside models without privacy and a tuned script of Opacus.

    python -m benchmarks.drafts [--table NAME] [--rows 20000] [--repeats 5] [--epsilon 3] [--json]

Every draft is taken as it is, but for its seeds and its target; it stores no norms. All models meet the same training
and test rows, and all scores are of the test rows: accuracy, and R² of regressions.

    constant   the most frequent class; R² is 0 then
    linear     scikit-learn's LogisticRegression or Ridge on standardised features, no privacy
    boosting   scikit-learn's HistGradientBoosting, no privacy
    baseline   the drafted setting without privacy, and its share of linear's score; the goal is 0.98 for every table
    private    the drafted DP-SGD at this epsilon, of which its own scaling of the numbers is a part
    model      the model of the private setting: of two that are drafted, the better one, as `dpsweep best` takes it
    opacus     PrivacyEngine at this epsilon on features standardised without noise, the best of nine learning rates and
               bounds by its score on the test rows: a lead that a draft does not have

Scores are means over splits of the rows, each with its own training seed: two splits, or up to five where few rows
are tested. A table is cut to ``--rows``, by default all 200,000. Without Opacus its column notes it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import yaml
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
from dpsweep.workers.trials.trial import run_trial

GOAL: Final = 0.98
_RATES, _BOUNDS = (0.1, 0.5, 2.0), (0.3, 1.0, 3.0)
_EPOCHS: Final = 30
_FEWEST_SPLITS, _TESTED = 2, 500
"""Splits of a table, and rows to test on in all splits together."""


@dataclass(frozen=True)
class Row:
    """Scores of one table, means over the splits. opacus: None if it is not installed. model: of the private score."""

    table: str
    rows: int
    features: int
    splits: int
    constant: float
    linear: float
    boosting: float
    baseline: float
    private: float
    opacus: float | None
    model: str

    @property
    def share(self) -> float:
        return self.baseline / self.linear


def measured(name: str, most_rows: int, repeats: int, epsilon: float) -> Row:
    """Return the scores of the table ``name`` over as many splits as its test rows ask for, at most ``repeats``."""
    with tempfile.TemporaryDirectory() as folder:
        path = TABLES[name](most_rows).write(Path(folder))
        drafted = yaml.safe_load(draft_sweep(path, ["y"], None))
        drafted |= {"clipping": drafted["clipping"][:2], "norms": "off"}
        drafted["privacy"]["target_epsilon"] = epsilon
        scores: list[dict[str, float]] = []
        of_drafted: dict[tuple[bool, str], list[float]] = {}
        of_opacus: list[list[float]] = []
        while True:
            split = len(scores)
            plan = plan_sweep(
                parse_sweep(
                    yaml.safe_dump({**drafted, "seeds": split, "data": {**drafted["data"], "split_seed": split}})
                )
            )
            if plan.refusals:
                raise SystemExit(f"{name}: {plan.refusals}")
            dataset = load_dataset(plan.trials[0].spec.data)
            scores.append({"constant": _constant(dataset), **_without_privacy(dataset)})
            for trial in plan.trials:
                setting = trial.spec.is_private, trial.spec.model.name
                result = run_trial(trial.spec, "-".join([f"{folder}/{split}", *map(str, setting)]))
                of_drafted.setdefault(setting, []).append(result.evaluation.main)
            if installed("opacus"):
                of_opacus.append(list(_of_opacus(dataset, epsilon, plan.trials[0].spec.delta, split)))
            if split + 1 >= min(repeats, max(_FEWEST_SPLITS, math.ceil(_TESTED / len(dataset.test)))):
                break
        means = {name: float(np.mean([each[name] for each in scores])) for name in scores[0]}
        rows, features = len(dataset.train) + len(dataset.test), dataset.feature_shape[0]
        best = float(np.mean(of_opacus, axis=0).max()) if of_opacus else None
        (baseline, _), (private, model) = (
            max(
                (float(np.mean(found)), model) for (is_private, model), found in of_drafted.items() if is_private is own
            )
            for own in (False, True)
        )
        return Row(
            name, rows, features, len(scores), baseline=baseline, private=private, opacus=best, model=model, **means
        )


def _constant(dataset: Dataset) -> float:
    if dataset.task == "regression":
        return 0.0
    return float((dataset.test.labels == dataset.train.labels.mode().values).float().mean())


def _table(split: Split) -> tuple[Any, Any]:
    return split.features.double().numpy(), split.labels.reshape(len(split)).numpy()


def _without_privacy(dataset: Dataset) -> dict[str, float]:
    models = (
        (Ridge(1.0), HistGradientBoostingRegressor(random_state=0))
        if dataset.task == "regression"
        else (LogisticRegression(max_iter=300), HistGradientBoostingClassifier(random_state=0))
    )
    train, test = _table(dataset.train), _table(dataset.test)
    found = [make_pipeline(StandardScaler(), model).fit(*train).score(*test) for model in models]
    return dict(zip(("linear", "boosting"), map(float, found), strict=True))


def _of_opacus(dataset: Dataset, epsilon: float, delta: float, seed: int) -> Iterator[float]:
    """Yield the score of each learning rate and bound."""
    from opacus.accountants.utils import get_noise_multiplier

    scaler = StandardScaler().fit(_table(dataset.train)[0])
    features = [torch.tensor(scaler.transform(_table(each)[0])).float() for each in (dataset.train, dataset.test)]
    batch = max(16, len(dataset.train) // 10)
    rate = 1.0 / math.ceil(len(dataset.train) / batch)
    noise = get_noise_multiplier(
        target_epsilon=epsilon, target_delta=delta, sample_rate=rate, epochs=_EPOCHS, accountant="prv"
    )
    for learning_rate, bound in itertools.product(_RATES, _BOUNDS):
        yield _opacus_score(dataset, features, batch, noise, learning_rate, bound, seed)


class _Rows(torch.utils.data.TensorDataset):
    """Rows that are read a batch at a time: one by one, 160,000 of them would take minutes."""

    def __getitems__(self, places: Sequence[int]) -> list[tuple[Tensor, ...]]:
        return [self[torch.as_tensor(places)]]


def _opacus_score(
    dataset: Dataset, features: Sequence[Tensor], batch: int, noise: float, rate: float, bound: float, seed: int
) -> float:
    from opacus import PrivacyEngine

    torch.manual_seed(seed)
    labels = dataset.train.labels
    is_regression = dataset.task == "regression"
    model = nn.Linear(features[0].shape[1], 1 if is_regression else dataset.num_classes)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    loader = torch.utils.data.DataLoader(_Rows(features[0], labels), batch, collate_fn=itemgetter(0))
    private, dp_optimizer, batches = PrivacyEngine().make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=noise, max_grad_norm=bound
    )
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
    """Yield the table as it is printed, and how many tables reach each goal."""
    names = "".join(f"{name:>10}" for name in COLUMNS)
    yield f"{'table':14}{'rows':>8}{'features':>9}{'splits':>7}{names}  model"
    for row in rows:
        values: Mapping[str, float | None] = {**asdict(row), "share": row.share}
        shown = (f"{'absent' if (value := values[name]) is None else f'{value:.4f}':>10}" for name in COLUMNS)
        yield f"{row.table:14}{row.rows:8,}{row.features:9,}{row.splits:7}{''.join(shown)}  {row.model}"
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
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(arguments)
    if asked.repeats < 1 or asked.rows < 1_000 or not 0.0 < asked.epsilon < math.inf:
        parser.error("--repeats must be at least 1, --rows at least 1000, --epsilon above 0")
    found = []
    for name in asked.table or TABLES:
        found.append(measured(name, asked.rows, asked.repeats, asked.epsilon))
        if not asked.json:
            print(list(lines(found[-1:]))[1], flush=True)
    print(json.dumps([asdict(row) for row in found], indent=1) if asked.json else "\n".join(lines(found)))


if __name__ == "__main__":
    main()
