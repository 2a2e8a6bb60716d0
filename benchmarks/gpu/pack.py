"""Wheels that a machine with a GPU lacks: collected where there is a network, unpacked there for one run."""

from __future__ import annotations

import importlib
import importlib.util
import stat
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

NEEDED: Final[Mapping[str, tuple[str, ...]]] = {
    "charset_normalizer": ("charset-normalizer",),
    "pydantic": ("pydantic", "pydantic-core", "annotated-types", "typing-inspection"),
    "cryptography": ("cryptography", "cffi"),
    "dp_accounting": ("dp-accounting", "dm-tree"),
    "fairlearn": ("fairlearn",),
    "opacus": ("opacus", "opt-einsum"),
    "opake": ("opake-dpsgd", "opake-engine", "opake-accounting", "opake-base", "optree"),
}
"""Distributions by the module that the project or the benchmarks import."""
EXTRAS: Final[Mapping[str, tuple[str, ...]]] = {
    "ray": (
        *("ray", "jsonschema", "jsonschema-specifications", "referencing", "rpds-py", "plotly"),
        *("mlflow-skinny", "opentelemetry-api", "opentelemetry-proto", "opentelemetry-sdk"),
        *("opentelemetry-semantic-conventions", "sqlparse", "cachetools", "fastapi", "starlette"),
        *("importlib-metadata", "databricks-sdk"),
    ),
}
"""Only when asked for: a wheel of 80 MB, and what ``dpsweep run --tracking-uri none`` imports, as MLflow does."""
REQUIRED: Final = (
    "torch",
    "pydantic",
    "charset_normalizer",
    "cryptography",
    "numpy",
    "scipy",
    "pyarrow",
    "sklearn",
    "PIL",
)
"""Modules without which nothing can be measured."""
_COMPILED: Final[Mapping[str, str]] = {"cryptography": "cryptography.hazmat.primitives.ciphers"}
"""The module that loads the compiled part of a package, where that is not the package itself."""
_PLATFORMS: Final = ("manylinux2014_x86_64", *(f"manylinux_2_{glibc}_x86_64" for glibc in (17, 24, 27, 28, 31, 34)))
_CONSTRAINTS: Final = Path(__file__).resolve().parents[2] / "constraints.txt"


def collect(folder: Path, extras: Sequence[str]) -> int:
    """Download the wheels for CPython 3.12 on x86-64 Linux into ``folder``. Returns an exit status."""
    if importlib.util.find_spec("pip") is None:
        print(f"--pack downloads by pip, which {sys.executable} lacks; name a Python that has it by PYTHON")
        return 2
    wanted = [name for names in (*NEEDED.values(), *(EXTRAS[each] for each in extras)) for name in names]
    platforms = [word for each in _PLATFORMS for word in ("--platform", each)]
    command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--only-binary=:all:"]
    command += [
        "--python-version",
        "3.12",
        "--implementation",
        "cp",
        *platforms,
        "--constraint",
        str(_CONSTRAINTS),
        "--dest",
        str(folder),
    ]
    status = subprocess.run([*command, *wanted], check=False).returncode
    wheels = sorted(folder.glob("*.whl"))
    size = sum(each.stat().st_size for each in wheels)
    print(f"{folder}: {len(wheels)} wheels, {size / 2**20:.1f} MiB")
    return status


def unpacked(folder: Path, site: Path) -> list[str]:
    """Unpack all wheels of a folder, if there is one. Returns what is to be added to the path of modules."""
    wheels = sorted(folder.glob("*.whl")) if folder.is_dir() else []
    for wheel in wheels:
        try:
            _unpack(wheel, site)
        except (OSError, zipfile.BadZipFile, zlib.error) as error:
            print(f"{wheel} cannot be unpacked ({error}); collect it again by --pack FOLDER", flush=True)
    return [str(site)] if wheels else []


def _unpack(wheel: Path, site: Path) -> None:
    with zipfile.ZipFile(wheel) as content:
        content.extractall(site)
        for each in content.infolist():
            if each.external_attr >> 16 & stat.S_IXUSR:  # programs of Ray, which extractall leaves without it
                (site / each.filename).chmod(0o755)


def missing() -> list[str]:
    """Return required modules that cannot be found, and those of wheels that cannot be imported, with the reason."""
    return [told for name in REQUIRED if (told := _missing(name)) is not None]


def _missing(name: str) -> str | None:
    if importlib.util.find_spec(name) is None:
        return name
    if name in NEEDED:  # a wheel may be for another Python; importing what the image has takes seconds
        try:
            importlib.import_module(_COMPILED.get(name, name))
        except Exception as error:
            return f"{name} ({type(error).__name__}: {error})"
    return None
