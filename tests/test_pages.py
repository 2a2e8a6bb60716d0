"""Commands that a newcomer copies from the README and the pages run as they stand, in the order of the page.

The gate (`.ci/run`) runs the two set-up commands, one after the other in one clone. Commands for a Ray cluster are run
where its tests start one (`tests/orchestration/execution/test_submission.py`).
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.orchestration.invoking import printed

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
_COMMAND = re.compile(r"^(?:\$ |    )(dpsweep (?:.*\\\n)*.*)$", re.MULTILINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of somebody who has cloned dpsweep and run its first command, on fewer trials and epochs."""
    place = tmp_path_factory.mktemp("newcomer")
    for name in ("sweeps", "examples"):
        shutil.copytree(ROOT / name, place / name)
    quickstart = place / "sweeps" / "quickstart.yaml"
    sweep = yaml.safe_load(quickstart.read_text())
    del sweep["tune"]
    sweep |= {"epochs": 2, "clipping": ["none", "flat"], "noise": ["constant"], "seeds": [0]}
    sweep["sampling"]["batch_size"] = (
        32  # more steps, which the examples' epsilons are computed from faster than from few
    )
    quickstart.write_text(yaml.safe_dump(sweep))
    (place / "sweeps" / "other.yaml").write_text(yaml.safe_dump(sweep | {"name": "other", "epochs": 1}))
    rng = np.random.default_rng(0)
    rows = zip(
        rng.integers(18, 100, 300),
        rng.integers(0, 200_000, 300),
        rng.choice(["clerk", "farmer", "teacher"], 300),
        rng.choice(["f", "m"], 300),
        rng.choice(["no", "yes"], 300),
        strict=True,
    )
    lines = ["age,income,job,sex,approved", *(",".join(map(str, row)) for row in rows)]
    (place / "people.csv").write_text("\n".join(lines) + "\n")
    before = Path.cwd()
    os.chdir(place)
    for name in ("quickstart", "other"):
        _run(["run", f"sweeps/{name}.yaml"])
    yield place
    os.chdir(before)


def test_every_command_of_the_readmes_table_runs_in_the_order_of_the_page(folder: Path) -> None:
    """Each on a copy of the trained sweep where it deletes: the next ones are about one that is there."""
    table = README.partition("## Commands")[2].partition("\n\nA sweep is one YAML file")[0]
    shown = [re.findall(r"`dpsweep ([^`]*)`", row.split(" | ")[0]) for row in table.splitlines()]
    commands = [shlex.split(row[0]) for row in shown if len(row) == 1]
    assert {name for name, *_ in commands} >= {"init", "plan", "run", "verify", "account", "report", "best", "export"}
    for name, *words in commands:
        if name in ("submit", "decrypt", "dashboard", "predict") or not words:
            continue  # of a cluster, an encrypted sweep, a server, a table, and of no run in particular
        if name in ("prune", "delete", "forget"):
            shutil.rmtree("runs/copy", ignore_errors=True)
            shutil.copytree("runs/quickstart", "runs/copy")
            words = [word.replace("DIR", "runs/copy") for word in words]
        _run([name, *(_filled(word, words[:place], folder) for place, word in enumerate(words))])


@pytest.mark.parametrize("page", ["README.md", pytest.param("docs/accounting.md", marks=pytest.mark.long)])
def test_every_command_of_a_page_runs_in_the_order_of_the_page(page: str, folder: Path) -> None:
    """After the first command, which trained the trials that some of them name."""
    trial = str(_trial(folder))
    text = re.sub(r"`(dpsweep epsilon --trial [^`]*)`", r"\n$ \1\n", (ROOT / page).read_text())
    commands = [shlex.split(command.replace("\\\n", " "), comments=True)[1:] for command in _COMMAND.findall(text)]
    assert len(commands) >= 5
    for arguments in commands:
        _run([re.sub(r"^runs/(x|quickstart)/trials/[\w-]+", trial, word) for word in arguments])


def test_the_data_section_of_the_readme_plans(folder: Path) -> None:
    (section,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    sweep = yaml.safe_load((folder / "sweeps" / "quickstart.yaml").read_text()) | yaml.safe_load(section)
    (folder / "own.yaml").write_text(yaml.safe_dump(sweep | {"name": "own"}))
    _run(["plan", "own.yaml"])


def _filled(word: str, before: list[str], folder: Path) -> str:
    """Return a word of the README's table with what stands for it in the newcomer's folder."""
    places = {
        "DATA.csv": "people.csv",
        "L": "approved",
        "G": "sex",
        "SWEEP": "sweeps/quickstart.yaml",
        "FILE.csv": "trials.csv",
        "DIR": "runs/other" if "DIR" in before else "runs/quickstart",
        "FOLDER": "runs",
    }
    if word == "TRIAL":
        return _trial(folder).name if before[-1:] == ["--only"] else str(_trial(folder))
    return places.get(word, word)


def _trial(folder: Path) -> Path:
    return next((folder / "runs" / "quickstart" / "trials").glob("flat-*"))


def _run(arguments: list[str]) -> None:
    """Run a command in this process, without Ray and MLflow, which other tests try."""
    alone = ["--address", "in-process"]
    options = {
        "run": [*alone, "--tracking-uri", "none"],
        "account": alone,
        "delete": ["--yes"],
        "audit": ["--canaries", "50"],
    }
    printed(*arguments, *options.get(arguments[0], []))
