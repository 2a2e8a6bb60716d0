"""docs/data.md names everything that a sweep can name, and its code runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from dpsweep.workers.data import SOURCES, load_source
from dpsweep.workers.models import MODELS
from dpsweep.workers.spec import DataSpec
from dpsweep.workers.tasks.losses import LOSSES
from dpsweep.workers.training.preprocessing import PREPROCESSING
from tests.workers.user_modules import allowed

PAGE = (Path(__file__).parents[3] / "docs" / "data.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("name", [*SOURCES, *MODELS, *LOSSES, *PREPROCESSING])
def test_every_name_is_documented(name: str) -> None:
    assert f"`{name}`" in PAGE


def test_the_example_of_an_own_source_loads(tmp_path: Path) -> None:
    (code,) = blocks("python")
    (tmp_path / "my_module.py").write_text(code)
    spec = DataSpec(f"{tmp_path}/my_module.py:two_moons", {"examples": 30})
    assert len(load_source(spec, allowed(tmp_path / "my_module.py")).train) == 30


def test_the_example_of_a_table_loads_without_a_caveat(tmp_path: Path) -> None:
    (text,) = blocks("yaml")
    params = yaml.safe_load(text)["data"]
    path = tmp_path / "people.csv"
    path.write_text("customer,age,income,job,sex,approved\nc1,30,1000,clerk,f,yes\nc2,50,5000,farmer,m,no\n")
    source = load_source(DataSpec(params.pop("name"), {**params, "path": str(path)}))
    assert source.notes == ()
    assert source.train.features.shape == (2, 5)
    assert source.group_names == ("f", "m")
