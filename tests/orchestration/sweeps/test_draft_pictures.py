"""Drafted sweeps of pictures that a table lists: they plan as they are, and learn real pictures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image
from sklearn.datasets import load_digits

from dpsweep.accounting.errors import InvalidInput
from dpsweep.orchestration.sweeps.draft import draft_sweep
from dpsweep.orchestration.sweeps.picture_column import PictureColumn
from dpsweep.orchestration.sweeps.plan import plan_sweep
from dpsweep.orchestration.sweeps.schema import parse_sweep
from dpsweep.workers.data import load_dataset
from dpsweep.workers.trials.trial import run_trial
from tests.orchestration.processes import dpsweep
from tests.workers.data_folders import make_listed_images
from tests.workers.held_pictures import hold


def listed_digits(folder: Path) -> Path:
    """All digits of scikit-learn as files, which a table lists with their values and whether they are odd."""
    digits = load_digits()
    (folder / "scans").mkdir()
    lines = ["scan,digit,odd"]
    for row, (picture, digit) in enumerate(zip(digits.images, digits.target, strict=True)):
        Image.fromarray((15.9 * picture).astype("uint8")).save(folder / "scans" / f"{row}.png")
        lines.append(f"scans/{row}.png,{digit},{('no', 'yes')[digit % 2]}")
    (folder / "digits.csv").write_text("\n".join(lines) + "\n")
    return folder / "digits.csv"


def test_a_draft_of_pictures_learns_them(tmp_path: Path) -> None:
    """As it is, but for its seeds, its target and its private settings."""
    drafted = yaml.safe_load(draft_sweep(listed_digits(tmp_path), ["digit"], "odd", read=PictureColumn("scan")))
    assert drafted["drafted"]
    assert (drafted["data"]["classes"], drafted["data"]["groups"]) == ([*"0123456789"], ["no", "yes"])
    drafted |= {"clipping": drafted["clipping"][1], "seeds": 0, "norms": "off"}
    drafted["privacy"]["target_epsilon"] = 3
    plan = plan_sweep(parse_sweep(yaml.safe_dump(drafted)))
    assert (plan.refusals, plan.warnings, plan.trials[0].dataset.reasons) == ((), (), ())
    assert plan.trials[0].dataset.feature_shape == (3, 32, 32)
    found = run_trial(plan.trials[0].spec, str(tmp_path / "trial")).evaluation
    assert found.main > 0.9
    assert min(group.accuracy or 0.0 for group in found.groups) > 0.85


def test_a_column_of_pictures_is_drafted_where_init_is_told(tmp_path: Path) -> None:
    """Rows without a picture are told; other columns are no features."""
    table = make_listed_images(tmp_path)
    lines = table.read_text().splitlines()
    table.write_text("\n".join([*lines[:-1], "," + lines[-1].partition(",")[2]]) + "\n")
    to = tmp_path / "own.yaml"
    named = ("init", table, "--label", "y", "--group", "sex", "--user", "who", "--image", "file")
    assert dpsweep(*named, "--to", to).returncode == 0
    text = to.read_text()
    assert "dpsweep init table.csv --label y --group sex --user who --image file`" in text
    assert 'image: "file"    # names of files; missing in 1.7% of the rows, which are left out' in text
    sweep = parse_sweep(text)
    assert sweep.data[0].params.keys() & {"features", "ranges", "categories"} == set()
    plan = plan_sweep(sweep)
    assert plan.refusals == ()
    assert plan.warnings[0] == "data table: 1 of 60 rows (1.7%) are left out: they lack a value ('file' 1)"
    both = dpsweep(*named, "--text", "sex", "--to", tmp_path / "both.yaml")
    assert (both.returncode, "--text has no effect beside --image: a model reads pictures" in both.stderr) == (2, True)


@pytest.mark.parametrize("is_nested", [False, True], ids=["bytes", "datasets"])
def test_pictures_inside_of_a_table_are_drafted_alike(tmp_path: Path, is_nested: bool) -> None:
    """As bytes, or as the package datasets stores them; they are the pictures of their files."""
    listed = make_listed_images(tmp_path)
    table = hold(listed, is_nested)
    said = 'which holds bytes; if they are pictures, draft with --image "file" to learn from them'
    assert f'# left out: "file", {said}' in draft_sweep(table, ["y"], None)
    drafts = [parse_sweep(draft_sweep(path, ["y"], None, read=PictureColumn("file"))) for path in (listed, table)]
    assert [draft.data[0].params.keys() for draft in drafts] == [drafts[0].data[0].params.keys()] * 2
    assert plan_sweep(drafts[1]).refusals == ()
    files, held = (load_dataset(draft.data[0]) for draft in drafts)
    assert torch.equal(files.train.features, held.train.features)
    assert torch.equal(files.test.labels, held.test.labels)


@pytest.mark.parametrize(
    ("labels", "task", "loss"),
    [(["age"], "regression", "mse"), (["old", "tall"], "multi_label", "binary_cross_entropy")],
)
def test_amounts_and_flags_are_learnt_of_pictures(tmp_path: Path, labels: list[str], task: str, loss: str) -> None:
    sweep = parse_sweep(draft_sweep(make_listed_images(tmp_path), labels, "sex", read=PictureColumn("file")))
    assert (sweep.data[0].params["task"], sweep.loss[0].name) == (task, loss)
    assert plan_sweep(sweep).refusals == ()


def test_columns_of_pictures_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    table = make_listed_images(tmp_path)
    for column, said in (
        ("fil", "the image column 'fil' is not in the table; .*'file'"),
        ("y", "the image column 'y' is also a label, group or user; name another with --image"),
        ("sex", "the image column 'sex' is also a label, group or user"),
    ):
        with pytest.raises(InvalidInput, match=said):
            draft_sweep(table, ["y"], "sex", read=PictureColumn(column))
    table.write_text(
        "".join(line.partition(",")[0] + "," + line.split(",")[1] + "\n" for line in table.read_text().splitlines())
    )
    with pytest.raises(InvalidInput, match="for one of pictures --image COLUMN"):
        draft_sweep(table, ["y"], None)
