"""Which modules open, change, list or delete files: one does those below a sweep's folder."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
_OF_PATHS: Final = {
    *("read_text", "read_bytes", "write_text", "write_bytes", "touch", "unlink"),
    *("rmdir", "mkdir", "iterdir", "symlink_to", "hardlink_to", "chmod"),
}
_OF_OS: Final = {
    *("open", "remove", "unlink", "rename", "replace", "mkdir", "makedirs", "rmdir", "truncate", "chmod"),
    *("scandir", "listdir", "walk", "fwalk", "link", "symlink"),
}
ELSEWHERE: Final[Mapping[str, str]] = {
    "accounting/records/local_files.py": "the layer itself",
    "accounting/machine_code.py": "the source of dpsweep",
    "accounting/records/memory_limits.py": "/proc and /sys",
    "orchestration/comparison/claims.py": "the source of dpsweep",
    "orchestration/store/remembered.py": "the source of dpsweep",
    "orchestration/tracking/access.py": "the token of the cluster",
    "workers/own_code/own_modules.py": "the user's modules",
    "workers/own_code/own_sources.py": "the user's modules",
    "workers/machine/devices.py": "/proc and /sys",
    "orchestration/report/page.py": "the template, which is part of dpsweep",
    "orchestration/report/board.py": "the template, which is part of dpsweep",
    "orchestration/report/writing.py": "a temporary folder",
    "orchestration/sweeps/user_code.py": "the user's modules, and a temporary folder",
    "orchestration/execution/submission.py": "a temporary folder of what a job is given",
    "orchestration/execution/publication.py": "a temporary folder, until MLflow has what is in it",
    "orchestration/execution/session.py": "Ray's folder, which was made for the run with mode 0700",
    "orchestration/execution/ray_tune.py": "what Tune wrote about an error into the driver's own folder of Ray",
    "orchestration/execution/cluster.py": "descriptors of pipes",
    "orchestration/tracking/runs.py": "a temporary folder",
    "orchestration/tracking/logged_models.py": "a temporary folder",
    "orchestration/tracking/addresses.py": "the folder of a database that the user named",
    "workers/trials/probe.py": "/proc",
    "workers/machine/memory.py": "/proc",
    "workers/data/source_files.py": "the user's data, and the cache",
    "workers/data/encoder.py": "the user's data",
    "workers/data/images.py": "the user's data",
    "workers/data/cifar.py": "the user's data",
    "workers/data/table_files.py": "the user's data",
    "workers/models/text_models.py": "the user's pretrained model",
    "workers/data/mapped.py": "a cache with mode 0700",
}
"""Modules that open files by their paths, none of which lies below a sweep's folder."""


def opened(path: Path) -> Iterator[str]:
    """Calls that open, change, list or delete files by their paths."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        match node.func:
            case ast.Name(id="open"):
                yield f"{node.lineno}: open"
            case ast.Attribute(value=ast.Name(id="os"), attr=name) if name in _OF_OS:
                yield f"{node.lineno}: os.{name}"
            case ast.Attribute(value=ast.Name(id="shutil"), attr=name) if name != "disk_usage":
                yield f"{node.lineno}: shutil.{name}"
            case ast.Attribute(value=ast.Name(id="fs"), attr="LocalFileSystem"):
                yield f"{node.lineno}: pyarrow's local files"
            case ast.Attribute(attr=name) if name in _OF_PATHS:
                yield f"{node.lineno}: .{name}"


def test_files_of_a_sweep_are_opened_in_one_module() -> None:
    found = {
        path.relative_to(ROOT).as_posix(): calls
        for package in ("accounting", "workers", "orchestration")
        for path in (ROOT / package).rglob("*.py")
        if (calls := list(opened(path)))
    }
    assert {file: calls for file, calls in found.items() if file not in ELSEWHERE} == {}
    assert set(ELSEWHERE) == set(found), "what is listed opens files"


def test_every_text_has_an_encoding() -> None:
    """That of the locale may lack a character, such as one of a column or a group."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for package in ("accounting", "workers", "orchestration", "dpsweep")
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and _is_of_text(node) and "encoding" not in {each.arg for each in node.keywords}
    ]
    assert found == []


def _is_of_text(call: ast.Call) -> bool:
    """Return whether a call reads or writes a file as text, or what a process prints."""
    match call.func:
        case ast.Attribute(attr="read_text" | "write_text"):
            return True
        case ast.Name(id="open"):
            return len(call.args) < 2 or "b" not in ast.unparse(call.args[1])
        case _:
            return any(each.arg in ("text", "universal_newlines") for each in call.keywords) and _is_process(call)


def _is_process(call: ast.Call) -> bool:
    return ast.unparse(call.func).startswith("subprocess.")


def test_stored_json_is_parsed_in_one_module() -> None:
    """Others would not notice that it is nested more deeply than Python follows."""
    of_its_own_text = {"accounting/records/json_text.py", "orchestration/sweeps/text.py"}
    of_its_own_text |= {"workers/spec.py", "orchestration/tracking/access.py"}
    found = {
        path.relative_to(ROOT).as_posix()
        for package in ("accounting", "workers", "orchestration")
        for path in (ROOT / package).rglob("*.py")
        if "json.load" in path.read_text()
    }
    assert found == of_its_own_text


def test_no_process_of_python_imports_from_the_working_directory() -> None:
    """It may be a folder from somebody else; without -P or -I, modules in it come before Python's own."""
    lines = [
        [ast.unparse(each) for each in node.elts[:2]]
        for package in ("accounting", "workers", "orchestration")
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.List | ast.Tuple) and node.elts and ast.unparse(node.elts[0]) == "sys.executable"
    ]
    assert len(lines) >= 4
    assert {second for _, second in lines} == {"'-P'", "'-I'"}
