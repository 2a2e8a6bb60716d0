"""A sweep whose norms are off: the worst case as ever, nothing of single examples, and every command says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpsweep.accounting.errors import InvalidInput
from dpsweep.orchestration.library import open_sweep
from dpsweep.orchestration.pipeline import run_sweep
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.sweeps.schema import parse_sweep
from tests.orchestration.invoking import invoked
from tests.orchestration.sample_grids import in_process, key_in, small, trial_in

CLIPPING = ["none", {"name": "flat", "bound": 1.0}]


def text(norms: str, **changes: object) -> str:
    return small(clipping=CLIPPING, noise="constant", seeds=0, epochs=1, **changes) + f"\nnorms: {norms}\n"


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SweepFiles]:
    """The same sweep with norms and without."""
    folder = tmp_path_factory.mktemp("norms")
    texts = {"on": text("{refreshes_per_epoch: 1}"), "off": text("off")}
    return {name: run_sweep(in_process(own, folder / name)).files for name, own in texts.items()}


def test_the_reports_and_results_say_what_is_absent(swept: dict[str, SweepFiles]) -> None:
    for page in (swept["off"].report, swept["off"].private_report):
        shown = Path(page).read_text()
        assert "Not computed. The sweep says" in shown
        assert "the epsilons of single examples were not computed" in shown
    assert "Not computed" not in Path(swept["on"].report).read_text()


def test_commands_refuse_in_one_line_what_needs_norms_and_do_the_rest(swept: dict[str, SweepFiles]) -> None:
    root = swept["off"].root
    trial = trial_in(root, "flat-seed0").root

    def told(*arguments: str) -> tuple[int, str]:
        result = invoked(*arguments)
        return result.exit_code, " ".join(f"{result.output} {result.exception}".split())

    assert told("verify", root)[0] == 0
    code, words = told("prune", root, "--norms")
    assert (code, "0 trials" in words or "nothing was deleted" in words) == (0, True)
    for arguments, reason in (
        (("account", root, "--address", "in-process"), "norms.refreshes_per_epoch is off for"),
        (("owner-report", trial, "--example-id", "1"), "norms.refreshes_per_epoch: off"),
        (("epsilon", "--trial", trial, "--delta", "1e-5", "--individual", "rdp"), "never taken"),
    ):
        code, words = told(*arguments)
        assert code != 0, arguments
        assert reason in words, words
    assert told("epsilon", "--trial", trial, "--delta", "1e-5")[0] == 0
    with pytest.raises(ValueError, match="norms are off"):
        open_sweep(root).trials[key_in(root, "flat-seed0")].epsilons()


def test_what_contradicts_norms_off_is_refused() -> None:
    with pytest.raises(InvalidInput, match="release: private shows statistics of the epsilons of single examples"):
        parse_sweep(text("off", release="private"))
