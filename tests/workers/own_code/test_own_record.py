"""A trial keeps the code that it was trained with, and goes on with no other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.workers.own_code.imports import UserCode, UserModule
from dpsweep.workers.own_code.own_record import changed_code, own_code, require_same_code, store_code, stored_code
from dpsweep.workers.spec import Component, DataSpec, TrialSpec
from tests.workers.trial_specs import small_trial

NET = '''"""A network."""
from recorded_layers import layer

def net(feature_shape, num_classes):
    """Return the layer."""
    return layer(4)  # wide
'''


def spec_of(model: str, data: str = "digits") -> TrialSpec:
    return replace(small_trial(), model=Component(model), data=DataSpec(data))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "recorded_net.py").write_text(NET)
    (tmp_path / "recorded_layers.py").write_text("def layer(width):\n    return width\n")
    return tmp_path


def of(folder: Path, location: str = "recorded_net") -> UserCode:
    source = folder / location if location.endswith(".py") else folder
    return UserCode((UserModule(location, str(source)).as_it_is(),))


@pytest.mark.parametrize("location", ["recorded_net", "recorded_net.py"])
@pytest.mark.parametrize(
    ("file", "before", "after", "changed"),
    [
        ("recorded_net.py", "layer(4)", "layer(9)", ("recorded_net.py",)),
        ("recorded_layers.py", "return width", "return width + 1", ("recorded_layers.py",)),
        ("recorded_net.py", "  # wide", "  # very wide", ()),
        ("recorded_net.py", "layer(4)", "layer(\n        4,\n    )", ()),
        ("recorded_net.py", "A network.", "The network.", ()),
        ("recorded_net.py", "Return the layer.", "Return a layer.", ()),
        ("recorded_net.py", "layer(4)", "layer(", ("recorded_net.py",)),
    ],
)
def test_an_edit_counts_if_it_changes_what_runs(
    folder: Path, tmp_path: Path, location: str, file: str, before: str, after: str, changed: tuple[str, ...]
) -> None:
    spec, files = spec_of(f"{location}:net"), TrialFiles(str(tmp_path / "trial"))
    store_code(files, spec, of(folder, location))
    assert changed_code(files, spec, of(folder, location)) == ()
    source = (folder / file).read_text()
    assert before in source
    (folder / file).write_text(source.replace(before, after))
    assert changed_code(files, spec, of(folder, location)) == changed
    assert changed_code(files, spec, stored_code(files, spec)) == ()


@pytest.mark.parametrize("deep", [f"x{'.a' * 3_000}", f"{'-' * 100_000}1", f"{'(' * 100_000}1"])
def test_a_record_that_is_nested_without_end_is_another_source(folder: Path, tmp_path: Path, deep: str) -> None:
    spec, files = spec_of("recorded_net:net"), TrialFiles(str(tmp_path / "trial"))
    store_code(files, spec, of(folder))
    Path(files.code, "recorded_net.py").write_text(deep)
    assert changed_code(files, spec, of(folder)) == ("recorded_net.py",)


def test_a_text_counts_where_something_reads_it(folder: Path, tmp_path: Path) -> None:
    spec, files = spec_of("recorded_net:net"), TrialFiles(str(tmp_path / "trial"))
    (folder / "recorded_net.py").write_text(f"{NET}\nWIDTH = int(__doc__ == 'A network.')\n")
    store_code(files, spec, of(folder))
    (folder / "recorded_net.py").write_text(
        f"{NET}\nWIDTH = int(__doc__ == 'A network.')\n".replace("A net", "The net")
    )
    assert changed_code(files, spec, of(folder)) == ("recorded_net.py",)


def test_a_changed_module_is_refused_by_its_file(folder: Path, tmp_path: Path) -> None:
    spec, files = spec_of("recorded_net:net"), TrialFiles(str(tmp_path / "trial"))
    store_code(files, spec, of(folder))
    require_same_code(files, spec, of(folder))
    for file in ("recorded_net.py", "recorded_layers.py"):
        (folder / file).write_text(f"{(folder / file).read_text()}\nMORE = 1\n")
    with pytest.raises(InvalidInput, match=r"^recorded_net.py and recorded_layers.py have changed since the trial in"):
        require_same_code(files, spec, of(folder))
    require_same_code(files, spec_of("mlp"), of(folder))


@pytest.mark.parametrize("environment", ["site-packages", "target"])
def test_an_installed_package_that_was_installed_again(
    environment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pip install --target` takes any folder, and leaves a record there."""
    package, record = tmp_path / environment / "team_package", tmp_path / environment / "team-1.dist-info" / "RECORD"
    package.mkdir(parents=True)
    record.parent.mkdir()
    record.write_text(
        "../../bin/team,,\nteam_package/__init__.py,,\nteam_package/nets.py,,\nteam-1.dist-info/RECORD,,\n"
    )
    (package / "__init__.py").write_text("from . import nets\n")
    (package / "nets.py").write_text("H = 4\n")
    monkeypatch.syspath_prepend(str(package.parent))
    spec, files = spec_of("team_package:net"), TrialFiles(str(tmp_path / "trial"))
    installed = UserModule("team_package")
    store_code(files, spec, UserCode((installed,)))
    assert list(own_code(spec, UserCode((installed,)))) == ["installed/team_package.sha256"]
    assert stored_code(files, spec) == UserCode((installed.as_it_is(),))
    (package / "nets.py").write_text("H = 9\n")
    assert changed_code(files, spec, UserCode((installed,))) == ("team_package/nets.py (installed)",)


def test_a_trial_whose_parts_mean_two_modules_by_one_name(tmp_path: Path) -> None:
    for folder, value in (("one", 1), ("two", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "utils_alike.py").write_text(f"H = {value}\n")
        (tmp_path / folder / "part.py").write_text("import utils_alike\n")
    both = UserCode(tuple(UserModule(f"{each}/part.py", str(tmp_path / each / "part.py")) for each in ("one", "two")))
    with pytest.raises(InvalidInput, match="import two modules as 'utils_alike'"):
        own_code(spec_of("one/part.py:net", "two/part.py:load"), both)
    alone = own_code(spec_of("one/part.py:net"), both)
    assert sorted(alone) == ["one/part.py", "one/utils_alike.py"]
