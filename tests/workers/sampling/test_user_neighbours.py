"""Real trainings on data sets that differ in one user: no rows of theirs move the clipped sum by more than is claimed.

Both trainings have the same seed, so the same noise, and one step on all members: the difference of their parameters is
that of their clipped sums.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.clipping import NORM_ERROR
from dpsweep.workers.data import Source, load_dataset, make_split
from dpsweep.workers.models import build_model
from dpsweep.workers.sampling.users import population_of, with_rows_of_users
from dpsweep.workers.spec import Component, DataSpec, NoiseSpec, NormSpec, SamplingSpec, TrialSpec, UserSpec
from dpsweep.workers.tasks.losses import Loss
from dpsweep.workers.trials.trial import run_trial
from tests.workers.gradients import adversarial
from tests.workers.people import MOST, people
from tests.workers.trial_specs import small_trial
from tests.workers.user_modules import code_of

BOUND, USER, ROWS = 0.3, 997, 5
"""A user of the data below, and how many rows they own."""
ELS, ULS = UserSpec("els", MOST), UserSpec("uls", MOST)
CHANGES = ("huge", "as they are", "equal", "infinite", "labels", "fewer")


def population(change: str) -> Source:
    """People whose user `USER` has other rows, or none at all if ``change`` is "absent"."""
    known = people(12)
    train = known.train
    assert train.user_ids is not None
    own = train.user_ids == USER
    assert int(own.sum()) == ROWS
    features, labels, kept = train.features.clone(), train.labels.clone(), torch.ones(len(train), dtype=torch.bool)
    match change:
        case "huge":
            features[own] = 1e4 * torch.randn(ROWS, features.shape[1], generator=torch.Generator().manual_seed(1))
        case "equal":
            features[own] = 3.0
        case "infinite":
            features[own] = torch.inf
        case "labels":
            labels[own] = (labels[own] + 1) % 3
        case "fewer":
            kept[torch.nonzero(own)[1:, 0]] = False
        case "absent":
            kept = ~own
        case _:
            assert change == "as they are"
    numbers = [each[kept].numpy() for each in (features, labels, train.groups, train.user_ids)]
    tested = make_split(np.zeros((4, features.shape[1]), np.float32), np.zeros(4), np.zeros(4), first_id=1000)
    split = make_split(numbers[0], numbers[1], numbers[2], user_ids=numbers[3])
    return replace(known, train=split, test=tested)


def shared(change: str) -> Source:
    """The same people, who own every row with the owners of the next but three; `USER` has more than three rows."""
    alone = population(change)
    assert alone.train.user_ids is not None
    owners = torch.stack([alone.train.user_ids, alone.train.user_ids.roll(-3)], 1)
    return replace(alone, train=replace(alone.train, user_ids=owners))


def mixing(feature_shape: tuple[int, ...], num_classes: int, name: str) -> nn.Module:
    steps = {
        **adversarial.MIXING,
        **adversarial.PLACED,
        **{key: step for key, (step, _) in adversarial.KEEPING.items()},
    }
    return adversarial.model(steps[name])


def coupled(name: str) -> Loss:
    return adversarial.COUPLED[name]


def harmless(feature_shape: tuple[int, ...], num_classes: int, name: str) -> nn.Module:
    return adversarial.HARMLESS[name]()[0]


def trial(users: UserSpec, change: str, **changes: Component) -> TrialSpec:
    return small_trial(
        data=DataSpec(f"{__file__}:population", {"change": change}),
        users=users,
        sampling=SamplingSpec("poisson", "full"),
        clipping=Component("flat", {"bound": BOUND}),
        noise=NoiseSpec(0.5),
        optimizer=Component("sgd", {"learning_rate": 1.0}),
        epochs=1,
        norms=NormSpec("off"),
        **changes,
    )


def clipped_sum(spec: TrialSpec, root: Path) -> Tensor:
    """Return the clipped sum of the only step, plus its noise, of a trial that is trained to its end."""
    result = run_trial(spec, str(root), code=code_of(spec))
    assert result.steps == 1
    dataset = load_dataset(spec.data, code_of(spec))
    assert dataset.train.user_ids is not None
    assert spec.users is not None
    members = population_of(spec, dataset)
    before = dict(build_model(spec.model, dataset, spec.seed, code_of(spec)).named_parameters())
    after = torch.load(root / "model.pt", weights_only=True)
    return torch.cat([members * (before[name] - after[name]).double().flatten() for name in sorted(before)]).detach()


@pytest.mark.thinned(6)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("users", [ELS, ULS], ids=["els", "uls"])
def test_no_rows_of_a_user_move_a_training_by_more_than_is_claimed(
    users: UserSpec, change: str, tmp_path: Path
) -> None:
    present = clipped_sum(trial(users, change), tmp_path / "present")
    absent = clipped_sum(trial(users, "absent"), tmp_path / "absent")
    most = BOUND * (1 if users.sampling == "uls" else 1 if change == "fewer" else ROWS)
    moved = float((present - absent).norm())
    assert moved <= most * (1.0 + NORM_ERROR) + 1e-5
    if change == "huge":
        assert moved > 0.9 * BOUND, "one who is clipped moves it by about the bound"


@pytest.mark.parametrize("change", ["huge", "as they are", "equal", "labels"])
def test_no_content_of_shared_rows_moves_a_training_by_more_than_is_claimed(change: str, tmp_path: Path) -> None:
    """A row whose gradient is not finite counts for nothing: it is the null record of the claim."""
    sums = {}
    for each in (change, "infinite"):
        spec = replace(
            trial(UserSpec("els", 3), each),
            data=DataSpec(f"{__file__}:shared", {"change": each}),
            adjacency="fixed_graph",
        )
        sums[each] = clipped_sum(spec, tmp_path / each)
        owners = with_rows_of_users(spec, load_dataset(spec.data, code_of(spec)))[0].train.user_ids
        assert owners is not None
        assert int((owners == USER).any(1).sum()) == 3
    moved = float((sums[change] - sums["infinite"]).norm())
    assert moved <= 3 * BOUND * (1.0 + NORM_ERROR) + 1e-5
    assert moved > 0.2 * BOUND


REFUSALS = (
    "depend on others of their batch",
    "depend on their place in the batch",
    "are not those of each example alone",
    "nor buffer",
)
ADVERSARIAL = [
    *(("model", name) for name in {**adversarial.MIXING, **adversarial.PLACED, **adversarial.KEEPING}),
    *(("loss", name) for name in adversarial.COUPLED),
]


@pytest.mark.long
@pytest.mark.parametrize(("role", "name"), ADVERSARIAL, ids=[name for _, name in ADVERSARIAL])
@pytest.mark.parametrize("users", [ELS, ULS], ids=["els", "uls"])
def test_no_adversarial_model_lets_a_user_move_others(users: UserSpec, role: str, name: str, tmp_path: Path) -> None:
    """It is refused, or its rows are computed one by one, which keeps the bound.

    A loss of labels, or of ranks among equal losses, may be the same once others are replaced. Then an example's
    gradient alone, or in another order, tells.
    """
    own = Component(f"{__file__}:{'mixing' if role == 'model' else 'coupled'}", {"name": name})
    refused = ""
    try:
        absent = clipped_sum(trial(users, "absent", **{role: own}), tmp_path / "absent")
        for change in ("as they are", "huge"):
            present = clipped_sum(trial(users, change, **{role: own}), tmp_path / change)
            assert float((present - absent).norm()) <= BOUND * (1 if users == ULS else ROWS) * (1 + NORM_ERROR) + 1e-5
    except InvalidInput as error:
        refused = str(error)
    finally:
        adversarial.SEEN.clear()
        adversarial.MEAN = adversarial.Between.kept = None
    assert not refused or any(each in refused for each in REFUSALS), refused


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    ["notes its last output", "a residual by the row's own mean", "attention within a row", "in place on a copy"],
)
@pytest.mark.parametrize("users", [ELS, ULS], ids=["els", "uls"])
def test_models_with_independent_rows_train_and_keep_the_bound(users: UserSpec, name: str, tmp_path: Path) -> None:
    own = Component(f"{__file__}:harmless", {"name": name})
    absent, present = (clipped_sum(trial(users, change, model=own), tmp_path / change) for change in ("absent", "huge"))
    assert float((present - absent).norm()) <= BOUND * (1 if users == ULS else ROWS) * (1 + NORM_ERROR) + 1e-5
