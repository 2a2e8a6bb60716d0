"""What a run records of single examples, and which claims about contributions it may make."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dpsweep.accounting import account
from dpsweep.accounting.errors import InvalidInput, UnsupportedMechanism
from dpsweep.accounting.records.shards import NormShards
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.workers import clipping
from dpsweep.workers.clipping import ClippingState, ClipRule, Examples, PublicFacts
from dpsweep.workers.clipping.by_norm import PerLayerClipping
from dpsweep.workers.clipping.clipping_method import clip_factor
from dpsweep.workers.spec import Component, ExecutionSpec, NoiseSpec, NormSpec, SamplingSpec
from dpsweep.workers.tasks import IGNORED
from dpsweep.workers.training.counters import read_counters
from dpsweep.workers.training.snapshot_intervals import Measurement
from dpsweep.workers.training.trainer import new_courses, note_epoch
from tests.accounting.stored_trial import account_trial, job_of
from tests.known import known
from tests.workers.trial_runs import TRAIN_SIZE, norms_of, train
from tests.workers.trial_specs import DROPOUT_NET, TUMOURS, clipping_by, planned_mechanism, small_trial


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, "estimate"),
        ({"norms": NormSpec("every_step")}, "output_specific"),
        ({"norms": NormSpec("when_sampled")}, "estimate"),
        ({"clipping": Component("individual")}, "output_specific"),
        ({"norms": NormSpec("every_step"), "augmentation": Component("flip_and_crop")}, "estimate"),
        ({"norms": NormSpec("every_step"), "execution": ExecutionSpec(autocast=True)}, "estimate"),
    ],
)
def test_contributions_claim_no_more_than_they_hold(changes: dict[str, Any], kind: str) -> None:
    assert planned_mechanism(small_trial(**changes), TRAIN_SIZE).contributions == kind


def test_norms_under_dropout_are_estimates(tmp_path: Path) -> None:
    """Two passes draw two masks, so a norm taken at every step still is not the one that was clipped."""
    spec = small_trial(model=DROPOUT_NET, norms=NormSpec("every_step"))
    assert train(spec, tmp_path / "flat")[1].contributions == "estimate"
    spec = replace(spec, clipping=Component("individual"))
    assert train(spec, tmp_path / "individual")[1].contributions == "output_specific"


def test_exactly_tracked_examples_agree_with_snapshots_at_every_step(tmp_path: Path) -> None:
    spec = small_trial(norms=NormSpec("every_step", exact_examples=7), clipping=Component("dpsgd_f"))
    _, trace, files = train(spec, tmp_path)
    everyone, exact = norms_of(files), NormShards(files.exact_norms).read(0)
    assert list(exact.steps) == list(range(trace.steps))
    rows = np.searchsorted(everyone.example_ids[np.argsort(everyone.example_ids)], exact.example_ids)
    rows = np.argsort(everyone.example_ids)[rows]
    assert len(exact.example_ids) == 7
    np.testing.assert_allclose(exact.contributions, everyone.contributions[rows], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(exact.norms, everyone.norms[rows], rtol=1e-4)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("clip", ["flat", "dpsgd_f", "per_layer"])
def test_norms_of_batches_of_everyone_are_those_of_every_step(clip: str, tmp_path: Path) -> None:
    changes = {"sampling": SamplingSpec("poisson", TRAIN_SIZE), "clipping": Component(clip), "epochs": 4}
    sampled = norms_of(train(small_trial(norms=NormSpec("when_sampled"), **changes), tmp_path / "sampled")[2])
    exact = norms_of(train(small_trial(norms=NormSpec("every_step"), **changes), tmp_path / "exact")[2])
    assert list(sampled.steps) == list(exact.steps) == [0, 1, 2, 3]
    np.testing.assert_allclose(sampled.contributions, exact.contributions, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(sampled.norms[:, 1:], exact.norms[:, :-1], rtol=1e-4)
    np.testing.assert_allclose(sampled.norms[:, 0], exact.norms[:, 0], rtol=1e-4)


def test_norms_when_sampled_are_measured_for_all_once_and_estimate_the_rest(tmp_path: Path) -> None:
    """A norm is of a batch before the snapshot, or, if older than 3/4 of the training so far, of the snapshot."""
    spec = small_trial(norms=NormSpec("when_sampled", exact_examples=TRAIN_SIZE), epochs=3)
    _, trace, files = train(spec, tmp_path)
    sampled, exact = norms_of(files), NormShards(files.exact_norms).read(0)
    assert list(sampled.steps) == [epoch * trace.steps // 3 for epoch in range(3)]
    order, exact_order = np.argsort(sampled.example_ids), np.argsort(exact.example_ids)
    seen = exact.norms[exact_order]
    for column, step in enumerate(sampled.steps):
        found = sampled.norms[order][:, column, None]
        assert np.isclose(found, seen[:, step // 4 : step + 1], rtol=1e-4).any(1).all()
        assert not np.isclose(found, seen[:, step, None], rtol=1e-4).all() or step == 0
    assert np.corrcoef(sampled.contributions[order].mean(1), exact.contributions[exact_order].mean(1))[0, 1] > 0.7


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("clip", "sampling", "chosen"),
    [
        ("flat", SamplingSpec("poisson", 24), "when_sampled"),
        ("dpsgd_f", SamplingSpec("shuffle", 24), "when_sampled"),
        ("flat", SamplingSpec("poisson", 24, 40), 1.0),
        ("flat", SamplingSpec("fixed", 24), 1.0),
        ("individual", SamplingSpec("poisson", 24), 1.0),
        ("filter", SamplingSpec("poisson", 24), 1.0),
    ],
)
def test_auto_takes_norms_when_sampled_where_that_is_possible(
    clip: str, sampling: SamplingSpec, chosen: Any, tmp_path: Path
) -> None:
    changes = {"sampling": sampling, "clipping": clipping_by(clip), "epochs": 3}
    auto = train(small_trial(norms=NormSpec(rows_per_part=60), **changes), tmp_path / "auto")[2]
    said = train(small_trial(norms=NormSpec(chosen, rows_per_part=60), **changes), tmp_path / "said")[2]
    assert stored_norms(auto) == stored_norms(said)
    assert len(stored_norms(auto)) == 3


def stored_norms(files: TrialFiles) -> dict[str, bytes]:
    return {str(path.relative_to(files.norms)): path.read_bytes() for path in Path(files.norms).rglob("*.arrow")}


@pytest.mark.parametrize("norms", ["when_sampled", "off"])
@pytest.mark.parametrize("clip", ["individual", "filter"])
def test_clipping_that_needs_all_norms_refuses_to_do_without(clip: str, norms: Any, tmp_path: Path) -> None:
    spec = small_trial(norms=NormSpec(norms), clipping=clipping_by(clip))
    with pytest.raises(InvalidInput, match=f"is {norms}, but clipping method '{clip}' uses the norms of all"):
        train(spec, tmp_path)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("clip", ["flat", "dpsgd_f", "quantile"])
def test_without_norms_the_same_is_trained_and_none_are_stored(clip: str, tmp_path: Path) -> None:
    def trained(norms: NormSpec, folder: Path) -> tuple[dict[str, torch.Tensor], TrialFiles]:
        files = train(small_trial(norms=norms, clipping=Component(clip, {"bound": 0.7})), folder)[2]
        return torch.load(files.model, weights_only=True), files

    with_norms, _ = trained(NormSpec(2.0), tmp_path / "on")
    without, files = trained(NormSpec("off"), tmp_path / "off")
    assert all(torch.equal(with_norms[name], value) for name, value in without.items())
    assert not Path(files.norms).exists()
    assert not read_counters(files.private_training).courses


def test_a_median_norm_is_released_without_other_norms(tmp_path: Path) -> None:
    clip = Component("flat", {"bound": {"median_multiple": 1.0}})
    bounds = [
        train(small_trial(norms=NormSpec(norms), clipping=clip), tmp_path / str(norms))[0].initial_bound
        for norms in (1.0, "off")
    ]
    assert bounds[0] == bounds[1]


def test_norms_that_are_off_have_nothing_to_be_compared_with() -> None:
    with pytest.raises(InvalidInput, match=r"norms.exact_examples is 3, but norms.refreshes_per_epoch is off"):
        NormSpec("off", exact_examples=3)


def test_individual_clipping_never_exceeds_what_was_recorded(tmp_path: Path) -> None:
    """True contributions at every step stay below the snapshot before: the guarantee that its epsilons rest on."""
    spec = small_trial(
        epochs=6, norms=NormSpec(0.5, exact_examples=TRAIN_SIZE), clipping=Component("individual", {"bound": 3.0})
    )
    _, _, files = train(spec, tmp_path)
    recorded, exact = norms_of(files), NormShards(files.exact_norms).read(0)
    order, exact_order = np.argsort(recorded.example_ids), np.argsort(exact.example_ids)
    latest = np.searchsorted(recorded.steps, exact.steps, side="right") - 1
    allowed = recorded.contributions[order][:, latest]
    true = exact.contributions[exact_order]
    assert (true <= allowed * (1.0 + 1e-5)).all()  # both are rounded up alike
    assert (true < 0.9 * allowed).any()


CORRUPT = """
from dataclasses import replace
from dpsweep.workers.data import DataSpec, Source, load_source

def tumours() -> Source:
    source = load_source(DataSpec("breast_cancer"))
    features = source.train.features.float().clone()
    features[::7] = float("nan")
    features[1::7] = float("inf")
    return replace(source, train=replace(source.train, features=features))
"""


@pytest.mark.thinned(4)
@pytest.mark.parametrize("clip", sorted(set(clipping.CLIPPING) - {"none"}))
def test_examples_without_a_finite_gradient_weigh_nothing_and_are_counted(clip: str, tmp_path: Path) -> None:
    source = tmp_path / "corrupt.py"
    source.write_text(CORRUPT)
    data = replace(TUMOURS, name=f"{source}:tumours")
    _, _, files = train(small_trial(data=data, clipping=clipping_by(clip)), tmp_path / "trial")
    model = torch.load(files.model, weights_only=True)
    assert all(value.isfinite().all() for value in model.values())
    assert json.loads(Path(files.private_training).read_text())["non_finite_gradients"] > 0
    norms = norms_of(files)
    broken = ~np.isfinite(norms.norms)
    assert broken.any()
    assert (norms.contributions[broken] == 1.0).all()


def test_who_has_left_under_a_filter_is_counted_in_private_and_contributes_nothing_more(tmp_path: Path) -> None:
    spec = small_trial(
        epochs=6, norms=NormSpec("every_step"), clipping=Component("filter", {"bound": 2.0, "epsilon": 5.0})
    )
    _, trace, files = train(spec, tmp_path)
    departures = read_counters(files.private_training).departures
    assert sum(group.examples for group in departures) == TRAIN_SIZE
    for group in departures:
        assert len(group.left) == 6
        assert group.left == sorted(group.left)
    left = sum(group.left[-1] for group in departures)
    assert 0 < left < TRAIN_SIZE
    contributions = norms_of(files).contributions
    assert (contributions[:, -1] == 0.0).sum() >= sum(group.left[-2] for group in departures)
    prices = known(planned_mechanism(spec, TRAIN_SIZE).prices(1.0))
    assert trace.filter is not None
    costs = prices.cost(contributions * (1.0 - 2e-5)).sum(axis=1)  # recorded contributions are rounded up by 1e-5
    assert costs.max() <= trace.filter.budget
    assert costs.max() > 0.99 * trace.filter.budget


def course_by_hand(files: TrialFiles, group: int, bound: float) -> list[float]:
    """Mean loss, norm and what flat clipping takes off, of a group at the last snapshot, from the stored norms."""
    found = norms_of(files)
    mine, norms = found.groups == group, found.norms.astype(np.float64)[:, -1]
    removed = np.maximum(0.0, norms - bound)
    return [float(values[mine].mean()) for values in (found.losses[:, -1].astype(np.float64), norms, removed)]


def test_what_clipping_takes_off_the_gradients_of_each_group_is_counted_in_private(tmp_path: Path) -> None:
    """The bias term of paper D, Section 4.2: the mean of max(0, norm - C) over the examples of the group."""
    spec = small_trial(epochs=3, clipping=Component("flat", {"bound": 0.5}))
    _, _, files = train(spec, tmp_path)
    courses = read_counters(files.private_training).courses
    assert sum(course.examples for course in courses) == TRAIN_SIZE
    for course in courses:
        assert len(course.losses) == len(course.norms) == len(course.biases) == 3
        by_hand = course_by_hand(files, course.group, 0.5)
        assert [course.losses[-1], course.norms[-1], course.biases[-1]] == pytest.approx(by_hand, rel=1e-6)
        assert 0.0 < by_hand[2] < by_hand[1]


def test_without_clipping_nothing_is_taken_off(tmp_path: Path) -> None:
    _, _, files = train(small_trial(clipping=Component("none"), noise=NoiseSpec(0.0)), tmp_path)
    courses = read_counters(files.private_training).courses
    assert courses
    assert all(course.norms[-1] and course.biases[-1] == 0.0 for course in courses)


def test_clipping_by_layer_takes_off_the_norm_over_all_layers() -> None:
    """Layers of norms 3 and 4 at a bound of 1 each lose 2 and 3."""
    layers = torch.tensor([[3.0, 4.0]])
    examples = Examples(layers.norm(dim=1), torch.zeros(1, dtype=torch.int64), torch.arange(1), layers)
    rule = PerLayerClipping(2.0**0.5).decide(
        ClippingState(2.0**0.5), torch.zeros(0), PublicFacts(("all",), ("a", "b"), 1, 1)
    )
    assert rule.removed(examples).tolist() == [pytest.approx(13.0**0.5)]


def test_a_group_without_a_finite_gradient_or_a_loss_has_no_mean_of_it() -> None:
    examples = Examples(torch.tensor([1.0, torch.inf, 3.0]), groups=torch.tensor([0, 1, 2]), rows=torch.arange(3))
    measured = Measurement(examples, torch.tensor([0.5, 0.5, 0.25]))
    courses = new_courses(examples.groups)
    labels = torch.tensor([[1, IGNORED], [1, 1], [IGNORED, IGNORED]])
    note_epoch(courses, measured, ClipRule(2.0, lambda each: clip_factor(each.norms, 2.0)), labels)
    assert [course.losses for course in courses] == [[0.5], [None], [None]]
    assert [course.norms for course in courses] == [[1.0], [None], [3.0]]
    assert [course.biases for course in courses] == [[0.0], [None], [pytest.approx(1.0)]]


@pytest.mark.parametrize(("clipping", "kind"), [("dpsgd_f", "estimate"), ("individual", "output_specific")])
def test_random_allocation_takes_norms_of_all_examples(clipping: str, kind: str, tmp_path: Path) -> None:
    """An epoch is one round of the largest norm on record in it, and costs at most what the worst case does."""
    allocated = small_trial(sampling=SamplingSpec("random_allocation", 52), clipping=clipping_by(clipping), epochs=2)
    _, trace, _ = train(replace(allocated, norms=NormSpec("auto")), tmp_path)
    found = account_trial(job_of(str(tmp_path), 1e-5))
    assert (found.kind, found.lower) == (kind, None)
    assert 0.0 < found.upper.min() < found.upper.max() <= 1.1 * account(trace, 1e-5).epsilon


def test_random_allocation_has_no_filter(tmp_path: Path) -> None:
    allocated = small_trial(sampling=SamplingSpec("random_allocation", 52), clipping=clipping_by("filter"), epochs=1)
    with pytest.raises(UnsupportedMechanism, match="a filter limits the contributions of single examples to noisy"):
        train(replace(allocated, norms=NormSpec("auto")), tmp_path)
