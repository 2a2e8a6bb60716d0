"""`dpsweep predict` and `Trial.predict_table`: from a sweep on a table of one's own to classes of new rows."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import dpsweep
from dpsweep.accounting.errors import InvalidInput
from tests.orchestration.invoking import printed
from tests.workers.data_folders import make_listed_images, write_picture

AGES = np.random.default_rng(0).integers(18, 80, 200)
PEOPLE = pd.DataFrame({"age": AGES, "job": np.where(AGES % 2, "smith", "baker"), "late": np.where(AGES > 50, -1, 1)})


def trained(name: str, data: dict[str, Any], batch_size: int, epochs: int, noise_multiplier: float) -> dpsweep.Trial:
    """The only trial of a sweep that ran in this process, below runs/NAME."""
    stored = dpsweep.run(
        {
            "name": name,
            "data": data,
            "model": "logistic",
            "optimizer": {"name": "sgd", "learning_rate": 2.0},
            "sampling": {"method": "poisson", "batch_size": batch_size},
            "epochs": epochs,
            "clipping": "flat",
            "privacy": {"noise_multiplier": noise_multiplier, "delta": 1e-4, "accountant": "rdp"},
            "norms": "off",
        },
        address="in-process",
        tracking_uri="none",
    )
    (trial,) = stored.trials.values()
    return trial


def test_a_trial_of_a_table_names_classes_of_new_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trial = trained(
        "people",
        {
            "frame": PEOPLE,
            "label": "late",
            "ranges": {"age": [0, 100]},
            "categories": {"job": ["baker", "smith"]},
            "classes": [-1, 1],
        },
        batch_size=50,
        epochs=5,
        noise_multiplier=0.5,
    )
    new = pd.DataFrame({"job": ["smith", "pilot", None], "age": [20, 79, 33]})
    with pytest.warns(UserWarning, match="row") as told:
        found = trial.predict_table(new)
    assert [str(each.message).partition(":")[0] for each in told] == ["1 of 3 rows have no prediction", "job"]
    assert told[0].filename == __file__
    assert found["prediction"].tolist()[:2] == ["1", "-1"]
    assert found["prediction"].isna().tolist() == [False, False, True]
    new.to_csv("new.csv", index=False)
    folder = f"runs/people/trials/{trial.key}"
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


def test_a_trial_of_listed_pictures_reads_those_of_a_new_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    table = make_listed_images(tmp_path / "seen")
    data = {"name": "image_table", "path": str(table), "image": "file", "label": "y", "size": 6}
    trial = trained("listed", data | {"classes": ["dark", "bright"]}, batch_size=20, epochs=10, noise_multiplier=0.3)
    (tmp_path / "new").mkdir()
    for name, level in (("1.png", 40), ("2.png", 200)):
        write_picture(tmp_path / "new" / name, level)
    new = pd.DataFrame({"size": [1, 2, 3, 4], "file": ["2.png", None, "1.png", "2.png"]})
    new.to_csv("new/table.csv", index=False)
    with pytest.warns(UserWarning, match=r"^1 of 4 rows have no prediction: they name no picture \(file\)$"):
        found = trial.predict_table("new/table.csv")
    assert found["prediction"].fillna("none").tolist() == ["bright", "none", "dark", "bright"]
    printed("predict", f"runs/listed/trials/{trial.key}", "new/table.csv", "--to", "found.csv")
    assert pd.read_csv("found.csv")["prediction"].tolist()[2:] == ["dark", "bright"]
    with pytest.raises(InvalidInput, match="whose files a table names in its column 'file'; give the path"):
        trial.predict_table(new)
    for name, said in (("3.png", "are not in .*/new; correct the names, or put the table"), ("../seen", "lie outside")):
        pd.DataFrame({"file": ["1.png", name]}).to_parquet("new/table.parquet")
        with pytest.raises(InvalidInput, match=f"^some pictures that .*table.parquet names {said}"):
            trial.predict_table("new/table.parquet")
    pd.DataFrame({"file": [1, 2]}).to_parquet("new/table.parquet")
    with pytest.raises(InvalidInput, match=r"^some pictures that .* names are not in"):
        trial.predict_table("new/table.parquet")
    pd.DataFrame({"file": [None]}, dtype="object").to_csv("new/table.csv", index=False)
    with pytest.warns(UserWarning, match=r"^1 of 1 row"):
        assert trial.predict_table("new/table.csv")["prediction"].isna().all()
