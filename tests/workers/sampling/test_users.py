"""Users are protected: how many rows each keeps, which are summed, and how far one user moves a sum."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dpsweep.accounting import account
from dpsweep.accounting.errors import DpsweepError
from dpsweep.accounting.mechanism.samplings import PoissonSampling
from dpsweep.accounting.mechanism.units import EXAMPLE, User
from dpsweep.workers.clipping import NORM_ERROR, ClippingState, make_clipping
from dpsweep.workers.data import Dataset, load_dataset, ownership, rows_per_user
from dpsweep.workers.machine.checkpoint import load_checkpoint
from dpsweep.workers.machine.devices import without_tf32
from dpsweep.workers.sampling.samplers import KeyedRows, SeededRows, make_row_draws
from dpsweep.workers.sampling.users import kept_rows, population_of, slots_of, with_rows_of_users
from dpsweep.workers.spec import AttackSpec, AuditSpec, Component, DataSpec, NormSpec, SamplingSpec, TrialSpec, UserSpec
from dpsweep.workers.training.batch_gradients import Decision, LocalGradients, recipe_of
from dpsweep.workers.trials.trial import run_trial
from tests.workers.devices import DEVICE
from tests.workers.resumption import Killed, kill_at, run_with_deaths, stored_bytes
from tests.workers.trial_runs import train
from tests.workers.trial_specs import small_trial
from tests.workers.user_modules import code_of

PEOPLE = DataSpec("tests.workers.people:people", test_fraction=0.25)
DOCUMENTS = DataSpec("tests.workers.documents:documents", test_fraction=0.25)
BOUND = 0.3
ELS, ULS = UserSpec("els", 3), UserSpec("uls", 3)


def trial(users: UserSpec | None, **changes: Any) -> TrialSpec:
    usual: dict[str, Any] = {
        "data": PEOPLE,
        "users": users,
        "norms": NormSpec("auto"),
        "sampling": SamplingSpec("poisson", 8),
        "clipping": Component("flat", {"bound": BOUND}),
    }
    return small_trial(**{**usual, **changes})


def capped(spec: TrialSpec) -> Dataset:
    return with_rows_of_users(spec, load_dataset(spec.data, code_of(spec)))[0]


def owners_of(dataset: Dataset) -> Tensor:
    assert dataset.train.user_ids is not None
    return dataset.train.user_ids


@pytest.mark.parametrize("seed", [0, None])
def test_each_user_keeps_a_uniformly_random_subset_of_their_rows(seed: int | None) -> None:
    users = np.array([5, 2, 5, 5, 2, 9, 5])
    found = np.zeros(len(users))
    pairs = set()
    draws = make_row_draws(seed, "rows of users")
    for _ in range(900):
        kept = kept_rows(users, 2, draws)
        assert (np.diff(kept) > 0).all()
        assert sorted(users[kept]) == [2, 2, 5, 5, 9]
        found[kept] += 1
        pairs.add(tuple(kept[users[kept] == 5]))
    assert set(np.flatnonzero(found == 900)) == {1, 4, 5}
    assert found[[0, 2, 3, 6]] == pytest.approx(450, abs=75)
    assert pairs == set(itertools.combinations((0, 2, 3, 6), 2))


def test_the_population_is_rows_kept_or_users() -> None:
    dataset = load_dataset(PEOPLE, code_of(trial(None)))
    histogram = rows_per_user(dataset.train)
    assert sum(rows * users for rows, users in histogram) == len(dataset.train)
    assert population_of(trial(None), dataset) == len(dataset.train)
    assert population_of(trial(ELS), dataset) == len(capped(trial(ELS)).train)
    assert population_of(trial(ULS), dataset) == len(owners_of(dataset).unique()) == 30
    assert owners_of(capped(trial(ELS))).unique(return_counts=True)[1].max() == 3


def test_slots_hold_each_user_alone_with_weights_of_a_mean() -> None:
    split = capped(trial(ULS)).train
    rows, weights = slots_of(split, 3)
    owners = owners_of(capped(trial(ULS))).numpy()
    assert (owners[rows] == owners[rows][:, :1]).all()
    assert sorted(rows[weights > 0.0]) == list(range(len(split)))
    assert weights.sum(1) == pytest.approx(3.0)


def net(kind: str) -> Component:
    return Component(f"{__file__}:{kind}")


def deep(feature_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(feature_shape[0], 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, num_classes))


class Shared(nn.Module):
    """One layer used twice, and a bare parameter."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(width, width), nn.Parameter(torch.ones(width))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(torch.relu(self.layer(x) * self.scale)))
        return out


def shared(feature_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return Shared(feature_shape[0], num_classes)


def recurrent(feature_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.GRU(1, 4, batch_first=True), nn.Linear(4, num_classes)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.cell(x[:, :, None])[0][:, -1])
            return out

    return Recurrent()


NETS = ("deep", *(pytest.param(name, marks=pytest.mark.long) for name in ("shared", "recurrent")))


def gradients(spec: TrialSpec, dataset: Dataset) -> LocalGradients:
    torch.manual_seed(0)
    return LocalGradients(spec, dataset, recipe_of(spec, make_clipping(spec.clipping), dataset, code_of(spec)))


def summed(local: LocalGradients, rows: Tensor) -> Mapping[str, Tensor]:
    decision: Decision = local.decision(ClippingState(BOUND))
    return local.weighted_sum_rowwise(rows.to(DEVICE), decision).gradients


@pytest.mark.parametrize("kind", NETS)
@without_tf32()
def test_a_users_gradient_is_the_clipped_mean_over_their_rows(kind: str) -> None:
    spec = trial(ULS, model=net(kind))
    dataset = capped(spec)
    local = gradients(spec, dataset)
    found = summed(local, torch.arange(12))
    owners = owners_of(dataset)
    expected = {name: torch.zeros_like(p) for name, p in local.model.named_parameters()}
    for user in owners.unique()[:12]:
        own = torch.nonzero(owners == user)[:, 0]
        local.model.zero_grad()
        outputs = local.model(dataset.prepare(dataset.train.features[own]).to(DEVICE))
        local.loss(outputs, dataset.train.labels[own].to(DEVICE)).mean().backward()
        each = {name: p.grad for name, p in local.model.named_parameters()}
        norm = torch.stack([g.norm() for g in each.values() if g is not None]).norm()
        for name, gradient in each.items():
            assert gradient is not None
            expected[name] += gradient * min(1.0, BOUND / float(norm))
    for name, total in expected.items():
        torch.testing.assert_close(found[name], total, rtol=2e-4, atol=2e-6)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("kind", NETS)
@pytest.mark.parametrize("change", ["huge", "equal", "infinite", "labels"])
def test_no_change_of_all_rows_of_a_user_moves_the_sum_by_more_than_the_bound(kind: str, change: str) -> None:
    spec = trial(ULS, model=net(kind))
    dataset = capped(spec)
    owners = owners_of(dataset)
    rows, draw = owners == owners.unique()[4], torch.Generator().manual_seed(1)
    features, labels = dataset.train.features.clone(), dataset.train.labels.clone()
    match change:
        case "huge":
            features[rows] = 1e4 * torch.randn(int(rows.sum()), features.shape[1], generator=draw)
        case "equal":
            features[rows] = 3.0
        case "infinite":
            features[rows] = torch.inf
        case _:
            labels[rows] = (labels[rows] + 1) % 3
    changed = replace(dataset, train=replace(dataset.train, features=features, labels=labels))
    batch = torch.arange(12)
    with_user, with_other = (summed(gradients(spec, each), batch) for each in (dataset, changed))
    without = summed(gradients(spec, dataset), batch[batch != 4])
    for before in (with_user, with_other):
        moved = torch.stack([(before[name] - without[name]).norm() for name in without]).norm()
        assert float(moved) <= BOUND * (1.0 + NORM_ERROR) + 1e-6


@pytest.mark.parametrize("users", [ELS, ULS], ids=["els", "uls"])
def test_a_trial_states_whom_it_protects(users: UserSpec, tmp_path: Path) -> None:
    result, trace, files = train(trial(users), tmp_path)
    assert trace.unit == User(3 if users.sampling == "els" else 1)
    size = len(capped(trial(users)).train) if users.sampling == "els" else 30
    assert trace.dataset_size == size
    assert trace.segments[0].sampling == PoissonSampling(8 / size)
    assert account(trace, 1e-5).unit == "user"
    assert any("every epsilon is that of a user" in note for note in result.notes)
    assert not Path(files.users).exists()


def test_users_are_allocated_at_the_cost_of_one_member(tmp_path: Path) -> None:
    spec = trial(ULS, sampling=SamplingSpec("random_allocation", 8))
    _, trace, _ = train(spec, tmp_path)
    assert (trace.unit, trace.dataset_size) == (User(1), 30)
    claim, rows = account(trace, 1e-5), account(replace(trace, unit=EXAMPLE), 1e-5)
    assert (claim.unit, claim.kind, claim.epsilon) == ("user", "guarantee", rows.epsilon)


def test_rows_are_allocated_at_the_cost_of_a_chain(tmp_path: Path) -> None:
    _, trace, _ = train(trial(ELS, sampling=SamplingSpec("random_allocation", 8)), tmp_path)
    assert trace.unit == User(3)
    claim, rows = account(trace, 1e-5), replace(trace, unit=EXAMPLE)
    assert (claim.unit, claim.kind) == ("user", "guarantee")
    assert account(rows, 1e-5).epsilon < claim.epsilon == account(rows, 1e-5, group_size=3).epsilon


def test_a_trial_of_shared_rows_states_what_is_taken_as_known(tmp_path: Path) -> None:
    spec = trial(ELS, data=DOCUMENTS, adjacency="fixed_graph")
    result, trace, files = train(spec, tmp_path)
    kept = capped(spec).train
    counts = np.unique(ownership(owners_of(capped(spec)))[1], return_counts=True)[1]
    assert counts.max() == 3
    assert (trace.adjacency, trace.unit, trace.dataset_size) == ("fixed_graph", User(3), len(kept))
    assert trace.segments[0].sampling == PoissonSampling(8 / len(kept))
    claim = account(trace, 1e-5)
    assert (claim.adjacency, claim.unit, claim.kind) == ("fixed_graph", "user", "guarantee")
    others = {seed: capped(replace(spec, seed=seed)).train.example_ids.tolist() for seed in (1, 2)}
    assert others[1] == others[2] == kept.example_ids.tolist(), "the rows that stay depend on their owners alone"
    assert any("are left out by test_fraction" in note for note in result.notes)
    assert not Path(files.users).exists()


@pytest.mark.parametrize("users", [ELS, ULS], ids=["els", "uls"])
def test_a_killed_trial_keeps_its_rows(users: UserSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = trial(users)
    run_trial(spec, str(tmp_path / "whole"), code=code_of(spec))
    run_with_deaths(spec, tmp_path / "killed", monkeypatch, [2, 5])
    assert stored_bytes(tmp_path / "whole") == stored_bytes(tmp_path / "killed")


def test_secret_draws_are_the_same_after_a_death(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = trial(ELS, noise_source="os_entropy")
    kept = []
    original = KeyedRows.order

    def order(self: KeyedRows, n: int) -> Any:
        kept.append(original(self, n))
        return kept[-1]

    monkeypatch.setattr(KeyedRows, "order", order)
    with monkeypatch.context() as patched:
        kill_at(patched, iter([5]))
        with pytest.raises(Killed):
            run_trial(spec, str(tmp_path), code=code_of(spec))
    run_trial(spec, str(tmp_path), code=code_of(spec))
    assert len(kept) == 2
    assert np.array_equal(kept[0], kept[1])
    assert not np.array_equal(kept[0], SeededRows(0).order(len(kept[0])))


@pytest.mark.parametrize(
    ("users", "changes", "named"),
    [
        (ELS, {"sampling": SamplingSpec("shuffle", 8)}, "sampling.method shuffle"),
        (ULS, {"sampling": SamplingSpec("fixed", 8)}, "sampling.method fixed"),
        (
            ELS,
            {"sampling": SamplingSpec("random_allocation", 8), "audit": AuditSpec(5, kind="gradient")},
            "canaries of",
        ),
        (ELS, {"sampling": SamplingSpec("poisson", 8, 20)}, "sampling.max_batch_size"),
        (ELS, {"clipping": Component("individual")}, "clipping individual"),
        (ULS, {"clipping": Component("dpsgd_f")}, "clipping dpsgd_f"),
        (ULS, {"norms": NormSpec(1.0)}, "norms.refreshes_per_epoch 1.0"),
        (ELS, {"attacks": AttackSpec(loss_threshold=True)}, "attacks"),
        (ELS, {"audit": AuditSpec(5)}, "audit"),
        (ELS, {"adjacency": "replace_one"}, "adjacency replace_one"),
        (ULS, {"preprocessing": Component("dp_pca", {"dimensions": 2})}, "dp_pca.*released from rows"),
        (ULS, {"data": DataSpec("tests.workers.people:strangers")}, "the data name no users"),
        (ELS, {"data": DOCUMENTS}, "Set privacy.adjacency: fixed_graph"),
        (ULS, {"data": DOCUMENTS, "adjacency": "fixed_graph"}, "no gradient of their own, and user_sampling uls"),
        (None, {"adjacency": "fixed_graph"}, "fixed_graph is an adjacency of users"),
        (ULS, {"adjacency": "fixed_graph"}, "adjacency fixed_graph"),
    ],
)
def test_what_is_not_proven_per_user_is_refused_by_name(
    users: UserSpec | None, changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    spec = trial(users, **changes)
    with pytest.raises(DpsweepError, match=named):
        run_trial(spec, str(tmp_path), code=code_of(spec))
    assert load_checkpoint(str(tmp_path / "private" / "checkpoint.pt"), "") is None
