"""What a trial stores of its test examples, and what is counted from it."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from sklearn.metrics import confusion_matrix, log_loss

from dpsweep.accounting.errors import DataCorruption
from dpsweep.accounting.records.arrow_tables import encode_table, read_table
from dpsweep.accounting.records.files import read_bytes
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.workers.data import load_dataset
from dpsweep.workers.evaluation.outcomes import Outcomes, read_outcomes, write_outcomes
from dpsweep.workers.evaluation.rates import confusion_counts
from dpsweep.workers.trials.trained_model import load_trained
from dpsweep.workers.trials.trial import run_trial
from tests.accounting.records.test_arrow_tables import of_no_bytes
from tests.known import known
from tests.workers.trial_specs import small_trial


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrialFiles:
    root = str(tmp_path_factory.mktemp("trial"))
    run_trial(small_trial(epochs=1), root)
    return TrialFiles(root)


def stored(files: TrialFiles) -> Outcomes:
    found = read_outcomes(files.outcomes)
    assert isinstance(found, Outcomes)
    return found


def test_they_are_what_the_stored_model_predicts(trained: TrialFiles) -> None:
    spec, found = small_trial(epochs=1), stored(trained)
    test = load_dataset(spec.data).test
    logits = load_trained(trained, spec).logits(test.features).astype(np.float64)
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    np.testing.assert_array_equal(found.predicted, logits.argmax(1))
    np.testing.assert_array_equal(found.example_ids, test.example_ids.numpy())
    np.testing.assert_array_equal(found.labels, test.labels.numpy())
    np.testing.assert_array_equal(found.groups, test.groups.numpy())
    np.testing.assert_allclose(found.confidences, probabilities.max(1), rtol=1e-5)
    assert found.log_losses.mean() == pytest.approx(log_loss(test.labels.numpy(), probabilities), rel=1e-5)


def test_the_owner_of_each_example_is_kept_and_private(trained: TrialFiles, tmp_path: Path) -> None:
    """Rows of one user are resampled together."""
    found = stored(trained)
    assert found.users is None, "the data name none"
    owned = replace(found, users=np.arange(len(found.labels), dtype=np.int64) // 3 + 10**12)
    uri = str(tmp_path / "outcomes.ipc")
    write_outcomes(uri, owned)
    again = read_outcomes(uri)
    assert isinstance(again, Outcomes)
    np.testing.assert_array_equal(known(again.users), owned.users)
    assert stat.S_IMODE(Path(uri).stat().st_mode) == 0o600
    assert again.test_set == found.test_set, "the same test examples, known by their users or not"


def test_the_evaluation_counts_them(trained: TrialFiles) -> None:
    evaluation, found = run_trial(small_trial(epochs=1), trained.root).evaluation, stored(trained)
    assert evaluation.counts is not None
    expected = confusion_matrix(found.labels, found.predicted, labels=range(found.num_classes))
    np.testing.assert_array_equal(evaluation.counts.matrix, expected)
    assert evaluation.counts.log_loss == pytest.approx(found.log_losses.mean(), rel=1e-6)
    shape = len(found.group_names), found.num_classes
    by_group = confusion_counts(found.labels, found.predicted, found.groups, shape)
    for group in evaluation.groups:
        np.testing.assert_array_equal(known(group.counts).matrix, by_group[found.group_names.index(group.name)])


def test_only_their_owner_can_read_them(trained: TrialFiles) -> None:
    assert stat.S_IMODE(Path(trained.outcomes).stat().st_mode) == 0o600
    assert Path(trained.outcomes).parent == Path(trained.private)


def test_equal_test_sets_have_equal_digests(trained: TrialFiles) -> None:
    found = stored(trained)
    assert found.test_set == replace(found, predicted=1 - found.predicted).test_set
    assert found.test_set != replace(found, example_ids=found.example_ids + 1).test_set
    assert found.test_set != replace(found, groups=1 - found.groups).test_set


def test_older_trials_have_none_and_damage_is_told(trained: TrialFiles, tmp_path: Path) -> None:
    assert read_outcomes(str(tmp_path / "none.ipc")) is None
    copy = str(tmp_path / "copy.ipc")
    write_outcomes(copy, stored(trained))
    assert read_bytes(copy) == read_bytes(trained.outcomes)
    Path(copy).write_bytes(read_bytes(copy)[: len(read_bytes(copy)) // 2])
    with pytest.raises(DataCorruption, match="damaged"):
        read_outcomes(copy)


@pytest.mark.parametrize(
    ("facts", "columns"),
    [
        ({"groups": "5"}, {}),
        ({"groups": '["a"]'}, {}),
        ({"classes": "1"}, {}),
        ({"task": "multi_label", "labels": ""}, {"kept_0": 1}),
        ({}, {"label": -1}),
        ({}, {"predicted": 2**30}),
        ({}, {"group": 2**30}),
    ],
    ids=str,
)
def test_what_no_evaluation_stores_is_damage(
    trained: TrialFiles, tmp_path: Path, facts: dict[str, str], columns: dict[str, int]
) -> None:
    table, told = read_table(read_bytes(trained.outcomes)), {name.encode(): value for name, value in facts.items()}
    for name, value in columns.items():
        kept = table.drop_columns([name]) if name in table.column_names else table
        table = kept.append_column(name, pa.array([value] * table.num_rows, pa.int32()))
    (tmp_path / "forged.ipc").write_bytes(
        encode_table(table.replace_schema_metadata(known(table.schema.metadata) | told))
    )
    with pytest.raises(DataCorruption, match="damaged"):
        read_outcomes(str(tmp_path / "forged.ipc"))


def test_predictions_that_take_no_bytes_fill_no_memory(tmp_path: Path) -> None:
    columns = ("example_id", "label", "group", "predicted", "log_loss", "confidence")
    (tmp_path / "forged.ipc").write_bytes(of_no_bytes(columns, {"groups": "[]", "classes": "2"}))
    with pytest.raises(DataCorruption, match="damaged"):
        read_outcomes(str(tmp_path / "forged.ipc"))
