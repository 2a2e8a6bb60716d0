"""A loop of one's own is a trial: the same steps, trace and epsilons, and it goes on bit for bit."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, TensorDataset

import dpsweep
from dpsweep.accounting import PoissonSampling, Trace, account, individual_epsilons, parse_schedule, planned_trace
from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.clipping import CLIPPING
from dpsweep.workers.data import load_dataset
from dpsweep.workers.models import build_model
from dpsweep.workers.spec import ExecutionSpec, SamplingSpec
from dpsweep.workers.training import private_training
from dpsweep.workers.training.private_training import PrivateTraining
from dpsweep.workers.trials.trained_model import load_model, load_trained
from tests.workers.devices import DEVICE
from tests.workers.own_clipping import NoisyCount
from tests.workers.trial_runs import norms_of, train
from tests.workers.trial_specs import TUMOURS, clipping_by, small_trial

FEATURES = torch.randn(120, 5, generator=torch.Generator().manual_seed(0))
LABELS = (FEATURES[:, 0] > 0).long()


def net() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.2), nn.Tanh(), nn.Linear(4, 2))


UNCALIBRATED: dict[str, Any] = {"noise": 1.0, "target_epsilon": None}


def engine_of(model: nn.Module, **changes: Any) -> PrivateTraining:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    given = {"sampling": 30, "epochs": 2, "delta": 1e-4, "target_epsilon": 3.0, "data": (FEATURES, LABELS), **changes}
    return PrivateTraining(model, nn.CrossEntropyLoss(), optimizer, **given)


def run(engine: PrivateTraining, until: int = 10**6) -> PrivateTraining:
    for batch in engine:
        engine.step(batch)
        if engine.steps >= until:
            break
    return engine


@pytest.mark.parametrize(
    ("clipping", "sampling"),
    [("flat", "poisson"), ("dpsgd_f", "shuffle"), ("individual", "fixed"), ("filter", "poisson")],
)
def test_a_loop_with_a_seed_is_the_trial_with_it(clipping: str, sampling: str, tmp_path: Path) -> None:
    spec = small_trial(clipping=clipping_by(clipping), sampling=SamplingSpec(sampling, 24))
    _, trace, files = train(spec, tmp_path)
    dataset = load_dataset(TUMOURS)
    engine = PrivateTraining(
        build_model(spec.model, dataset, spec.seed).to(DEVICE),
        "cross_entropy",
        {"name": spec.optimizer.name, **spec.optimizer.params},
        dataset,
        {"name": clipping, **spec.clipping.params},
        1.0,
        {"method": sampling, "batch_size": 24},
        epochs=spec.epochs,
        delta=spec.delta,
        norms=2.0,
        seed=spec.seed,
        execution=spec.execution,
    )
    run(engine)
    assert engine.trace == trace
    stored, trained = load_model(files, spec), engine._trainer.released_model()
    assert all(torch.equal(stored.state_dict()[name], value.cpu()) for name, value in trained.state_dict().items())
    np.testing.assert_allclose(engine._recorded()[1], norms_of(files).contributions, rtol=2e-7)


def test_what_the_caller_has_set_for_all_of_torch_changes_nothing(tmp_path: Path) -> None:
    """Notebooks do. A default device that holds no values would show in all that follows it."""
    spec, found = small_trial(), []
    rows = load_dataset(TUMOURS).test.features.numpy()
    for place, dtype, mode in (
        ("cpu", torch.float32, contextlib.nullcontext()),
        ("meta", torch.bfloat16, torch.inference_mode()),
    ):
        model = net().to(DEVICE)
        torch.set_default_device(place)
        torch.set_default_dtype(dtype)
        try:
            with mode:
                engine = run(engine_of(model, seed=1))
                epsilons = engine.epsilons().upper
                _, _, files = train(spec, tmp_path / place)
                outputs = load_trained(files, spec).logits(rows)
            assert (torch.get_default_device().type, torch.get_default_dtype()) == (place, dtype)
        finally:
            torch.set_default_device(None)
            torch.set_default_dtype(torch.float32)
        weights = torch.cat([each.detach().cpu().flatten() for each in model.parameters()])
        found.append((weights.numpy(), epsilons, outputs))
    for usual, elsewhere in zip(*found, strict=True):
        np.testing.assert_array_equal(elsewhere, usual)


def test_autocast_of_the_caller_is_refused() -> None:
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(InvalidInput, match=r"choose .* by autocast"),
    ):
        engine_of(net())


@pytest.mark.parametrize("name", [name for name in CLIPPING if name not in ("none", "flat", "dpsgd_f", "individual")])
def test_every_clipping_method_steps(name: str) -> None:
    groups = {"groups": np.arange(120) % 3, "group_names": ("a", "b", "c")}
    method = {"name": name, **({"epsilon": 5.0} if name == "filter" else {})}
    engine = run(engine_of(net(), clipping=method, **groups, **UNCALIBRATED), until=2)
    assert ((engine._recorded()[1] >= 0.0) & (engine._recorded()[1] <= 1.0)).all()
    assert engine.trace.steps == 2


def test_it_goes_on_bit_for_bit_from_a_file_and_leaves_the_callers_randomness_alone() -> None:
    first = net()
    engine = run(engine_of(first, **UNCALIBRATED), until=3)
    saved = io.BytesIO()
    torch.save(engine.state_dict(), saved)
    before = torch.get_rng_state()
    run(engine)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(7)
    second = net()
    again = engine_of(second, **UNCALIBRATED)
    saved.seek(0)
    again.load_state_dict(torch.load(saved, weights_only=True))
    second.eval()
    run(again)
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    assert np.array_equal(engine._recorded()[1], again._recorded()[1])
    assert (again.steps, len(again)) == (8, 8)
    other = net()
    run(engine_of(other, **UNCALIBRATED))
    assert not all(map(torch.equal, first.parameters(), other.parameters())), "each run has keys of its own"
    other.add_module("1", nn.Dropout(0.3))
    for strange, state in (
        (engine_of(net(), epochs=3, **UNCALIBRATED), engine.state_dict()),
        (engine_of(other, **UNCALIBRATED), engine.state_dict()),
        (again, other.state_dict()),
    ):
        with pytest.raises(dpsweep.InvalidInput, match="the state is that of another run"):
            strange.load_state_dict(state)


def test_a_state_is_not_loaded_over_data_that_changed_in_place() -> None:
    """The engine reads the caller's arrays, and repeated noise would cover the gradients of other rows."""
    features = FEATURES.numpy().copy()
    engine = engine_of(net(), data=(features, LABELS), **UNCALIBRATED)
    state = run(engine, until=2).state_dict()
    kept = float(features[3, 0])
    features[3, 0] = kept + 1
    with pytest.raises(dpsweep.InvalidInput, match="the state is that of another run: data, model"):
        engine.load_state_dict(state)
    features[3, 0] = kept
    engine.load_state_dict(state)
    assert run(engine).steps == 8


def test_a_state_of_another_processor_is_that_of_another_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would repeat the noise of steps since then at another rounding."""
    state = engine_of(net(), **UNCALIBRATED).state_dict()
    monkeypatch.setattr(private_training, "rounding_of", lambda device: "torch on another processor")
    with pytest.raises(dpsweep.InvalidInput, match="torch and the processor must be those that it began with"):
        engine_of(net(), **UNCALIBRATED).load_state_dict(state)


def of_code(factor: float, *, calls: bool) -> PrivateTraining:
    """Its loss differs by a factor, in the code of a function that it calls, or in a value that it reads."""
    model, read = net(), 1.0 if calls else factor
    edited: Callable[[Tensor], Tensor] = lambda losses: losses * 3  # noqa: E731
    helper: Callable[[Tensor], Tensor] = edited if calls and factor == 3 else lambda losses: losses * 2

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        return helper(read * nn.functional.cross_entropy(outputs, labels, reduction="none"))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return PrivateTraining(model, loss, optimizer, (FEATURES, LABELS), noise=1.0, sampling=30, epochs=2, delta=1e-4)


def test_a_state_does_not_go_on_with_edited_code_or_at_another_rounding() -> None:
    for calls in (True, False):
        state = run(of_code(2, calls=calls), until=1).state_dict()
        of_code(2, calls=calls).load_state_dict(state)
        with pytest.raises(dpsweep.InvalidInput, match="optimizer and their code"):
            of_code(3, calls=calls).load_state_dict(state)
    execution = ExecutionSpec(deterministic=False, threads=torch.get_num_threads())
    with pytest.raises(dpsweep.InvalidInput, match="rounded otherwise under the same noise"):
        engine_of(net(), execution=execution, **UNCALIBRATED).state_dict()


def test_defaults_are_poisson_batches_and_secret_keys_and_the_epsilon_so_far_rises() -> None:
    engine = engine_of(net())
    assert isinstance(engine.planned.epsilon, float)
    assert (engine.planned.kind, engine.planned.reasons, engine.epsilon) == ("guarantee", (), 0.0)
    (segment,) = run(engine, until=2).trace.segments
    assert segment.sampling == PoissonSampling(0.25)
    assert (engine.privacy().kind, engine.privacy().reasons) == ("estimate", ("end_followed_results",))
    two, largest = engine.epsilon, engine.epsilons().upper.max()
    assert 0.0 < two < run(engine).epsilon == engine.planned.epsilon <= 3.0
    assert largest <= two
    assert (engine.privacy().kind, engine.privacy().reasons) == ("guarantee", ())
    assert engine.privacy(4).epsilon > engine.epsilon_of([3, 4]).upper > engine.epsilons().upper[[3, 4]].max()
    correlated = engine_of(
        net(),
        noise={"name": "banded", "bands": 2, "noise_multiplier": 1.0},
        target_epsilon=None,
        sampling={"method": "cyclic_poisson", "batch_size": 30, "cycle_length": 2},
    )
    with pytest.raises(dpsweep.InvalidInput, match="no epsilon of single examples is proven"):
        run(correlated, until=1).epsilons()
    for strange in ([], [-1], [len(LABELS)]):
        with pytest.raises(dpsweep.InvalidInput, match="positions in the data, from 0 to 119"):
            engine.epsilon_of(strange)


class Rows(Dataset[tuple[Tensor, int]]):
    def __len__(self) -> int:
        return len(FEATURES)

    def __getitem__(self, at: int) -> tuple[Tensor, int]:
        return FEATURES[at], int(LABELS[at])


def test_data_of_many_kinds_are_the_same_data() -> None:
    kinds: list[Any] = [
        (FEATURES, LABELS),
        (FEATURES.double().numpy(), LABELS.int().numpy()),
        (FEATURES.tolist(), LABELS.tolist()),
        TensorDataset(FEATURES, LABELS),
        Rows(),
    ]
    assert len({engine_of(net(), data=data, **UNCALIBRATED).state_dict()["owner"] for data in kinds}) == 1


def test_what_makes_an_epsilon_an_estimate_is_named() -> None:
    own_method = NoisyCount()
    for changes, reason in (
        ({"seed": 1}, "known_seed"),
        ({"clipping": own_method}, "own_clipping"),
        ({"groups": np.repeat(["a", "b"], 60)}, "groups_from_rows"),
    ):
        assert engine_of(net(), **changes, **UNCALIBRATED)._reasons() == (reason,)


def test_a_batch_is_stepped_once_and_none_is_passed_over() -> None:
    engine = engine_of(net(), **UNCALIBRATED)
    batches = iter(engine)
    batch = next(batches)
    assert torch.equal(batch.features, FEATURES[batch.rows])
    assert torch.equal(batch.labels, LABELS[batch.rows])
    with pytest.raises(dpsweep.InvalidInput, match="the batch that the engine drew last"):
        engine_of(net(), **UNCALIBRATED).step(None)  # type: ignore[arg-type]
    assert (len(batch), batch.step, batch.epoch) == (len(batch.rows), 0, 0)
    with pytest.raises(dpsweep.InvalidInput, match="take the state after step"):
        engine.state_dict()
    with pytest.raises(dpsweep.InvalidInput, match="the batch of step 0 was drawn and not given to step"):
        next(batches)
    assert next(iter(engine)) is batch, "an interrupted loop meets it again"
    engine.step(batch)
    with pytest.raises(dpsweep.InvalidInput, match="the batch that the engine drew last, once"):
        engine.step(batch)


def test_a_fork_takes_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the key of the noise, and would cover other gradients with it."""
    engine = engine_of(net(), **UNCALIBRATED)
    monkeypatch.setattr("os.getpid", lambda: 1)
    with pytest.raises(dpsweep.InvalidInput, match="a fork of it has the same noise"):
        run(engine)
    assert engine.steps == 0


class Interrupted(torch.optim.SGD):
    """Is interrupted once, when the model has changed."""

    updates = 0

    def step(self, closure: Any = None) -> Any:
        super().step()
        self.updates += 1
        if self.updates == 2:
            raise KeyboardInterrupt


def test_an_update_that_is_interrupted_counts_and_its_batch_does_not_come_again() -> None:
    model = net()
    optimizer = Interrupted(model.parameters(), lr=0.1)
    engine = PrivateTraining(
        model, nn.CrossEntropyLoss(), optimizer, (FEATURES, LABELS), noise=1.0, sampling=30, epochs=2, delta=1e-4
    )
    with pytest.raises(KeyboardInterrupt):
        run(engine)
    assert (engine.steps, engine.trace.steps) == (2, 2)
    assert run(engine).steps == optimizer.updates == 8


def test_a_step_that_is_interrupted_before_its_update_comes_again_from_the_state_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its noisy answer, which a clipping bound would follow, is thrown away."""
    engine = engine_of(net(), **UNCALIBRATED, clipping="quantile")
    run(engine, until=2)
    before = engine.state_dict()["trainer"]["clipping"]
    decide = engine._trainer._decide

    def decided(answer: torch.Tensor) -> None:
        decide(answer)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine._trainer, "_decide", decided)
    with pytest.raises(KeyboardInterrupt):
        run(engine)
    monkeypatch.undo()
    assert engine.steps == 2
    assert engine._trainer.state()["clipping"] == before
    assert run(engine).steps == 8


def test_no_noise_follows_correlated_noise_that_was_made_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draw would come again at the next step."""
    engine = engine_of(
        net(),
        noise={"name": "banded", "bands": 2, "noise_multiplier": 1.0},
        target_epsilon=None,
        sampling={"method": "cyclic_poisson", "batch_size": 30, "cycle_length": 2},
    )
    state = run(engine, until=2).state_dict()

    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine._trainer._step_noise, "released", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(engine)
    monkeypatch.undo()
    for going_on in (run, PrivateTraining.state_dict):
        with pytest.raises(dpsweep.InvalidInput, match="which that of later steps would follow"):
            going_on(engine)
    engine.load_state_dict(state)
    assert run(engine).steps == 8


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"noise": 1.0}, "give a noise multiplier, or a schedule that target_epsilon calibrates"),
        ({"target_epsilon": None}, "give a noise multiplier, or a schedule that target_epsilon calibrates"),
        ({"noise": "validation:factor=0.5,period=1"}, "needs public data"),
        ({"clipping": "none"}, "without clipping the sensitivity is infinite"),
        ({"clipping": {"bound": 1.0}}, "a mapping with the key name"),
        ({"data": (FEATURES, LABELS[:5])}, "120 examples and 5 labels"),
        ({"data": TensorDataset(FEATURES, LABELS, LABELS)}, "data has 3 columns.* of each example as groups="),
        ({"data": "table.csv"}, "data is str; give a pair of features and labels"),
        ({"data": (np.full((120, 5), "a"), LABELS)}, "features are of type <U1"),
        ({"groups": np.arange(120), "group_names": ("a",)}, "indices of the 1 group_names"),
        ({"sampling": 4000}, "batch_size is 4000"),
        ({"sampling": {"method": "full"}}, "unknown sampling 'full'"),
        ({"sampling": {"method": "poisson"}}, "sampling 'poisson' needs batch_size"),
        ({"sampling": {"batch_size": 30}}, "sampling is None, but must be a name"),
        ({"clipping": torch.tensor(0.5)}, r"written as JSON: tensor\(0.5000\) is a Tensor; use numbers"),
        ({"execution": {"micro_batch_size": 8}}, r"execution is .*; give dpsweep\.workers\.spec\.ExecutionSpec"),
        (
            {"norms": "evry_step"},
            r"is 'evry_step', but: .* valid number.*; or did you mean 'every_step'\? .* or 'off'",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(dpsweep.InvalidInput, match=said):
        engine_of(net(), **changes)


def test_an_optimizer_of_other_parameters_and_a_model_that_mixes_rows_are_refused() -> None:
    model = net()
    optimizer = torch.optim.SGD(net().parameters(), lr=0.1)
    rest: dict[str, Any] = {"sampling": 30, "epochs": 1, "delta": 1e-4, "target_epsilon": 3.0}
    with pytest.raises(dpsweep.InvalidInput, match="the optimizer must hold the trainable parameters"):
        PrivateTraining(model, nn.CrossEntropyLoss(), optimizer, (FEATURES, LABELS), **rest)
    for refused, said in (
        (torch.optim.LBFGS(model.parameters()), "LBFGS asks for the loss of the batch again"),
        (torch.optim.SparseAdam(model.parameters()), "SparseAdam needs sparse gradients"),
        (torch.optim.Adam, "optimizer is .*; give one of torch.optim"),
    ):
        with pytest.raises(dpsweep.InvalidInput, match=said):
            PrivateTraining(model, nn.CrossEntropyLoss(), refused, (FEATURES, LABELS), **rest)  # type: ignore[arg-type]
    mixing = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    with pytest.raises(dpsweep.InvalidInput, match="BatchNorm"):
        run(engine_of(mixing, **UNCALIBRATED))


@pytest.mark.parametrize(
    ("model", "loss", "said"),
    [
        (nn.Linear, nn.CrossEntropyLoss(), "model is .*Linear.*; give a module"),
        (nn.LazyLinear(2), nn.CrossEntropyLoss(), "LazyLinear.* has no parameters yet"),
        (nn.Linear(5, 2), nn.CrossEntropyLoss, "loss is .*; give a function of outputs and labels, or a module"),
        (nn.Linear(5, 2), None, "loss is None"),
    ],
)
def test_a_class_or_nothing_in_place_of_a_part_is_refused_by_name(model: Any, loss: Any, said: str) -> None:
    optimizer: Any = {"name": "adam"}
    with pytest.raises(dpsweep.InvalidInput, match=said):
        PrivateTraining(model, loss, optimizer, (FEATURES, LABELS), epochs=1, delta=1e-4, noise=1.0)


def test_numbers_of_numpy_are_numbers() -> None:
    given: dict[str, Any] = {"sampling": np.int64(30), "clipping": np.float32(0.5), "epochs": np.int64(2)}
    plain = {"sampling": 30, "clipping": 0.5, "epochs": 2}
    assert engine_of(net(), **given).planned == engine_of(net(), **plain).planned


class ByVmap(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.vmap(super().forward)(x)
        return found


class Repeated(nn.Linear):
    """Computes a part again in the backward pass, which reads its own parameter."""

    def forward(self, x: Tensor) -> Tensor:
        repeated: Tensor = checkpoint(lambda x: torch.tanh(x @ self.weight.T), x, use_reentrant=False)
        return repeated + self.bias


def test_a_layer_within_a_transform_is_named() -> None:
    with pytest.raises(dpsweep.InvalidInput, match=r"within torch\.vmap"):
        run(engine_of(ByVmap(nn.Linear(5, 2)), **UNCALIBRATED))


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 computes the part again with the rows it had")
def test_a_part_that_is_computed_again_is_named() -> None:
    with pytest.raises(dpsweep.InvalidInput, match=r"torch\.utils\.checkpoint"):
        run(engine_of(Repeated(5, 2), **UNCALIBRATED))


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, pickle.dumps])
def test_no_two_engines_have_one_noise(copied: Callable[[PrivateTraining], object]) -> None:
    with pytest.raises(dpsweep.InvalidInput, match="not copied or pickled"):
        copied(engine_of(net(), **UNCALIBRATED))


@pytest.mark.parametrize("make", [net, lambda: nn.Linear(5, 2)])
def test_a_model_of_another_precision_than_its_features_is_refused_by_name(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(dpsweep.InvalidInput, match=r"parameters are torch\.float64, .* torch\.float32"):
        run(engine_of(make().double(), **UNCALIBRATED))


def test_account_and_individual_epsilons_have_one_default_method() -> None:
    """The example that contributes most pays what the run says."""
    trace = planned_trace(parse_schedule("constant", 1.0), PoissonSampling(0.1), 3, 10, dataset_size=100)
    assert isinstance(trace, Trace)
    worst, single = account(trace, 1e-5), individual_epsilons([0], [[1.0], [0.3]], trace, 1e-5)
    assert single.method == worst.accountant == "pld"
    assert single.upper[0] == pytest.approx(worst.epsilon, rel=1e-3)


def test_gradients_that_are_not_finite_weigh_nothing_and_are_counted() -> None:
    features = FEATURES.clone()
    features[:30] = float("nan")
    engine = run(engine_of(model := net(), data=(features, LABELS), sampling={"method": "shuffle", "batch_size": 30}))
    assert engine.non_finite_gradients == 30 * 2, "each of 30 rows once in each epoch"
    assert all(each.isfinite().all() for each in model.parameters())
    assert run(engine_of(net())).non_finite_gradients == 0


def test_a_delta_that_publishing_an_example_meets_is_warned_about() -> None:
    with pytest.warns(
        UserWarning, match="delta is 0.01, but with 120 training examples it should be well below"
    ) as said:
        engine_of(net(), delta=1e-2)
    assert [Path(each.filename).name for each in said] == [Path(__file__).name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine_of(net(), delta=1e-3)
