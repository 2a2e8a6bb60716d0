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
