"""DP-PCA: its sensitivity on neighbouring data, what it finds, what it costs. Frozen features."""

from __future__ import annotations

import math
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.modules.module import register_module_forward_pre_hook

from dpsweep.accounting.errors import InvalidInput, StorageError
from dpsweep.accounting.mechanism.trace import GaussianRelease
from dpsweep.accounting.records.shards import NormShards
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.workers.data import Dataset, Tokens, load_dataset, make_split
from dpsweep.workers.data.images import IMAGENET_SCALING
from dpsweep.workers.noise.gaussian_sources import SeededNoise
from dpsweep.workers.spec import Component, DataSpec
from dpsweep.workers.training.history import Progress
from dpsweep.workers.training.preprocessing import (
    PREPROCESSING,
    State,
    bounded_sums,
    make_preprocessing,
    planned_releases,
    second_moments,
)
from dpsweep.workers.training.robust_ranges import ROUNDS, counts_between, magnitudes, scaled_by
from dpsweep.workers.trials.trial import run_trial
from tests.known import known
from tests.workers.data_folders import make_table
from tests.workers.devices import DEVICE
from tests.workers.trial_specs import small_trial
from tests.workers.user_modules import allowed


def noise(seed: int = 0) -> SeededNoise:
    return SeededNoise(seed, DEVICE)


def preprocess(component: Component, dataset: Dataset, noise: SeededNoise) -> tuple[Dataset, State]:
    """Fit and transform, as a trial does."""
    preprocessing = make_preprocessing(component)
    state = preprocessing.fit(dataset, noise)
    return preprocessing.transform(dataset, state), state


def rows_dataset(rows: np.ndarray) -> Dataset:
    labels = np.zeros(len(rows), dtype=np.int64)
    split = make_split(rows.astype(np.float32), labels)
    return Dataset("rows", split, split, None, ("a",), ("a",))


def in_blocks(*parts: np.ndarray) -> Callable[[], Iterator[torch.Tensor]]:
    return lambda: (torch.tensor(part) for part in parts)


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load_dataset(DataSpec("digits", public_fraction=0.1))


class TestSensitivity:
    @settings(max_examples=100, deadline=None)
    @given(
        rows=st.integers(1, 20),
        features=st.integers(1, 8),
        scale=st.sampled_from([1e-3, 0.3, 1.0, 50.0, 1e6]),
        seed=st.integers(0, 2**31),
    )
    def test_removing_an_example_moves_the_moments_by_at_most_one(
        self, rows: int, features: int, scale: float, seed: int
    ) -> None:
        values = scale * np.random.default_rng(seed).normal(size=(rows + 1, features))
        larger, smaller = rows_dataset(values), rows_dataset(values[:-1])
        zeroed = rows_dataset(np.concatenate([values[:-1], np.zeros((1, features))]))
        whole = second_moments(larger.train, larger)
        for neighbour in (smaller, zeroed):
            change = whole - second_moments(neighbour.train, neighbour)
            assert torch.linalg.matrix_norm(change) <= 1.0 + 1e-9

    def test_the_bound_is_attained(self) -> None:
        values = np.array([[0.1, 0.2], [300.0, -400.0]])
        larger, smaller = rows_dataset(values), rows_dataset(values[:-1])
        change = second_moments(larger.train, larger) - second_moments(smaller.train, smaller)
        assert torch.linalg.matrix_norm(change) == pytest.approx(1.0)

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_an_example_that_is_not_finite_counts_as_zero(self, value: float) -> None:
        with_it = rows_dataset(np.array([[0.5, 0.5], [value, 1.0]]))
        without = rows_dataset(np.array([[0.5, 0.5]]))
        assert torch.equal(second_moments(with_it.train, with_it), second_moments(without.train, without))

    def test_noise_is_symmetric_and_of_the_stated_size(self) -> None:
        dataset = rows_dataset(np.zeros((3, 60)))
        draws = []

        class Recorder(SeededNoise):
            def normal(self, shape: tuple[int, ...], std: float) -> torch.Tensor:
                drawn = super().normal(shape, std)
                draws.append((drawn, std))
                return drawn

        component = Component("dp_pca", {"dimensions": 5, "noise_multiplier": 3.0})
        _, state = preprocess(component, dataset, Recorder(0, DEVICE))
        ((drawn, std),) = draws
        assert std == 3.0
        assert drawn.shape == (60 * 61 // 2,)
        upper = torch.zeros(60, 60)
        upper[tuple(torch.triu_indices(60, 60))] = drawn.cpu()
        released = upper + upper.triu(1).T
        vectors = state["projection"]
        values = (vectors * (released @ vectors)).sum(0)
        assert torch.allclose(released @ vectors, values * vectors, atol=1e-3)
        assert (values[:-1] >= values[1:]).all()


class TestProjection:
    def test_finds_the_principal_subspace_when_noise_is_small(self, digits: Dataset) -> None:
        component = Component("dp_pca", {"dimensions": 3, "noise_multiplier": 1e-3})
        _, state = preprocess(component, digits, noise())
        _, vectors = torch.linalg.eigh(second_moments(digits.train, digits))
        overlap = state["projection"].double().T @ vectors[:, -3:]
        assert torch.linalg.svdvals(overlap).min() > 0.999

    def test_columns_are_orthonormal_whatever_the_noise(self, digits: Dataset) -> None:
        _, state = preprocess(Component("dp_pca", {"dimensions": 20, "noise_multiplier": 1e4}), digits, noise())
        assert torch.allclose(state["projection"].T @ state["projection"], torch.eye(20), atol=1e-5)

    def test_every_split_is_projected_alike(self, digits: Dataset) -> None:
        projected, state = preprocess(Component("dp_pca", {"dimensions": 10}), digits, noise())
        assert projected.feature_shape == (10,)
        for before, after in ((digits.train, projected.train), (digits.test, projected.test)):
            expected = digits.prepare(before.features).flatten(1) @ state["projection"]
            assert torch.allclose(projected.prepare(after.features), expected, atol=1e-5)
            assert torch.equal(before.example_ids, after.example_ids)
            assert torch.equal(before.groups, after.groups)
        assert known(projected.public).features.shape[1] == 10

    def test_the_test_split_is_not_looked_at(self, digits: Dataset) -> None:
        component = Component("dp_pca", {"dimensions": 10})
        _, state = preprocess(component, digits, noise())
        changed = replace(digits, test=known(digits.public))
        _, again = preprocess(component, changed, noise())
        assert torch.equal(state["projection"], again["projection"])

    def test_noise_decides_the_result(self, digits: Dataset) -> None:
        component = Component("dp_pca", {"dimensions": 10})
        states = [preprocess(component, digits, noise(seed))[1]["projection"] for seed in (0, 0, 1)]
        assert torch.equal(states[0], states[1])
        assert not torch.equal(states[0], states[2])

    def test_a_stored_state_repeats_the_transformation(self, digits: Dataset) -> None:
        component = Component("dp_pca", {"dimensions": 4})
        projected, state = preprocess(component, digits, noise())
        again = make_preprocessing(component).transform(digits, state)
        assert torch.equal(projected.train.features, again.train.features)


class TestCost:
    def test_is_known_without_data(self) -> None:
        assert planned_releases(Component("dp_pca")) == (GaussianRelease("dp_pca", 16.0),)
        assert planned_releases(Component("frozen_features")) == ()
        assert planned_releases(None) == ()

    def test_the_shape_that_the_model_sees_is_known_before_it_is_fitted(self, digits: Dataset) -> None:
        assert make_preprocessing(Component("dp_pca")).rehearse(digits).feature_shape == (60,)
        features = make_preprocessing(Component("frozen_features", {"network": "resnet50"}))
        assert features.rehearse(digits).feature_shape == (2048,)
        with pytest.raises(InvalidInput, match=r"needs pictures, but features have shape \(40,\)"):
            make_preprocessing(Component("frozen_features")).rehearse(rows_dataset(np.zeros((4, 40))))

    def test_every_preprocessing_states_its_releases(self) -> None:
        assert set(PREPROCESSING) == {"dp_pca", "frozen_features", "robust_ranges", "standardised", "text_features"}

    @pytest.mark.parametrize(
        ("params", "message"),
        [
            ({"noise_multiplier": 0.0}, "greater than 0"),
            ({"noise_multiplier": float("nan")}, "finite"),
            ({"dimensions": 0}, "at least 1"),
            ({"dimensions": 2.5}, "must be a whole number"),
            ({"sigma": 3}, "unknown key 'sigma'"),
        ],
    )
    def test_impossible_parameters(self, params: dict[str, float], message: str) -> None:
        with pytest.raises(InvalidInput, match=message):
            make_preprocessing(Component("dp_pca", params))

    def test_more_dimensions_than_features(self, digits: Dataset) -> None:
        with pytest.raises(InvalidInput, match="dimensions of dp_pca is 100, but an example has 64 features"):
            preprocess(Component("dp_pca", {"dimensions": 100}), digits, noise())


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "resnet18.pt"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        torch.save(torchvision.models.resnet18().state_dict(), path)
    return path


PICTURES = """
import numpy as np
from dpsweep.workers.data import Source, make_split

def pictures(examples=12, side=16):
    images = np.random.default_rng(0).integers(0, 256, (examples, 1, side, side), dtype=np.uint8)
    return Source("pictures", make_split(images, np.arange(examples) % 2), None, ("a", "b"), ("a", "b"))
"""


def load_own(data: DataSpec) -> Dataset:
    return load_dataset(data, allowed(data.name.rpartition(":")[0]))


class TestFrozenFeatures:
    @pytest.fixture
    def data(self, tmp_path: Path) -> DataSpec:
        (tmp_path / "mine.py").write_text(PICTURES)
        return DataSpec(f"{tmp_path}/mine.py:pictures", test_fraction=0.25)

    @pytest.fixture
    def hub(self, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A torch hub that has ResNet-18's weights under the name of torchvision's, and no network."""
        monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
        monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
        checkpoints = tmp_path / "torch" / "hub" / "checkpoints"
        checkpoints.mkdir(parents=True)
        published = torchvision.models.ResNet18_Weights.DEFAULT.url
        (checkpoints / published.rpartition("/")[2]).symlink_to(weights)
        return checkpoints

    def test_are_those_of_the_network_and_each_of_one_example(self, data: DataSpec, weights: Path) -> None:
        component = Component("frozen_features", {"network": "resnet18", "weights": str(weights), "size": 32})
        dataset = load_own(data)
        featured, _ = preprocess(component, dataset, noise())
        assert featured.feature_shape == (512,)
        one = replace(dataset, train=dataset.train.select(np.array([4])))
        alone, _ = preprocess(component, one, noise())
        assert torch.allclose(alone.train.features[0], featured.train.features[4], atol=1e-4)
        assert featured.notes[-1] == "features of a frozen resnet18, weights resnet18.pt"
        network = torchvision.models.resnet18()
        network.load_state_dict(torch.load(weights, weights_only=True))
        network.fc = torch.nn.Identity()
        resized = torch.nn.functional.interpolate(
            IMAGENET_SCALING(dataset.test.features.expand(-1, 3, -1, -1)), (32, 32), mode="bilinear"
        )
        with torch.no_grad():
            assert torch.allclose(network.eval()(resized), featured.test.features, atol=1e-4)

    def test_are_computed_in_full_precision(
        self, data: DataSpec, weights: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Else a GPU would round features by 1e-3, as the number of pictures beside them decides."""
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
        during = list[bool]()
        noted = register_module_forward_pre_hook(lambda *_: during.append(torch.backends.cudnn.allow_tf32))
        with noted:
            preprocess(
                Component("frozen_features", {"network": "resnet18", "weights": str(weights)}), load_own(data), noise()
            )
        assert set(during) == {False}
        assert torch.backends.cudnn.allow_tf32

    @pytest.mark.parametrize("cached", [False, True])
    def test_a_trial_trains_the_head_alone_and_resumes_to_the_same_bits(
        self, cached: bool, hub: Path, data: DataSpec, tmp_path: Path
    ) -> None:
        cache = str(tmp_path / "cache") if cached else None
        component = Component("frozen_features", {"network": "resnet18", "cache": cache})
        spec = small_trial(data=replace(data, params={"examples": 40}), preprocessing=component)

        def interrupt(progress: Progress) -> None:
            raise KeyboardInterrupt

        code = allowed(tmp_path / "mine.py")
        result = run_trial(spec, str(tmp_path / "whole"), code=code)
        assert result.parameters == 2 * 512 + 2
        assert "features of a frozen resnet18, weights imagenet" in result.notes
        with pytest.raises(KeyboardInterrupt):
            run_trial(spec, str(tmp_path / "resumed"), code=code, on_progress=interrupt)
        again = run_trial(spec, str(tmp_path / "resumed"), code=code)
        assert (again.history, again.evaluation) == (result.history, result.evaluation)
        whole, resumed = (TrialFiles(str(tmp_path / name)) for name in ("whole", "resumed"))
        assert Path(whole.model).read_bytes() == Path(resumed.model).read_bytes()
        assert set(torch.load(whole.model, weights_only=True)) == {"1.weight", "1.bias"}
        shards = [sorted(Path(trial.norms).rglob("*.arrow")) for trial in (whole, resumed)]
        assert [file.read_bytes() for file in shards[0]] == [file.read_bytes() for file in shards[1]]
        assert NormShards(whole.norms).examples == 30

    def test_a_cache_spares_the_network_and_is_private(self, hub: Path, data: DataSpec, tmp_path: Path) -> None:
        dataset, cache = load_own(data), tmp_path / "cache"
        component = Component("frozen_features", {"network": "resnet18", "cache": str(cache)})
        computed, _ = preprocess(component, dataset, noise())
        kept = sorted(cache.iterdir())
        assert len(kept) == 2  # the training and the test split
        assert {stat.S_IMODE(file.stat().st_mode) for file in kept} == {0o600}
        before = [file.stat().st_mtime_ns for file in kept]
        found, _ = preprocess(component, dataset, noise())
        assert torch.equal(found.train.features, computed.train.features)
        assert [file.stat().st_mtime_ns for file in kept] == before
        for file in kept:
            file.write_bytes(file.read_bytes()[:-1])
        repaired, _ = preprocess(component, dataset, noise())
        assert torch.equal(repaired.test.features, computed.test.features)
        preprocess(replace(component, params={**component.params, "size": 24}), dataset, noise())
        assert len(list(cache.iterdir())) == 4

    def test_without_network_the_missing_file_is_named(self, hub: Path, data: DataSpec) -> None:
        published = torchvision.models.ResNet50_Weights.DEFAULT.url
        file = hub / published.rpartition("/")[2]
        with pytest.raises(InvalidInput) as caught:
            preprocess(Component("frozen_features", {"network": "resnet50"}), load_own(data), noise())
        assert f"the weights of resnet50 are not at {file}, and {published} cannot be downloaded" in str(caught.value)
        assert "put the file there, or name another by `weights`" in str(caught.value)

    def test_a_file_of_other_weights_is_named(self, data: DataSpec, tmp_path: Path) -> None:
        path = tmp_path / "weights.pt"
        component = Component("frozen_features", {"network": "resnet18", "weights": str(path)})
        path.write_bytes(b"")
        with pytest.raises(InvalidInput, match=f"{path} cannot be loaded"):
            preprocess(component, load_own(data), noise())
        torch.save(torch.nn.Linear(2, 2).state_dict(), path)
        with pytest.raises(InvalidInput, match=f"{path} does not hold the weights of torchvision's resnet18"):
            preprocess(component, load_own(data), noise())

    def test_mistakes_are_named(self, digits: Dataset, weights: Path) -> None:
        with pytest.raises(InvalidInput, match="unknown network 'vgg17'; did you mean 'vgg16'"):
            make_preprocessing(Component("frozen_features", {"network": "vgg17"}))
        with pytest.raises(InvalidInput, match=r"there is no file .*absent\.pt"):
            make_preprocessing(Component("frozen_features", {"weights": "absent.pt"}))
        with pytest.raises(InvalidInput, match="needs pictures"):
            preprocess(Component("frozen_features"), rows_dataset(np.zeros((4, 3))), noise())
        with pytest.raises(InvalidInput, match="8 x 8 pixels are too small for vgg16; set `size` to 32 or more"):
            make_preprocessing(Component("frozen_features")).rehearse(digits)

    @pytest.mark.parametrize(
        ("params", "message"),
        [
            ({"network": ["resnet18"]}, r"network of frozen_features is \['resnet18'\], but must be text"),
            ({"weights": 3}, "weights of frozen_features is 3, but must be text; put it in quotes"),
            ({"cache": 3}, "cache of frozen_features is 3, but must be text; put it in quotes"),
            ({"weights": None}, "weights of frozen_features is None, but must be text"),
            ({"size": 8.5}, "size of frozen_features is 8.5"),
        ],
    )
    def test_parameters_of_the_wrong_type_are_named(self, params: dict[str, object], message: str) -> None:
        with pytest.raises(InvalidInput, match=message):
            make_preprocessing(Component("frozen_features", params))

    def test_an_impossible_cache_is_named(self, hub: Path, data: DataSpec, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("no folder")
        for cache in (tmp_path / "file", tmp_path / "file" / "below"):
            frozen = make_preprocessing(Component("frozen_features", {"network": "resnet18", "cache": str(cache)}))
            with pytest.raises(InvalidInput, match=r"is no folder that can be written: see .*file, or name another"):
                frozen.rehearse(load_own(data))
        component = Component("frozen_features", {"network": "resnet18", "cache": "/proc/absent"})
        with pytest.raises(StorageError, match="cannot write /proc/absent/"):
            preprocess(component, load_own(data), noise())


def test_a_rehearsal_has_the_shape_and_type_of_the_real_thing(digits: Dataset) -> None:
    pca = make_preprocessing(Component("dp_pca", {"dimensions": 5}))
    split = make_split(np.arange(48).reshape(4, 12), np.zeros(4, dtype=np.int64))
    for dataset in (digits, Dataset("tokens", split, split, None, ("a",), ("a",), Tokens())):
        real = pca.transform(dataset, pca.fit(dataset, noise()))
        rehearsed = pca.rehearse(dataset)
        assert rehearsed.train.features.shape == real.train.features.shape
        assert rehearsed.train.features.dtype == real.train.features.dtype == torch.float32


@pytest.mark.parametrize("name", ["robust_ranges", "standardised"])
def test_columns_are_refused_where_a_category_stands_among_them(tmp_path: Path, name: str) -> None:
    """Who moves a column from `unscaled` to `categories` would have its one-hot features scaled, and numbers not."""
    data = {
        "path": str(make_table(tmp_path / "people.csv")),
        "label": "income",
        "classes": ["high", "low"],
        "categories": {"job": ["baker", "smith", "tailor"]},
        "ranges": {"age": [18, 80]},
    }
    mixed = load_dataset(DataSpec("csv", {**data, "features": ["job", "age"]}))
    ordered = load_dataset(DataSpec("csv", {**data, "features": ["age", "job"]}))
    for dataset, columns, place in ((mixed, 1, 1), (mixed, 4, 1), (ordered, 2, 2)):
        preparing = make_preprocessing(Component(name, {"columns": columns}))
        with pytest.raises(InvalidInput, match=f"is {columns}, but feature {place} of a row is no number; name all"):
            preparing.rehearse(dataset)
    make_preprocessing(Component(name, {"columns": 1})).rehearse(ordered)
    make_preprocessing(Component(name, {})).rehearse(mixed)  # all features, as asked for


class TestRobustRanges:
    """Numbers are on a scale found from noisy counts, whatever their magnitude; the release costs what it says."""

    RANGES = Component("robust_ranges", {"noise_multiplier": 0.5})

    def heavy(self) -> Dataset:
        drawn = np.random.default_rng(0)
        columns = [
            drawn.lognormal(0.8, 0.5, 4000),
            drawn.random(4000) < 0.3,
            1990 + drawn.random(4000) * 30,
            1e9 + 1e6 * drawn.standard_normal(4000),
            np.where(drawn.random(4000) < 0.9, 0.0, drawn.lognormal(8.0, 1.0, 4000)),
        ]
        return rows_dataset(np.column_stack([column.astype(float) for column in columns]))

    def test_numbers_of_any_magnitude_are_centred_and_have_deviation_1(self) -> None:
        prepared, state = preprocess(self.RANGES, self.heavy(), noise())
        features = prepared.train.features
        assert features.mean(0).abs().max() < 0.2
        assert 0.6 < float(features.std(0).min()) <= float(features.std(0).max()) < 1.6
        assert features.abs().max() < 13.0, "the tails are logarithmic"
        rows = self.heavy().train.features[:, 0]
        beyond = (rows < state["low"][0]) | (rows > state["high"][0])
        assert 0.03 < float(beyond.float().mean()) < 0.2

    def test_the_scale_is_increasing(self) -> None:
        state = {name: torch.tensor([each]) for name, each in (("low", 2.0), ("high", 4.0), ("mean", 0.5))}
        places = torch.tensor([[-1e30], [0.0], [2.0], [3.0], [4.0], [6.0], [1e30]])
        scaled = scaled_by({**state, "deviation": torch.tensor([0.5])}, places.clone())[:, 0]
        assert scaled.tolist() == pytest.approx(
            [-7.0, -2 * (1.5 + math.log(3)), -3.0, -1.0, 1.0, 1 + 2 * math.log(3), 5.0]
        )

    def test_one_row_moves_the_counts_of_a_round_by_at_most_the_sensitivity(self) -> None:
        drawn = np.random.default_rng(1)
        rows = drawn.standard_normal((50, 7)) ** 5
        edges = torch.sort(torch.randn(7, 9, dtype=torch.float64), 1).values
        for record in (rows[:1], np.ones((1, 7)), np.full((1, 7), 1e300), np.full((1, 7), np.nan)):
            for ends in (edges, magnitudes().expand(7, -1).contiguous()):
                one = counts_between(in_blocks(rows), ends)
                both = counts_between(in_blocks(rows, record), ends)
                assert float(torch.linalg.vector_norm(both - one)) <= 7**0.5 + 1e-12

    def test_the_noise_of_all_rounds_is_that_of_the_release(self) -> None:
        """Rounds with noise multipliers m cost what one with 1 / sqrt(sum of 1 / m^2) costs."""
        stds: list[float] = []

        class Recorder(SeededNoise):
            def normal(self, shape: tuple[int, ...], std: float) -> torch.Tensor:
                stds.append(std)
                return super().normal(shape, std)

        preprocess(self.RANGES, self.heavy(), Recorder(0, DEVICE))
        assert len(stds) == ROUNDS
        assert sum(1.0 / std**2 for std in stds) == pytest.approx(1.0 / 0.5**2)
        assert planned_releases(self.RANGES) == (GaussianRelease("robust_ranges", 0.5),)

    def test_columns_after_the_numbers_stay_as_they_are(self) -> None:
        component = Component("robust_ranges", {"columns": 1, "noise_multiplier": 0.5})
        prepared, state = preprocess(component, self.heavy(), noise())
        assert state["low"].shape == (1,)
        assert torch.equal(prepared.train.features[:, 1:], self.heavy().train.features[:, 1:].float())

    @pytest.mark.parametrize("multiplier", [1.0, 100.0])
    def test_noise_that_hides_the_rows_does_no_harm_but_to_the_ranges(self, multiplier: float) -> None:
        component = Component("robust_ranges", {"noise_multiplier": multiplier})
        few = rows_dataset(np.random.default_rng(0).standard_normal((20, 30)))
        prepared, state = preprocess(component, few, noise())
        assert prepared.train.features.isfinite().all()
        assert (state["low"] < state["high"]).all()

    @pytest.mark.parametrize("params", [{"columns": 0}, {"noise_multiplier": 0.0}, {"outside": 0.5}, {"columns": 9}])
    def test_what_is_impossible_is_refused(self, params: dict[str, float]) -> None:
        with pytest.raises(InvalidInput, match="robust_ranges"):
            preprocess(Component("robust_ranges", params), self.heavy(), noise())


class TestStandardised:
    """Numbers in [0, 1] are centred, and divided by one deviation; the release costs what it says."""

    def narrow(self, rows: int = 2000) -> Dataset:
        drawn = np.random.default_rng(0)
        return rows_dataset(drawn.normal([0.2, 0.5, 0.9], [0.05, 0.1, 0.05], (rows, 3)))

    def test_means_and_the_common_deviation_are_found(self) -> None:
        prepared, _ = preprocess(Component("standardised", {"noise_multiplier": 1.0}), self.narrow(), noise())
        assert prepared.train.features.mean(0).abs().max() < 0.1
        assert float((prepared.train.features**2).mean()) == pytest.approx(1.0, abs=0.05)

    def test_one_row_moves_the_sums_by_at_most_1(self) -> None:
        drawn = np.random.default_rng(1)
        rows = drawn.random((9, 5))
        records = ([0.0] * 5, [1.0] * 5, [0.0, 1.0, 0.0, 1.0, 0.5], [math.nan] * 5, [-7.0, 9.0, 0.0, 1.0, math.inf])
        for record in records:
            one = bounded_sums(in_blocks(rows), 5)
            both = bounded_sums(in_blocks(rows, np.array([record])), 5)
            assert float(torch.linalg.vector_norm(both - one)) <= 1.0 + 1e-12

    def test_the_noise_has_the_stated_size(self) -> None:
        class Recorder(SeededNoise):
            def normal(self, shape: tuple[int, ...], std: float) -> torch.Tensor:
                assert (shape, std) == ((4,), 3.0)
                return super().normal(shape, std)

        component = Component("standardised", {"noise_multiplier": 3.0})
        preprocess(component, self.narrow(), Recorder(0, DEVICE))
        assert planned_releases(component) == (GaussianRelease("standardised", 3.0),)

    def test_noise_that_hides_the_rows_leaves_finite_numbers(self) -> None:
        prepared, state = preprocess(Component("standardised", {"noise_multiplier": 1e4}), self.narrow(20), noise())
        assert prepared.train.features.isfinite().all()
        assert 0.0 <= float(state["mean"].min()) <= float(state["mean"].max()) <= 1.0

    @pytest.mark.parametrize("params", [{"columns": 0}, {"noise_multiplier": 0.0}, {"columns": 4}])
    def test_what_is_impossible_is_refused(self, params: dict[str, float]) -> None:
        with pytest.raises(InvalidInput, match="standardised"):
            preprocess(Component("standardised", params), self.narrow(), noise())
