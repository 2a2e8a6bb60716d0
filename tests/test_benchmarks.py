"""The benchmarks: their command lines, where they are wrong."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--threads", "0"], "'0' is no number of threads; give 1 to 1024"),
        (["--device", "foo"], "unknown device 'foo'; use auto, cpu, cuda or cuda:N"),
        (["--device", f"cuda:{torch.cuda.device_count()}"], "CUDA devices here"),
    ],
)
def test_mistakes_are_errors_of_argparse(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main = importlib.import_module("benchmarks.training").main
    monkeypatch.setattr(sys, "argv", ["training.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_table_says_why_a_method_has_no_ratio() -> None:
    training = importlib.import_module("benchmarks.training")
    measured = {column: 1.5 for column in training.COLUMNS if column not in {"opacus_hooks", "opake", "vmap"}}
    absent = {"opacus_hooks": "opacus is not installed", "opake": "opake.dpsgd is not installed"}
    first = {"model": "cnn", "batch": 4, "plain_ms": 2.0, **measured, "failed": absent | {"vmap": "ValueError: no"}}
    second = {**first, "model": "mlp", "vmap": 2.0, "failed": absent}
    assert training.as_row(first).split()[3:] == ["-" if each not in first else "1.50x" for each in training.COLUMNS]
    assert training.reasons([first, second]) == [
        "opacus_hooks: opacus is not installed",
        "opake: opake.dpsgd is not installed",
        "vmap: ValueError: no (cnn)",
    ]
