"""The benchmarks: their command lines, where they are wrong, and how one sums up what it has measured."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

from benchmarks.prediction import Sample, run, without_other_work


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


SPIN = """
import time
while time.process_time() < 0.6:
    pass
time.sleep(0.6)
"""


def test_the_time_without_other_work_leaves_out_what_others_took() -> None:
    """Of ten seconds: two alone, four on half of each of two CPUs, one thread on a quarter of one, three asleep."""
    samples = [
        Sample(0.0, 0.0, 1),
        *(Sample(2.0, 2.0, 1), Sample(2.0, 2.0, 2)),
        *(Sample(6.0, 6.0, 2), Sample(6.0, 6.0, 1)),
        *(Sample(7.0, 6.25, 1), Sample(7.0, 6.25, 0)),
        Sample(10.0, 6.25, 0),
    ]
    assert without_other_work(samples, 2) == 2.0 + 2.0 + 0.25 + 3.0


def test_a_real_command_is_measured_with_what_it_starts() -> None:
    """By the CPU time of a process below it, and by its sleep, whatever else the machine does."""
    below = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SPIN!r}], check=True)"
    samples = run([sys.executable, "-c", below])
    assert 0.4 < samples[-1].used < 3.0
    assert 0.8 < without_other_work(samples, 2) <= samples[-1].at - samples[0].at
