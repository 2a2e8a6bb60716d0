"""Lists inside components and sections, paired axes, noise per schedule, and seeds of the data's splits."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from dpsweep.accounting.errors import InvalidInput
from dpsweep.orchestration.comparison.parameters import asked
from dpsweep.orchestration.sweeps.axes import LIST_VALUES, combinations_of, kinds_of
from dpsweep.orchestration.sweeps.components import COMPONENTS, parameters_of, types_of
from dpsweep.orchestration.sweeps.grid import GridPoint, grid, repeated_axes
from dpsweep.orchestration.sweeps.schema import SweepSpec, parse_sweep
from tests.orchestration.sample_grids import small

FEW = {"clipping": "flat", "noise": "constant", "seeds": 0, "privacy": {"noise_multiplier": 2.0, "delta": 1e-5}}


def sweep_of(**changes: object) -> SweepSpec:
    return parse_sweep(small(**{**FEW, **changes}))


def points_of(**changes: object) -> tuple[GridPoint, ...]:
    return grid(sweep_of(**changes))


class TestListsInside:
    def test_a_list_stands_for_any_value_of_a_component(self) -> None:
        points = points_of(
            optimizer={"name": "sgd", "learning_rate": [2, 8], "momentum": 0.9},
            clipping=["none", {"name": "flat", "bound": [0.5, 1, 2]}, {"name": "dpsgd_f", "bound": [1, 2]}],
        )
        assert len(points) == 2 + 2 * 5
        assert {point.spec.optimizer.params["learning_rate"] for point in points} == {2, 8}
        assert {point.spec.optimizer.params["momentum"] for point in points} == {0.9}
        assert [point.labels["clipping"] for point in points if point.is_private][:5] == [
            *("flat (bound 0.5)", "flat (bound 1)", "flat (bound 2)", "dpsgd_f (bound 1)", "dpsgd_f (bound 2)")
        ]
        assert {point.labels["optimizer"] for point in points} == {"sgd (learning rate 2)", "sgd (learning rate 8)"}

    def test_it_is_the_same_as_a_list_of_components(self) -> None:
        inside = points_of(clipping={"name": "quantile", "bound": [0.5, 1], "quantile": [0.3, 0.5]})
        outside = points_of(
            clipping=[{"name": "quantile", "bound": b, "quantile": q} for b in (0.5, 1) for q in (0.3, 0.5)]
        )
        assert inside == outside

    def test_sections_of_the_sweep_have_them_too(self) -> None:
        points = points_of(
            sampling={"method": ["poisson", "shuffle"], "batch_size": [32, 64]},
            norms={"refreshes_per_epoch": [1, "every_step"]},
            data={"name": "digits", "keep": {8: [0.1, 0.5]}, "test_fraction": [0.2, 0.3]},
        )
        assert len(points) == len({point.key for point in points}) == 4 * 2 * 4
        assert {point.spec.norms.refreshes_per_epoch for point in points} == {1.0, "every_step"}
        assert {point.labels["norms"] for point in points} == {"1", "every_step"}
        assert {point.spec.data.keep["8"] for point in points} == {0.1, 0.5}

    def test_what_takes_lists_keeps_one_list_and_varies_over_several(self) -> None:
        def hidden(value: object) -> list[Any]:
            return [model.params["hidden"] for model in sweep_of(model={"name": "mlp", "hidden": value}).model]

        assert hidden([64, 32]) == [[64, 32]]
        assert hidden([[64, 32], [16]]) == [[64, 32], [16]]
        assert hidden({"each": [[64], [32]]}) == [[64], [32]]
        table = {"name": "csv", "path": "x.csv", "label": "y", "features": ["a", "b"], "ranges": {"a": [0, 1]}}
        (data,) = sweep_of(data={**table, "categories": {"b": ["x", "z"]}, "classes": [0, 1]}).data
        assert (data.params["features"], data.params["ranges"]) == (["a", "b"], {"a": [0, 1]})
        assert (data.params["categories"], data.params["classes"]) == ({"b": ["x", "z"]}, [0, 1])

    def test_the_users_own_parameters_vary_by_each(self) -> None:
        own = {"name": "my_model.py:net", "sizes": [1, 2], "width": {"each": [8, 16]}}
        assert [model.params for model in sweep_of(model=own).model] == [
            {"sizes": [1, 2], "width": width} for width in (8, 16)
        ]

    def test_each_works_inside_a_parameter(self) -> None:
        bound = {"median_multiple": {"each": [1, 2]}, "noise_multiplier": 20}
        assert [each.params["bound"] for each in sweep_of(clipping={"name": "flat", "bound": bound}).clipping] == [
            {"median_multiple": multiple, "noise_multiplier": 20} for multiple in (1, 2)
        ]

    def test_mistakes_are_one_line(self) -> None:
        for changes, message in (
            ({"clipping": {"name": "flat", "bound": []}}, r"clipping\.bound is an empty list"),
            ({"sampling": {"method": "poisson", "batch_size": [0, 4]}}, r"sampling\.batch_size: .* but got 0"),
            ({"clipping": {"name": "flat", "bound": [1] * 200, "x": {"each": [1] * 200}}}, "40,000 combinations"),
        ):
            with pytest.raises(InvalidInput, match=message) as caught:
                sweep_of(**changes)
            assert "\n" not in str(caught.value)

    def test_the_type_of_every_parameter_of_every_component_is_known(self) -> None:
        for key, registry in COMPONENTS.items():
            for name, make in registry.items():
                assert list(types_of(key, name)) == [parameter.name for parameter in parameters_of(make)]
        assert types_of("clipping", "nonsense") == {}
        assert set(types_of("optimizer", "sgd")) == {"learning_rate", "momentum", "nesterov", "weight_decay"}
        assert set(types_of("noise", "blt")) == {"buffers"}, "a trial gives the steps apart"

    def test_lists_expand_as_the_types_of_the_parameters_say(self) -> None:
        """`kinds_of` says it without the components, which load torch."""
        probes = (["a", "b"], [["a"], ["b"]], {"x": ["a", "b"]}, {"x": [["a"], ["b"]]}, {"x": "a"})
        for axis, registry in COMPONENTS.items():
            for component in registry:
                types = types_of(axis, component)
                kinds = kinds_of(axis, component, list(types))
                for parameter, probe in itertools.product(types, probes):
                    given = {parameter: probe}
                    assert combinations_of(given, types, axis) == combinations_of(given, kinds, axis), (
                        axis,
                        component,
                        parameter,
                    )
                assert LIST_VALUES.get(axis, {}).get(component, {}).keys() <= types.keys()
            assert LIST_VALUES.get(axis, {}).keys() <= registry.keys()


class TestSplits:
    def test_the_seed_of_the_splits_is_an_axis_beside_the_seed_of_training(self) -> None:
        points = points_of(data={"name": "digits", "split_seed": [0, 1]}, seeds=[0, 1], clipping=["none", "flat"])
        assert len(points) == 8
        assert [(point.labels["split_seed"], point.labels["seed"]) for point in points[:4]] == [
            *((0, 0), (0, 1), (1, 0), (1, 1))
        ]
        assert all("data" not in point.labels for point in points)
        by_key = {point.key: point for point in points}
        for point in points[4:]:
            assert by_key[point.baseline or ""].spec.data == point.spec.data
            assert by_key[point.baseline or ""].spec.seed == point.spec.seed


class TestZip:
    def test_axes_vary_together(self) -> None:
        points = points_of(
            clipping=["none", {"name": "flat", "bound": [0.5, 1]}],
            optimizer={"name": "sgd", "learning_rate": [0.1, 8, 4]},
            seeds=[0, 1],
            zip=["clipping", "optimizer"],
        )
        found = [
            (point.spec.clipping.params.get("bound"), point.spec.optimizer.params["learning_rate"]) for point in points
        ]
        assert found == [(None, 0.1), (None, 0.1), (0.5, 8), (0.5, 8), (1, 4), (1, 4)]
        by_key = {point.key: point for point in points}
        for point in points[2:]:
            assert by_key[point.baseline or ""].spec.seed == point.spec.seed

    def test_shared_and_private_axes_and_several_groups(self) -> None:
        points = points_of(
            epochs=[1, 2],
            seeds=[5, 6],
            clipping=[{"name": "flat", "bound": [0.5, 1]}, "none"],
            noise=["constant", {"name": "exponential", "decay": 0.1}],
            privacy={"target_epsilon": [3, 8], "delta": 1e-5},
            zip=[["epochs", "seeds"], ["noise", "target_epsilon"]],
        )
        private = [point for point in points if point.is_private]
        assert len(points) - len(private) == 2
        assert len(private) == 2 * 2 * 2
        assert {(point.spec.epochs, point.spec.seed) for point in points} == {(1, 5), (2, 6)}
        assert {(point.labels["schedule"], point.target_epsilon) for point in private} == {
            ("constant", 3),
            ("exponential", 8),
        }

    def test_mistakes_are_one_line(self) -> None:
        for pairs, message in (
            (["clipping", "epoch"], "unknown axis 'epoch'; did you mean 'epochs'"),
            (["clipping", "seeds"], "need equally many values, but clipping has 1, seeds has 2"),
            (["clipping"], "needs at least two"),
            ([], "needs at least two"),
            ([["clipping", "noise"], ["noise", "epochs"]], "'noise' is named twice"),
        ):
            with pytest.raises(InvalidInput, match=message):
                sweep_of(zip=pairs, seeds=[0, 1])


class TestNoisePerSchedule:
    def test_a_schedule_may_give_its_own_noise(self) -> None:
        points = points_of(
            noise=[
                {"name": "constant", "noise_multiplier": [1, 2]},
                {"name": "exponential", "decay": 0.1, "noise_multiplier": 3},
            ],
            privacy={"delta": 1e-5},
        )
        found = [(point.spec.noise.schedule, point.spec.noise.initial_noise_multiplier) for point in points]
        assert [(schedule.name, schedule.params, sigma) for schedule, sigma in found] == [
            *(("constant", {}, 1.0), ("constant", {}, 2.0), ("exponential", {"decay": 0.1}, 3.0))
        ]
        assert [point.target_epsilon for point in points] == [None] * 3
        assert [point.labels["sigma"] for point in points] == [1.0, 2.0, 3.0]

    def test_it_is_not_calibrated_beside_others_that_are(self) -> None:
        points = points_of(
            noise=["constant", {"name": "constant", "noise_multiplier": 2}],
            privacy={"delta": 1e-5, "target_epsilon": [1, 3]},
        )
        assert [(point.target_epsilon, point.labels.get("sigma")) for point in points] == [
            *((1.0, None), (3.0, None), (None, 2.0))
        ]
        assert len({tuple(point.labels.items()) for point in points}) == 3
        assert "target_epsilon" not in asked(points[-1])

    def test_some_level_is_needed(self) -> None:
        with pytest.raises(InvalidInput, match=r"privacy: give exactly one of target_epsilon .* in every schedule"):
            sweep_of(privacy={"delta": 1e-5}, noise=["constant", {"name": "constant", "noise_multiplier": 2}])
        with pytest.raises(InvalidInput, match=r"noise\.noise_multiplier is 'x', but must be a number"):
            points_of(noise={"name": "constant", "noise_multiplier": "x"}, privacy={"delta": 1e-5})

    @pytest.mark.parametrize("level", ["target_epsilon", "noise_multiplier"])
    def test_a_level_that_no_trial_has_is_refused(self, level: str) -> None:
        with pytest.raises(InvalidInput, match=rf"privacy\.{level} applies to no trial"):
            sweep_of(privacy={"delta": 1e-5, level: 2}, noise={"name": "constant", "noise_multiplier": 2})


def test_labels_show_only_what_varies() -> None:
    clippings = [{"name": "dpsgd_f", "bound": bound, "count_memory": 0.9} for bound in (1, 2)]
    points = points_of(clipping=[*clippings, "flat"])
    assert [point.labels["clipping"] for point in points] == ["dpsgd_f (bound 1)", "dpsgd_f (bound 2)", "flat"]


def test_axes_that_vary_together_are_repeated_only_if_they_are_so_together() -> None:
    noise, batches = ["constant", "constant"], [{"method": "poisson", "batch_size": size} for size in (64, 128)]
    assert repeated_axes(parse_sweep(small(noise=noise))) == ("schedule",)
    assert repeated_axes(parse_sweep(small(noise=noise, sampling=batches, zip=["noise", "sampling"]))) == ()
    same = small(noise=noise, sampling=[batches[0]] * 2, zip=["noise", "sampling"])
    assert repeated_axes(parse_sweep(same)) == ("schedule", "sampling")
