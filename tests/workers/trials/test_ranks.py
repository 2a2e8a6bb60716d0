"""Trials whose gradients several ranks share: equal to one process up to rounding, to themselves to the last bit."""

from __future__ import annotations

import itertools
import math
import os
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.records.traces import read_trace
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.workers.clipping import CLIPPING
from dpsweep.workers.data import load_dataset
from dpsweep.workers.evaluation.outcomes import Outcomes, read_outcomes
from dpsweep.workers.evaluation.predictions import evaluate, predict, with_counts
from dpsweep.workers.sampling.samplers import SAMPLERS
from dpsweep.workers.spec import Component, DataSpec, ExecutionSpec, NoiseSpec, NormSpec, SamplingSpec, TrialSpec
from dpsweep.workers.tasks.losses import build_loss
from dpsweep.workers.training.history import TrainingResult, read_training_result
from dpsweep.workers.trials.data_parallel import first_random_states
from dpsweep.workers.trials.ranks import interface_of
from dpsweep.workers.trials.trained_model import load_model
from dpsweep.workers.trials.trial import run_trial
from tests.workers.rank_runs import LOST, ended, started
from tests.workers.resumption import assert_same_trial, delete_unfinished
from tests.workers.trial_runs import norms_of
from tests.workers.trial_specs import DROPOUT_NET, TUMOURS_READ_ONCE, clipping_by, small_trial
from tests.workers.user_modules import code_of

TOLERANCE = 1e-5


def trial_by(clipping: str, sampling: str, **changes: Any) -> TrialSpec:
    """Two epochs in micro-batches of five examples, which the ranks do not have equally many of."""
    return small_trial(
        **{
            "data": TUMOURS_READ_ONCE,
            "sampling": SamplingSpec(sampling, 26),
            "clipping": clipping_by(clipping),
            "noise": NoiseSpec(float(clipping != "none")),
            "norms": NormSpec(2.0, rows_per_part=60),
            "execution": ExecutionSpec(device="cpu", micro_batch_size=5, checkpoint_every_epochs=0.5),
            **changes,
        }
    )


METHODS = {
    f"{clipping}-{sampling}": trial_by(clipping, sampling, epochs=1)
    for clipping, sampling in itertools.product(CLIPPING, SAMPLERS)
    if sampling in ("poisson", "fixed", "shuffle")  # the others take none of the norms that are compared
    if clipping != "filter" or sampling == "poisson"  # filters refuse the others
}
OTHERS: Mapping[str, TrialSpec] = {
    "whole batches": trial_by("dpsgd_f", "poisson", execution=ExecutionSpec(device="cpu")),
    "fewer examples than ranks": replace(trial_by("flat", "poisson"), sampling=SamplingSpec("poisson", 2), epochs=1),
    "every step": trial_by("individual", "poisson", norms=NormSpec("every_step", exact_examples=3), epochs=1),
    "norms of batches": trial_by("quantile", "shuffle", norms=NormSpec("when_sampled")),
    "private median": replace(
        trial_by("flat", "fixed"), clipping=Component("flat", {"bound": {"median_multiple": 1.0}})
    ),
    "dp-pca": trial_by("flat", "poisson", preprocessing=Component("dp_pca", {"dimensions": 8})),
    "hidden layer": trial_by("per_layer", "poisson", model=Component("mlp", {"hidden": [8]})),
}
DRAWING: Mapping[str, TrialSpec] = {
    "dropout": trial_by("dpsgd_f", "poisson", model=DROPOUT_NET, epochs=3),
    "augmentation": trial_by(
        "flat",
        "poisson",
        data=DataSpec("digits", keep={str(digit): 6 for digit in range(10)}),
        model=Component("cnn_dpsgdf", {"channels": [2, 2], "kernel_size": 3, "padding": 1, "hidden": 8}),
        augmentation=Component("flip_and_crop", {"multiplicity": 2, "padding": 1}),
        epochs=3,
    ),
}


def outcome(root: Path) -> tuple[dict[str, torch.Tensor], TrainingResult, TrialFiles]:
    files = TrialFiles(str(root))
    return torch.load(files.model, weights_only=True), read_training_result(files.training), files


def assert_equal_up_to_rounding(spec: TrialSpec, alone: Path, together: Path) -> None:
    """The same model, norms and evaluations to 1e-5; the same trace and epsilon exactly."""
    (model, result, files), (others, found, divided) = outcome(alone), outcome(together)
    for name, values in model.items():
        torch.testing.assert_close(others[name], values, rtol=TOLERANCE, atol=TOLERANCE)
    trace = read_trace(files.trace)
    assert read_trace(divided.trace) == trace
    if spec.is_private:
        assert account(read_trace(divided.trace), spec.delta, "rdp") == account(trace, spec.delta, "rdp")
    assert found.steps == result.steps
    assert found.evaluation.accuracy == result.evaluation.accuracy
    first, second = norms_of(files), norms_of(divided)
    assert np.array_equal(first.example_ids, second.example_ids)
    for column in ("norms", "contributions", "losses"):
        np.testing.assert_allclose(getattr(second, column), getattr(first, column), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("size", "trials"),
    [
        (2, {**dict(list(METHODS.items())[::4]), **OTHERS}),
        pytest.param(2, METHODS, marks=pytest.mark.long),
        pytest.param(4, {**METHODS, **OTHERS}, marks=pytest.mark.long),
    ],
    ids=["2 ranks", "2 ranks, all methods", "4 ranks, all methods"],
)
def test_they_equal_one_process(size: int, trials: Mapping[str, TrialSpec], tmp_path: Path) -> None:
    ranks = started(trials, tmp_path / "together", size)
    for name, spec in trials.items():
        run_trial(spec, str(tmp_path / "alone" / name), code=code_of(spec))
    assert ended(ranks) == [0] * size
    for name, spec in trials.items():
        assert_equal_up_to_rounding(spec, tmp_path / "alone" / name, tmp_path / "together" / name)


def noting_net(feature_shape: tuple[int, ...], num_classes: int, folder: str) -> nn.Module:
    """A linear model that notes, in a file of its process, how many examples it is evaluated on."""
    return nn.Sequential(nn.Flatten(), Noting(Path(folder)), nn.Linear(math.prod(feature_shape), num_classes))


class Noting(nn.Module):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            with (self.folder / str(os.getpid())).open("a") as notes:
                notes.write(f"{len(x)}\n")
        return x


@pytest.mark.parametrize(("size", "shares"), [(2, [1024, 414]), (4, [512, 512, 414])])
def test_an_evaluation_is_divided_and_has_the_bits_of_one_process(size: int, shares: list[int], tmp_path: Path) -> None:
    """1,438 test examples are three batches: of four ranks one has none. Averages are evaluated, and training goes on
    from the model; the public part has one batch."""
    notes = tmp_path / "notes"
    notes.mkdir()
    spec = trial_by(
        "flat",
        "poisson",
        data=DataSpec("digits", test_fraction=0.8, public_fraction=0.1),
        model=Component(f"{__file__}:noting_net", {"folder": str(notes)}),
        averaging=Component("ema", {"decay": 0.5}),
    )
    assert ended(started({"trial": spec}, tmp_path, size)) == [0] * size
    noted = {each.name: [int(line) for line in each.read_text().split()] for each in notes.iterdir()}
    assert [sizes[0] for sizes in noted.values()] == [1] * size, "each looks at one example, for its widest layer"
    evaluated = {name: [rows for rows in sizes if rows > 1] for name, sizes in noted.items()}
    seen = {name: sizes for name, sizes in evaluated.items() if sizes}
    first, *others = shares
    assert sorted(map(sum, seen.values())) == sorted([2 * first + 2 * 36, *(2 * rows for rows in others)]), "per epoch"
    _, result, files = outcome(tmp_path / "trial")
    dataset, model = load_dataset(spec.data), load_model(files, spec, code_of(spec))
    loss = build_loss(spec.loss)
    expected, stored = predict(model, dataset.test, dataset, loss), read_outcomes(files.outcomes)
    assert isinstance(stored, Outcomes)
    assert np.array_equal(stored.predicted, expected.classes)
    assert np.array_equal(stored.log_losses, expected.log_losses.astype(np.float32))
    alone = with_counts(evaluate(model, dataset.test, dataset, loss, 1), expected, dataset.test, dataset)
    assert result.evaluation == alone
    assert result.history[-1].public == evaluate(model, dataset.public or dataset.test, dataset, loss, 1)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two trials on two ranks: one of a model that draws random numbers, and one with augmentation."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert ended(started(DRAWING, folder, 2)) == [0, 0]
    return folder


@pytest.mark.thinned(2)
@pytest.mark.parametrize("dies", [0, 1])
def test_a_killed_rank_ends_the_group_which_then_continues_bit_for_bit(
    dies: int, undisturbed: Path, tmp_path: Path
) -> None:
    """SIGKILL after the first epoch; rank 0 of the next group is killed too, and a third one finishes."""
    for again in (dies, 0):
        codes = ended(started(DRAWING, tmp_path, 2, dies=again))
        assert codes[again] == -signal.SIGKILL
        assert codes[1 - again] == LOST
    assert ended(started(DRAWING, tmp_path, 2)) == [0, 0]
    for name, spec in DRAWING.items():
        delete_unfinished(tmp_path / name)
        assert_same_trial(spec, undisturbed / name, tmp_path / name)


def test_draws_of_ranks_are_their_own_and_make_contributions_estimates(undisturbed: Path, tmp_path: Path) -> None:
    spec = DRAWING["dropout"]
    run_trial(spec, str(tmp_path), code=code_of(spec))
    (alone, _, files), (together, _, divided) = outcome(tmp_path), outcome(undisturbed / "dropout")
    assert not all(
        torch.allclose(together[name], values, rtol=TOLERANCE, atol=TOLERANCE) for name, values in alone.items()
    )
    assert read_trace(files.trace) == read_trace(divided.trace)
    assert read_trace(divided.trace).contributions == "estimate"


def test_another_number_of_ranks_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = DRAWING["dropout"]
    codes = ended(started({"trial": spec}, tmp_path, 2, dies=0))
    assert codes == [-signal.SIGKILL, LOST]
    with pytest.raises(
        InvalidInput, match=r"shared by 2 ranks and cannot go on with 1.*set resources.ranks to 2"
    ) as one:
        run_trial(spec, str(tmp_path / "trial"), code=code_of(spec))
    assert "\n" not in str(one.value)


def test_secret_noise_and_draws_repeat_themselves_after_a_death(tmp_path: Path) -> None:
    """Snapshots of every step are written again by the steps that are repeated: unequal bytes would be an error."""
    spec = replace(DRAWING["dropout"], noise_source="os_entropy", norms=NormSpec("every_step"))
    started_twice = [ended(started({"trial": spec}, tmp_path, 2, dies=dies)) for dies in (1, None)]
    assert started_twice == [[LOST, -signal.SIGKILL], [0, 0]]


@pytest.mark.long
def test_no_two_ranks_or_attempts_draw_the_same_block(tmp_path: Path) -> None:
    """From secret keys: noise and batches at rank 0 alone, where random draws of the model begin at every rank."""
    spec = replace(DRAWING["dropout"], noise_source="os_entropy")
    for attempt in ("first", "second"):
        assert ended(started({attempt: spec}, tmp_path, 2, drawn=attempt)) == [0, 0]
    drawn = {path.name: path.read_text().splitlines() for path in tmp_path.iterdir() if path.is_file()}
    assert sorted(drawn) == ["first0", "first1", "second0", "second1"]
    assert min(len(drawn["first0"]), len(drawn["second0"])) > 10
    blocks = [block for found in drawn.values() for block in set(found)]
    assert len(blocks) == len(set(blocks))


def test_ranks_draw_from_the_seed_or_from_secret_keys_each_of_its_own() -> None:
    cpu = torch.device("cpu")
    for source in ("seeded", "os_entropy"):
        spec = replace(DRAWING["dropout"], noise_source=source)
        first, again = (first_random_states(spec, 3, cpu) for _ in range(2))
        halves = [bytes(half) for state in first for half in state.numpy().reshape(2, -1)]
        assert len({*halves}) == 4, "models and augmentation of two ranks"
        assert [torch.equal(one, other) for one, other in zip(first, again, strict=True)] == [source == "seeded"] * 2


def test_ranks_listen_where_their_node_is_known() -> None:
    assert interface_of("127.0.0.1") == "lo"
    with pytest.raises(InvalidInput, match=r"has the address 192\.0\.2\.7, .* start Ray with --node-ip-address"):
        interface_of("192.0.2.7")
