"""The user's modules run as they were read, whatever Python has loaded, compiled or noted of them before."""

from __future__ import annotations

import dataclasses
import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.own_code.imports import UserCode, UserModule, import_function
from dpsweep.workers.own_code.own_modules import process_start


def rewrite(file: Path, source: str) -> None:
    """Replace a file without a trace in its time; where the size is equal too, compiled files look current."""
    before = file.stat()
    file.write_text(source)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def code(location: str, source: Path) -> UserCode:
    return UserCode((UserModule(location, str(source)).as_it_is(),))


def call(name: str, allowed: UserCode) -> object:
    return import_function(name, "model", allowed)()


@pytest.mark.parametrize("location", ["edited_once", "edited_once.py"])
def test_an_edit_of_equal_size_and_time_is_seen(tmp_path: Path, location: str) -> None:
    file = tmp_path / "edited_once.py"
    file.write_text("H = 4\ndef f():\n    return H\n")
    importlib.invalidate_caches()
    subprocess.run([sys.executable, "-c", "import edited_once"], cwd=tmp_path, check=True)  # writes a compiled file
    source = file if location.endswith(".py") else tmp_path
    before = code(location, source)
    assert call(f"{location}:f", before) == 4
    rewrite(file, "H = 9\ndef f():\n    return H\n")
    assert call(f"{location}:f", before) == 4, "what was read before is what runs"
    after = code(location, source)
    assert [call(f"{location}:f", each) for each in (after, before, after)] == [9, 4, 9]


def test_an_edited_import_of_an_import_is_seen(tmp_path: Path) -> None:
    (tmp_path / "chain_space").mkdir()
    (tmp_path / "chain_pack").mkdir()
    inner = tmp_path / "chain_space" / "inner.py"
    inner.write_text("H = 4\n")
    (tmp_path / "chain_pack" / "__init__.py").write_text("from .middle import H\n")
    (tmp_path / "chain_pack" / "middle.py").write_text("from chain_space import inner\nH = inner.H\n")
    (tmp_path / "chain_entry.py").write_text(
        "from chain_pack import H\ndef f():\n    from chain_space import inner\n    return H, inner.H\n"
    )
    before = code("chain_entry", tmp_path)
    assert call("chain_entry:f", before) == (4, 4)
    rewrite(inner, "H = 9\n")
    assert call("chain_entry:f", code("chain_entry", tmp_path)) == (9, 9)
    inner.unlink()
    assert call("chain_entry:f", before) == (4, 4)


def test_two_modules_that_import_another_helper_by_one_name(tmp_path: Path) -> None:
    for folder, value in (("one", 1), ("two", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "shared_helper.py").write_text(f"H = {value}\n")
        (tmp_path / folder / "net.py").write_text("from shared_helper import H\ndef f():\n    return H\n")
    both = UserCode(tuple(UserModule(f"{each}/net.py", str(tmp_path / each / "net.py")) for each in ("one", "two")))
    assert [call(f"{each}/net.py:f", both) for each in ("one", "two", "one")] == [1, 2, 1]


def test_a_module_that_has_not_changed_is_loaded_once(tmp_path: Path) -> None:
    """A data class is made from its module's entry in `sys.modules`, and must still be found there."""
    (tmp_path / "loaded_once.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Layer:\n    width: int = 3\ndef f():\n    return Layer\n"
    )
    first, second = (call("loaded_once:f", code("loaded_once", tmp_path)) for _ in range(2))
    assert first is second
    assert dataclasses.fields(first)[0].default == 3  # type: ignore[arg-type]
    assert sys.modules["loaded_once"].__file__ == str(tmp_path / "loaded_once.py")


def test_what_the_user_imported_first_is_kept_only_if_it_is_certain_to_be_current(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is newer than the process may have been edited since it was imported."""
    file = tmp_path / "imported_first.py"
    file.write_text("H = 4\nclass Net:\n    width = H\ndef f():\n    return Net\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    mine = importlib.import_module("imported_first").Net
    rewrite(file, file.read_text().replace("4", "9"))
    found = call("imported_first:f", code("imported_first", tmp_path))
    assert found is not mine
    assert getattr(found, "width", None) == 9

    import tests.workers.own_clipping as unedited

    if os.stat(unedited.__file__).st_ctime >= process_start():
        pytest.skip("this checkout is as young as this process, so that its files may have been edited since")
    name = unedited.__name__
    import_function(f"{name}:NoisyCount", "clipping", UserCode((UserModule(name).as_it_is(),)))
    assert sys.modules[name] is unedited


def test_a_module_that_the_user_imported_keeps_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the package is loaded anew, and then another module without it."""
    package = tmp_path / "kept_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "layers.py").write_text("H = 4\ndef f():\n    return H\n")
    (package / "mine.py").write_text("")
    (tmp_path / "kept_alone.py").write_text("def f():\n    return 1\n")
    call("kept_package.layers:f", code("kept_package.layers", tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    mine = importlib.import_module("kept_package.mine")
    call("kept_alone:f", code("kept_alone", tmp_path))
    rewrite(tmp_path / "kept_alone.py", "def f():\n    return 2\n")
    assert call("kept_alone:f", code("kept_alone", tmp_path)) == 2
    assert sys.modules["kept_package.mine"] is mine
    assert sys.modules["kept_package"].mine is mine


def test_who_reloads_an_edited_module_gets_the_file_as_it_is(tmp_path: Path) -> None:
    """As a notebook does; the next call reads it anew too, and a model that was built before imports what it knew."""
    file, late = tmp_path / "reloaded.py", tmp_path / "late_reloaded.py"
    file.write_text("H = 4\ndef f():\n    return g\ndef g():\n    import late_reloaded as late\n    return H, late.H\n")
    late.write_text("H = 4\n")
    built: Callable[[], object] = call("reloaded:f", code("reloaded", tmp_path))  # type: ignore[assignment]
    for each in (file, late):
        rewrite(each, each.read_text().replace("4", "9"))
    assert built() == (4, 4)
    mine = importlib.reload(sys.modules["reloaded"])
    assert mine.H == 9
    again: Callable[[], object] = call("reloaded:f", code("reloaded", tmp_path))  # type: ignore[assignment]
    assert again() == (9, 9)


def test_another_file_by_the_name_of_a_helper_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("here", "beside"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "named_alike.py").write_text("H = 1\n")
    (tmp_path / "beside" / "entry_alike.py").write_text("import named_alike\ndef f():\n    return 1\n")
    monkeypatch.syspath_prepend(str(tmp_path / "here"))
    importlib.import_module("named_alike")
    with pytest.raises(
        InvalidInput, match=r"Python has another module 'named_alike' .*here.* than the one in .*beside"
    ):
        call("entry_alike:f", code("entry_alike", tmp_path / "beside"))
