"""`dpsweep predict` and `Trial.predict_table`: from a sweep on a table of one's own to classes of new rows."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import dpsweep
from dpsweep.accounting.errors import InvalidInput
from tests.orchestration.invoking import printed

AGES = np.random.default_rng(0).integers(18, 80, 200)
PEOPLE = pd.DataFrame({"age": AGES, "job": np.where(AGES % 2, "smith", "baker"), "late": np.where(AGES > 50, -1, 1)})


def test_a_trial_of_a_table_names_classes_of_new_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    stored = dpsweep.run(
        {
            "name": "people",
            "data": {
                "frame": PEOPLE,
                "label": "late",
                "ranges": {"age": [0, 100]},
                "categories": {"job": ["baker", "smith"]},
                "classes": [-1, 1],
            },
            "model": "logistic",
            "optimizer": {"name": "sgd", "learning_rate": 2.0},
            "sampling": {"method": "poisson", "batch_size": 50},
            "epochs": 5,
            "clipping": "flat",
            "privacy": {"noise_multiplier": 0.5, "delta": 1e-4, "accountant": "rdp"},
            "norms": "off",
        },
        address="in-process",
        tracking_uri="none",
    )
    ((key, trial),) = stored.trials.items()
    new = pd.DataFrame({"job": ["smith", "pilot", None], "age": [20, 79, 33]})
    with pytest.warns(UserWarning, match="row") as told:
        found = trial.predict_table(new)
    assert [str(each.message).partition(":")[0] for each in told] == ["1 of 3 rows have no prediction", "job"]
    assert told[0].filename == __file__
    assert found["prediction"].tolist()[:2] == ["1", "-1"]
    assert found["prediction"].isna().tolist() == [False, False, True]
    new.to_csv("new.csv", index=False)
    folder = f"runs/people/trials/{key}"
    for place in (folder, f"{folder}/model.pt"):
        assert printed("predict", place, "new.csv", "--to", "found.csv") == "found.csv: 3 rows\n"
    assert stat.S_IMODE(os.stat("found.csv").st_mode) == 0o600
    assert Path("found.csv").read_text().endswith("\n,,\n")
    written = pd.read_csv("found.csv")
    assert list(written) == ["prediction", "probability of -1", "probability of 1"]
    assert written["prediction"].tolist()[:2] == [1, -1]
    assert written["probability of 1"].tolist() == pytest.approx(found["probability of 1"].tolist(), nan_ok=True)
    with pytest.raises(InvalidInput, match="is no finished trial; give the folder of one, below trials/ of its sweep"):
        printed("predict", "runs/people", "new.csv", "--to", "found.csv")
