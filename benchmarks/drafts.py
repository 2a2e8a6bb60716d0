"""Trains what `dpsweep init` drafts for ten tables, beside models without privacy and a tuned script of Opacus.

    python -m benchmarks.drafts [--table NAME] [--rows 20000] [--repeats 5] [--epsilon 3] [--json]

Every draft is taken as it is, but for its seeds and its target; it stores no norms. All models meet the same training
and test rows, and all scores are of the test rows: accuracy, and R² of regressions. A model that never names a rare
class has a high accuracy; so the balanced one, a mean over classes, is printed beside it.

    constant   the most frequent class; R² is 0 then
    linear     scikit-learn's LogisticRegression or Ridge on standardised features, no privacy
    boosting   scikit-learn's HistGradientBoosting, no privacy
    baseline   the drafted setting without privacy, and its share of linear's score; the goal is 0.98 for every table
    private    the drafted DP-SGD at this epsilon, which pays for its own scaling of the numbers
    model      the model of the private setting: of two that are drafted, the better one, as `dpsweep best` takes it
    opacus     PrivacyEngine at this epsilon on features standardised without noise, the best of nine learning rates and
               bounds by its score on the test rows: a lead that a draft does not have

Scores are means over splits of the rows, each with its own training seed: two splits, or up to five where few rows
are tested. A table is cut to ``--rows``, by default all 200,000. Without Opacus its column notes it. Each table is
printed when it is finished, with ``--json`` as an object on a line of its own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import yaml
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import r2_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

from benchmarks.draft_tables import TABLES
from benchmarks.peers import installed
from dpsweep.orchestration.sweeps.draft import draft_sweep
from dpsweep.orchestration.sweeps.plan import plan_sweep
from dpsweep.orchestration.sweeps.schema import parse_sweep
from dpsweep.workers.data import Dataset, Split, load_dataset
from dpsweep.workers.evaluation.rates import accuracy, balanced_accuracy, confusion_counts
from dpsweep.workers.evaluation.scores import Evaluation
from dpsweep.workers.trials.trial import run_trial

GOAL: Final = 0.98
_RATES, _BOUNDS = (0.1, 0.5, 2.0), (0.3, 1.0, 3.0)
_EPOCHS: Final = 30
_FEWEST_SPLITS, _TESTED = 2, 500
"""Splits of a table, and rows to test on in all splits together."""


class Score(NamedTuple):
    """Accuracy or R² of one model, and its balanced accuracy, NaN for a regression."""

    main: float
    balanced: float

    @classmethod
    def mean(cls, scores: Sequence[Score]) -> Score:
        return cls(*map(float, np.mean(scores, axis=0)))

    @classmethod
    def of_predictions(cls, dataset: Dataset, predicted: npt.NDArray[Any]) -> Score:
        truth = dataset.test.labels.reshape(len(dataset.test)).numpy()
        if dataset.task == "regression":
            return cls(float(r2_score(truth, predicted)), math.nan)
        counts = confusion_counts(truth, predicted, np.zeros_like(truth), (1, dataset.num_classes))[0].astype(float)
        return cls(float(accuracy(counts)), float(balanced_accuracy(counts)))

    @classmethod
    def of_trial(cls, evaluation: Evaluation) -> Score:
        counts = evaluation.counts
        return cls(evaluation.main, math.nan if counts is None else float(balanced_accuracy(counts.matrix)))


@dataclass(frozen=True)
class Row:
    """Scores of one table, means over the splits. opacus: None if it is not installed. model: of the private score.
    balanced: balanced accuracies by model, none for a regression."""

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
    balanced: Mapping[str, float]

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
        scores: dict[str, list[Score]] = {}
        of_drafted: dict[tuple[bool, str], list[Score]] = {}
        of_opacus: list[list[Score]] = []
        constant: list[float] = []
        while True:
            split = len(constant)
            plan = plan_sweep(
                parse_sweep(
                    yaml.safe_dump({**drafted, "seeds": split, "data": {**drafted["data"], "split_seed": split}})
                )
            )
            if plan.refusals:
                raise SystemExit(f"{name}: {plan.refusals}")
            dataset = load_dataset(plan.trials[0].spec.data)
            constant.append(_constant(dataset))
            for of, score in _without_privacy(dataset):
                scores.setdefault(of, []).append(score)
            for trial in plan.trials:
                setting = trial.spec.is_private, trial.spec.model.name
                result = run_trial(trial.spec, "-".join([f"{folder}/{split}", *map(str, setting)]))
                of_drafted.setdefault(setting, []).append(Score.of_trial(result.evaluation))
            if installed("opacus"):
                of_opacus.append(list(_of_opacus(dataset, epsilon, plan.trials[0].spec.delta, split)))
            if split + 1 >= min(repeats, max(_FEWEST_SPLITS, math.ceil(_TESTED / len(dataset.test)))):
                break
        means = {of: Score.mean(each) for of, each in scores.items()}
        of_settings = {setting: Score.mean(each) for setting, each in of_drafted.items()}
        best = {
            own: max((s for s in of_settings if s[0] is own), key=lambda s: of_settings[s].main)
            for own in (False, True)
        }
        means |= {"baseline": of_settings[best[False]], "private": of_settings[best[True]]}
        if of_opacus:
            means["opacus"] = max(map(Score.mean, zip(*of_opacus, strict=True)), key=attrgetter("main"))
        return Row(
            name,
            len(dataset.train) + len(dataset.test),
            dataset.feature_shape[0],
            len(constant),
            float(np.mean(constant)),
            means["linear"].main,
            means["boosting"].main,
            means["baseline"].main,
            means["private"].main,
            means["opacus"].main if of_opacus else None,
            best[True][1],
            {of: score.balanced for of, score in means.items() if not math.isnan(score.balanced)},
        )


def _constant(dataset: Dataset) -> float:
    if dataset.task == "regression":
        return 0.0
    return float((dataset.test.labels == dataset.train.labels.mode().values).float().mean())


def _table(split: Split) -> tuple[Any, Any]:
    return split.features.double().numpy(), split.labels.reshape(len(split)).numpy()


def _without_privacy(dataset: Dataset) -> Iterator[tuple[str, Score]]:
    models = (
        (Ridge(1.0), HistGradientBoostingRegressor(random_state=0))
        if dataset.task == "regression"
        else (LogisticRegression(max_iter=300), HistGradientBoostingClassifier(random_state=0))
    )
    train, (features, _) = _table(dataset.train), _table(dataset.test)
    for name, model in zip(("linear", "boosting"), models, strict=True):
        yield name, Score.of_predictions(dataset, make_pipeline(StandardScaler(), model).fit(*train).predict(features))


def _of_opacus(dataset: Dataset, epsilon: float, delta: float, seed: int) -> Iterator[Score]:
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
) -> Score:
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
        outputs = model(features[1])
    return Score.of_predictions(dataset, (outputs[:, 0] if is_regression else outputs.argmax(1)).numpy())


COLUMNS: Final = ("constant", "linear", "boosting", "baseline", "share", "private", "opacus")


BALANCED: Final = ("linear", "baseline", "private", "opacus")


def header() -> str:
    """Return the names of the columns."""
    names = "".join(f"{name:>10}" for name in COLUMNS)
    return f"{'table':14}{'rows':>8}{'features':>9}{'splits':>7}{names}  {'model':9} balanced: {', '.join(BALANCED)}"


def line(row: Row) -> str:
    """Return the row as it is printed."""
    values: Mapping[str, float | None] = {**asdict(row), "share": row.share}
    shown = (f"{'absent' if (value := values[name]) is None else f'{value:.4f}':>10}" for name in COLUMNS)
    balanced = "".join(f"{row.balanced[name]:>8.4f}" for name in BALANCED if name in row.balanced)
    return f"{row.table:14}{row.rows:8,}{row.features:9,}{row.splits:7}{''.join(shown)}  {row.model:9}{balanced}"


def reached(rows: Sequence[Row]) -> Iterator[str]:
    """Yield how many tables reach each goal."""
    enough = sum(row.share >= GOAL for row in rows)
    yield f"baseline at {GOAL} of linear or more: {enough} of {len(rows)} tables"
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
    if not asked.json:
        print(header())
    found = []
    for name in asked.table or TABLES:
        found.append(measured(name, asked.rows, asked.repeats, asked.epsilon))
        print(json.dumps(asdict(found[-1])) if asked.json else line(found[-1]), flush=True)
    if not asked.json:
        print("\n".join(reached(found)))


if __name__ == "__main__":
    main()
