"""Sources of the user's own: what they may hold, and what is said when they are amiss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.data import Preparation, Source, Tokens, load_dataset, make_split
from dpsweep.workers.spec import DataSpec
from tests.workers.private_details import assert_private
from tests.workers.user_modules import allowed

ROWS = np.random.default_rng(0).random((40, 3), dtype=np.float32)


def own(preparation: Preparation, rows: np.ndarray[Any, Any] = ROWS) -> Source:
    return Source("own", make_split(rows, np.arange(len(rows)) % 2), None, ("a", "b"), ("a", "b"), preparation)


class TestNamesAndNotes:
    SPLIT = make_split(ROWS, np.arange(40) % 2)

    def test_lists_and_a_single_note_become_tuples(self) -> None:
        names: Any = ["a", np.str_("b")]
        notes: Any = "rows of 2024"
        source = Source("own", self.SPLIT, None, names, names, notes=notes)
        assert source.group_names == source.class_names == ("a", "b")
        assert source.notes == ("rows of 2024",)
        assert {type(name) for name in source.group_names} == {str}

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"group_names": (0, 1)}, "group_names of 'own' must be a tuple of strings; put others in quotes"),
            ({"class_names": (False, True)}, "class_names of 'own' must be a tuple of strings; put others in quotes"),
            ({"class_names": "ab"}, "class_names of 'own' must be a tuple of strings"),
            ({"group_names": None}, "group_names of 'own' must be a tuple of strings"),
            ({"notes": (3,)}, "notes of 'own' must be a tuple of strings"),
            ({"notes": None}, "notes of 'own' must be a tuple of strings"),
        ],
    )
    def test_what_is_no_text_is_refused_and_its_values_are_private(self, change: dict[str, Any], message: str) -> None:
        given: dict[str, Any] = {"name": "own", "group_names": ("a", "b"), "class_names": ("a", "b"), **change}
        with pytest.raises(InvalidInput, match=message) as refused:
            Source(train=self.SPLIT, test=None, **given)
        (values,) = change.values()
        assert_private(refused.value, repr(values))

    def test_a_name_that_is_no_text_is_refused(self) -> None:
        name: Any = 3
        with pytest.raises(InvalidInput, match="the name of a source is 3, but must be a string"):
            Source(name, self.SPLIT, None, ("a", "b"), ("a", "b"))


class TestPreparation:
    @pytest.mark.parametrize(
        "preparation",
        [
            lambda features: features * 2,
            lambda features: features - features.mean(1, keepdim=True),
            lambda features: features @ torch.ones(3, 5),
            lambda features: features[:, :, None],
            lambda features: (10 * features).long(),
        ],
    )
    def test_examples_may_be_changed_one_by_one(self, preparation: Preparation) -> None:
        assert own(preparation).preparation is preparation

    def test_features_that_are_not_finite_or_vast_are_no_mixture(self) -> None:
        rows = ROWS.copy()
        rows[::5] = np.array([np.nan, np.inf, 1e30], dtype=np.float32)
        for preparation, features in ((lambda x: x * 2, rows), (Tokens(), np.arange(40)[:, None] + 2**40)):
            assert own(preparation, features).preparation is preparation

    @pytest.mark.parametrize(
        "preparation",
        [
            lambda features: features - features.mean(0),
            lambda features: features / features.abs().amax(0),
            lambda features: torch.cat([features[:, :2], features[:, 2:].flip(0)], dim=1),
            lambda features: features + features.sum() * 1e-3,
            lambda features: features + torch.randn_like(features),
        ],
    )
    def test_mixed_examples_are_refused(self, preparation: Preparation) -> None:
        with pytest.raises(InvalidInput, match="the preparation of 'own' gives an example other features alone than"):
            own(preparation)

    def test_a_mixture_that_only_later_examples_show_is_refused(self) -> None:
        rows = np.repeat(ROWS[:2], 20, axis=0)
        with pytest.raises(InvalidInput, match="neither mix examples nor draw at random"):
            own(lambda features: features - features[0], rows)
        with pytest.raises(InvalidInput, match="neither mix examples nor draw at random"):
            own(lambda features: features - features.roll(1, 0) * (torch.arange(len(features)) > 2)[:, None])

    @pytest.mark.parametrize(
        ("preparation", "message"),
        [
            (lambda features: features.foo(), r"failed with AttributeError in <lambda> \(test_own\.py:\d+\)"),
            (None, "failed with TypeError in "),
            (lambda features: features.numpy(), "returns ndarray, but must return a tensor"),
            (
                lambda features: features.flatten(),
                r"returns shape \(24,\) for a batch of 8, but must return \[8, ...\]",
            ),
            (lambda features: features.sum(), r"returns shape \(\) for a batch of 8"),
            (lambda features: features.squeeze(0), r"returns shape \(3,\) for a batch of 1"),
            (lambda features: features[:, : len(features)], "gives an example other features alone"),
            (lambda features: features.double(), r"returns torch\.float64, but must return float32, or int64 for"),
            (lambda features: features.sub_(0.5), "changes the features that it is given"),
        ],
    )
    def test_what_no_model_can_take_is_refused(self, preparation: Any, message: str) -> None:
        with pytest.raises(InvalidInput, match=f"^the preparation of 'own' {message}"):
            own(preparation)

    def test_what_the_users_own_code_caused_shows_its_line_and_the_reason_is_private(self, tmp_path: Path) -> None:
        (tmp_path / "mine.py").write_text(
            "import numpy as np\nfrom dpsweep.workers.data import Source, make_split\n\ndef load():\n"
            "    rows = make_split(np.eye(4, dtype=np.float32), [0, 1, 0, 1])\n"
            "    return Source('mine', rows, None, ('a', 'b'), ('a', 'b'), lambda x: x - x.mean(0))\n"
        )
        name = f"{tmp_path}/mine.py:load"
        with pytest.raises(InvalidInput) as refused:
            load_dataset(DataSpec(name), allowed(tmp_path / "mine.py"))
        assert str(refused.value) == f"data source '{name}' failed with InvalidInput in load (mine.py:6)"
        assert_private(refused.value, "the preparation of 'mine' gives an example other features alone than beside")
