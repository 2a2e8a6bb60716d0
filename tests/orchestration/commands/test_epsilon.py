"""`--risk`, `--prior`, `--curve` and attack targets: the library's numbers, as written; one line for every mistake."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rich.console import Console

from dpsweep.accounting import (
    PoissonSampling,
    Trace,
    attack_risk,
    curve_of_examples,
    parse_schedule,
    planned_trace,
    privacy_curve,
)
from dpsweep.accounting.mechanism.rounds import LARGEST_GROUP
from dpsweep.orchestration.commands import options
from dpsweep.orchestration.comparison.formats import at_least_share, at_most_share
from tests.orchestration.commands.test_calculator import TRACE, Answer, Trial, answer, dpsweep, trial
from tests.orchestration.processes import Command

__all__ = ["answer", "dpsweep", "trial"]  # fixtures

RUN = "--noise-multiplier 1.1 --sample-rate 0.02 --steps 200"
EPSILON = f"epsilon {RUN} --delta 1e-5"
CALIBRATE = "calibrate --sample-rate 0.02 --steps 200"


def planned(noise_multiplier: float) -> Trace:
    return planned_trace(parse_schedule("constant", noise_multiplier), PoissonSampling(0.02), 4, 50, LARGEST_GROUP)


def test_the_numbers_are_those_of_the_library(answer: Answer) -> None:
    single, group = answer(f"{EPSILON} --group-size 1,4 --risk --prior 0.001")
    for printed, size in ((single, 1), (group, 4)):
        curve = privacy_curve(planned(1.1), size)
        expected = attack_risk(curve).as_dict() | {"prior": 0.001, "reconstruction": curve.reconstruction(0.001)}
        assert printed["risk"] == expected
        assert printed["risk"]["advantage_at_least"] <= printed["risk"]["advantage"]
    assert "risk" not in answer(EPSILON)


def test_the_table_rounds_upper_bounds_up(dpsweep: Command) -> None:
    code, out, err = dpsweep(f"{EPSILON} --risk --prior 0.01")
    assert (code, err) == (0, "")
    found = attack_risk(privacy_curve(planned(1.1)))
    for shown in (found.advantage, *found.true_positive_rates):
        assert f"{at_most_share(shown.upper)} ({at_least_share(shown.lower)})" in out
    assert "reconstruction at prior 0.01" in out
    assert "no attack that sees every step and knows all other data exceeds these rates, unless their kind is" in out


def test_given_records_have_attacks_but_no_reconstruction(answer: Answer, trial: Trial) -> None:
    root, contributions = trial
    worst, pair = answer(f"epsilon --trial {root} --delta 1e-5 --group-size 2 --examples 148,4 --risk --prior 0.01")
    expected = attack_risk(curve_of_examples(TRACE, [0, 40, 80], contributions[[1, 49]]))
    assert pair["risk"]["advantage"] == pytest.approx(expected.advantage.upper, rel=1e-4)
    assert pair["risk"]["advantage"] < worst["risk"]["advantage"]
    assert (pair["risk"]["kind"], pair["risk"]["unit"]) == ("estimate", "2 given examples")
    assert pair["risk"]["reconstruction"] is None
    assert worst["risk"]["reconstruction"] > 0.01


def test_a_narrow_terminal_cuts_no_number(dpsweep: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "stdout", lambda: Console(force_terminal=True, width=80, color_system=None))
    code, out, err = dpsweep(f"{EPSILON} --group-size 1,2 --risk")
    assert (code, err) == (0, "")
    assert "add_remove" in out
    assert "…" not in out


def test_the_curve_stands_alone_with_both_bounds(dpsweep: Command, tmp_path: Path) -> None:
    file = tmp_path / "curve.html"
    code, out, err = dpsweep(f"{EPSILON} --group-size 1,2 --curve {file}")
    assert (code, err) == (0, "")
    assert f"curve: {file}" in out
    page = file.read_text()
    assert not re.search(r'<(script|link)[^>]+(src|href)="', page)
    for name in ("example", "example, at least", "group of 2", "group of 2, at least", "guessing"):
        assert f'"name":"{name}"' in page


@pytest.mark.parametrize(
    ("target", "unit"),
    [("--target-advantage 0.05", "advantage"), ("--target-tpr 0.05 --at-fpr 0.01", "tpr_at_fpr_1pct")],
)
def test_calibrate_finds_the_least_noise(answer: Answer, target: str, unit: str) -> None:
    found = answer(f"{CALIBRATE} {target}")
    assert (found["target"], found["accountant"], found["delta"]) == (0.05, "pld", None)
    assert 0.0499 < found[unit] <= 0.05
    assert attack_risk(privacy_curve(planned(found["noise_multiplier"]))).as_dict()[unit] == found[unit]
    assert attack_risk(privacy_curve(planned(0.999 * found["noise_multiplier"]))).as_dict()[unit] > 0.05


def test_calibrate_finds_the_longest_run(answer: Answer) -> None:
    line = "calibrate --solve steps --noise-multiplier 2 --sample-rate 0.02 --target-advantage 0.1"
    steps = answer(line)["steps"]
    assert answer(line)["advantage"] <= 0.1
    longer = answer(f"epsilon --noise-multiplier 2 --sample-rate 0.02 --steps {steps + 1} --delta 1e-5 --risk")
    assert longer["risk"]["advantage"] > 0.1


def test_shares_are_rounded_to_their_side() -> None:
    assert [at_most_share(x) for x in (0.0, 0.0123401, 0.99991, 1.0, 3e-6)] == [
        "0%",
        "1.24%",
        "100.0%",
        "100%",
        "0.000300%",
    ]
    assert [at_least_share(x) for x in (0.0, 0.0123499, 0.99991)] == ["0%", "1.23%", "99.9%"]
    assert at_most_share(None) == at_most_share(float("nan")) == "–"
