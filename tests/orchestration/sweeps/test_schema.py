"""Sweep files and their grid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from dpsweep.accounting.errors import InvalidInput
from dpsweep.orchestration.comparison.rate_metrics import WORST_GROUP_METRICS
from dpsweep.orchestration.sweeps.grid import grid
from dpsweep.orchestration.sweeps.identity import LONGEST_KEY
from dpsweep.orchestration.sweeps.schema import EXAMPLES, parse_sweep
from dpsweep.orchestration.sweeps.sections import WORST_GROUPS
from dpsweep.orchestration.sweeps.text import parse_text, read_text
from dpsweep.workers.spec import Component
from tests.orchestration.sample_grids import SMALL, keys_of, small

SWEEPS = Path(__file__).parents[3] / "sweeps"


def test_baselines_come_first_and_run_once_per_seed() -> None:
    keys = [point.key for point in grid(parse_sweep(SMALL))]
    assert [key.rpartition("-")[0] for key in keys[:2]] == ["non-private-seed0", "non-private-seed1"]
    assert len(set(keys)) == len(keys) == 2 + 2 * 2 * 2
    assert "dpsgd_f-exponential-epsilon5-seed1" in {key.rpartition("-")[0] for key in keys}


def test_private_trials_name_the_baseline_that_shares_everything_else() -> None:
    text = small(epochs=[1, 2])
    points, keys = {point.key: point for point in grid(parse_sweep(text))}, keys_of(text)
    private = points[keys["flat-constant-epochs2-seed1"]]
    assert private.baseline == keys["non-private-epochs2-seed1"]
    baseline = points[private.baseline]
    assert (baseline.spec.epochs, baseline.spec.seed) == (2, 1)
    assert baseline.baseline is None
    assert not baseline.spec.is_private


def test_labels_hold_clipping_schedule_and_seed_and_whatever_else_varies() -> None:
    text = small(epochs=[1, 2])
    points = {point.key: point for point in grid(parse_sweep(text))}
    assert points[keys_of(text)["flat-constant-epochs1-seed0"]].labels == {
        "clipping": "flat",
        "schedule": "constant",
        "epochs": 1,
        "seed": 0,
    }


def test_values_that_look_alike_are_numbered() -> None:
    sweep = parse_sweep(small(data=[{"name": "digits", "split_seed": 0}, {"name": "digits", "split_seed": 1}]))
    keys = [point.key for point in grid(sweep)]
    assert len(set(keys)) == len(keys)


def test_own_files_are_labelled_without_their_folders(tmp_path: Path) -> None:
    models = [f"{tmp_path}/models.py:narrow", f"{tmp_path}/models.py:wide", f"{tmp_path}/other/models.py:wide", "mlp"]
    points = grid(parse_sweep(small(model=models, clipping="flat", noise="constant", seeds=0)))
    labels = ["models:narrow", "models:wide.1", "models:wide.2", "mlp"]
    assert [point.labels["model"] for point in points] == labels
    assert [point.spec.model.name for point in points] == models


def test_long_keys_are_cut_and_stay_apart(tmp_path: Path) -> None:
    folder = "/".join(["a" * 100] * 4)
    models = [{"name": "resnet20_gn", "initial_weights": f"/{folder}/{name}.pt"} for name in ("one", "two")]
    clipping = f"{folder}/mine.py:{'clip' * 40}"
    for found in (grid(parse_sweep(small(clipping=clipping))), grid(parse_sweep(small(model=models)))):
        assert len({point.key for point in found}) == len(found)
        for point in found:
            (tmp_path / point.key).mkdir()
    assert len(grid(parse_sweep(small(clipping=clipping)))[0].key) == LONGEST_KEY == 120


def test_baseline_may_have_its_own_optimizer() -> None:
    sweep = parse_sweep(small(baseline={"optimizer": {"name": "sgd", "learning_rate": 0.01}}))
    points = grid(sweep)
    assert points[0].spec.optimizer == Component("sgd", {"learning_rate": 0.01})
    assert points[2].spec.optimizer == Component("sgd", {"learning_rate": 0.1})


def test_noise_multipliers_may_be_given_instead_of_a_target() -> None:
    sweep = parse_sweep(small(privacy={"noise_multiplier": [1.0, 2.0], "delta": 1e-5}))
    point = next(point for point in grid(sweep) if "sigma2" in point.key)
    assert point.target_epsilon is None
    assert point.spec.noise.initial_noise_multiplier == 2.0


@pytest.mark.parametrize("file", sorted(SWEEPS.rglob("*.yaml")), ids=lambda file: file.stem)
def test_shipped_sweeps_are_valid(file: Path) -> None:
    sweep = parse_sweep(file.read_text(), str(file))
    assert sweep.name == file.stem
    assert any(point.baseline for point in grid(sweep)) or file.parent != SWEEPS, "papers compare private settings"


@pytest.mark.parametrize("place", ['name: "{}"', 'model: "{}"', 'model: {{name: mlp, "{}": 1}}', '"{}": 1'])
def test_half_a_character_is_refused_with_its_place_and_two_halves_are_one(place: str) -> None:
    with pytest.raises(
        InvalidInput, match=r"^sweep: line 1, column \d+: \\udfff is half of a character; write the whole"
    ):
        parse_sweep(place.format(r"\udfff"))
    assert parse_text(r'"\ud83d\ude00"') == "\U0001f600"


MISTAKES = {
    "unknown key": ({"clippings": "flat"}, r"unknown key 'clippings'; did you mean 'clipping'\?"),
    "key of a section": ({"delta": 1e-5}, r"unknown key 'delta'; it belongs to privacy: `privacy: \{delta: \.\.\.\}`"),
    "key of a component": ({"learning_rate": 1}, r"belongs to optimizer or clipping: `optimizer: \{name: sgd, lea"),
    "key of an inner section": ({"users": 1}, r"belongs to privacy.rows_per_user: `privacy: \{rows_per_user: \{users"),
    "part of a key": ({"epsilon": 1}, r"'epsilon'; did you mean privacy.target_epsilon\? it belongs to tune, "),
    "key of another tool": ({"max_grad_norm": 1}, r"a component holds its parameters: `clipping: \{name: flat, "),
    "key of the top level": (
        {"execution": {"epochs": 1}},
        r"execution: unknown key 'epochs'; it belongs to the top le",
    ),
    "unknown key in a section": ({"execution": {"thread": 1}}, r"execution: .*did you mean 'threads'\?"),
    "nobody to tell": ({"notify": "ftp://x"}, r"notify: 'ftp://x' is no address to post to"),
    "no host to tell": ({"notify": ["true", "http://"]}, r"notify: 'http://' is no address to post to"),
    "unlike any word": (
        {"sampling": {"method": "posson", "batch_size": 8}},
        r"sampling.method: did you mean 'poisson'\? Input should be .*, but got 'posson'",
    ),
    "unknown key of the data": ({"data": {"name": "digits", "kep": {8: 1}}}, r"data: .*did you mean 'keep'\?"),
    "word for a number": ({"epochs": "many"}, r"epochs: Input should be a valid integer"),
    "no epochs": ({"epochs": 0}, r"epochs: .*greater than or equal to 1, but got 0"),
    "empty axis": ({"seeds": []}, r"seeds: "),
    "nan": ({"privacy": {"target_epsilon": float("nan"), "delta": 1e-5}}, r".nan is not a finite number"),
    "infinity": (
        {"data": {"name": "digits", "keep": {8: float("inf")}}},
        r".inf is not a finite number",
    ),
    "an unknown attack": (
        {"attacks": {"loss_treshold": True}},
        r"attacks: unknown key 'loss_treshold'",
    ),
    "an unknown key of an attack": (
        {"attacks": {"rmia": {"reference_model": 4}}},
        r"attacks: unknown key 'reference_model' of rmia; did you mean 'reference_models'\?",
    ),
    "an attack that is a word": ({"attacks": {"loss_threshold": "yes"}}, r"attacks.loss_threshold: .*valid boolean"),
    "two levels": ({"privacy": {"target_epsilon": 1, "noise_multiplier": 1, "delta": 0.1}}, r"exactly one of"),
    "no level": ({"privacy": {"delta": 0.1}}, r"exactly one of"),
    "keys of asha for fifo": (
        {"scheduler": {"metric": "test_accuracy", "grace_epochs": 2}},
        r"scheduler: fifo stops no trial, and takes no grace_epochs, metric; leave it out, or take asha",
    ),
    "asha on test data": ({"scheduler": {"name": "asha", "metric": "test_accuracy"}}, r"accept_unaccounted_selection"),
    "asha without public data": ({"scheduler": {"name": "asha"}}, r"data.public_fraction"),
    "a name that is a path": ({"name": "../elsewhere"}, r"name: "),
    "a name that no folder can have": ({"name": "n" * 260}, r"name: .*at most 100 characters"),
}


@pytest.mark.parametrize(("changes", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistakes_are_named_on_one_line(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as caught:
        parse_sweep(small(**changes), "sweep.yaml")
    assert all(line.startswith("sweep.yaml: ") for line in str(caught.value).splitlines())


def test_attacks_are_those_of_every_trial_and_change_no_label() -> None:
    plain, attacked = (grid(parse_sweep(small(**changes))) for changes in ({}, {"attacks": {"loss_threshold": True}}))
    assert [point.labels for point in attacked] == [point.labels for point in plain]
    assert all(point.spec.attacks.loss_threshold for point in attacked)
    assert not any(point.spec.attacks.loss_threshold for point in plain)


def test_every_number_out_of_bounds_has_a_line_with_its_place_value_and_bound() -> None:
    """The bounds are those of `dpsweep.workers.spec`: here they are only read."""
    wrong = {
        "data": {"name": "digits", "test_fraction": 1, "split_seed": -1},
        "sampling": [{"method": "poisson", "batch_size": 64}, {"method": "fixed", "batch_size": 0}],
        "epochs": [1, 10_000_001],
        "seeds": -1,
        "norms": {"refreshes_per_epoch": 0, "rows_per_part": 0},
        "noise_source": "os_entropi",
        "execution": {"threads": 1025, "micro_batch_size": 0, "checkpoint_every_epochs": 1e-7},
        "privacy": {"target_epsilon": 0, "delta": 1, "budget": {"rho": 0}},
    }
    with pytest.raises(InvalidInput) as caught:
        parse_sweep(small(**wrong), "sweep.yaml")
    assert str(caught.value).splitlines() == [
        f"sweep.yaml: {place}"
        for place in (
            "data.test_fraction: Input should be less than 1, but got 1",
            "data.split_seed: Input should be greater than or equal to 0, but got -1",
            "sampling.1.batch_size: Input should be greater than or equal to 1, but got 0; or Input should be 'full', "
            "but got 0",
            "epochs.1: Input should be less than or equal to 10000000, but got 10000001",
            "seeds: Input should be greater than or equal to 0, but got -1",
            "privacy.delta: Input should be less than 1, but got 1",
            "privacy.target_epsilon: Input should be greater than 0, but got 0",
            "privacy.budget.rho: Input should be greater than 0, but got 0",
            "norms.refreshes_per_epoch: Input should be greater than 0, but got 0; or Input should be 'auto', "
            "'every_step', 'when_sampled' or 'off', but got 0",
            "norms.rows_per_part: Input should be greater than or equal to 1, but got 0",
            "noise_source: did you mean 'os_entropy'? Input should be 'seeded', 'os_entropy' or 'os_entropy_secure', "
            "but got 'os_entropi'",
            "execution.micro_batch_size: Input should be greater than or equal to 1, but got 0",
            "execution.threads: Input should be less than or equal to 1024, but got 1025",
            "execution.checkpoint_every_epochs: Input should be greater than or equal to 0.000001, but got 1e-07",
        )
    ]


def test_a_key_given_twice_is_refused() -> None:
    with pytest.raises(InvalidInput, match="'epochs' is given twice"):
        parse_sweep(f"{SMALL}\nepochs: 3\n", "sweep.yaml")


OTHER_TEXTS = {
    "cut short": ("a: [", "line 1, column 5: "),
    "a list": ("- 1", "expected a mapping"),
    "nothing": ("", "expected a mapping"),
    "words": ("just words", "expected a mapping"),
    "a tab": ("epochs:\n\t- 1", "line 2, column 1: "),
    "two documents": ("a: 1\n---\nb: 1", "expected a single document"),
    "control characters": ("a: \x00", "not valid YAML"),
    "another type": ("a: !!set {b}", "line 1, column 4: could not determine a constructor"),
    "a tag that lies": ("a: !!int b", "a tag does not fit"),
    "a list that a tag calls a number": ("a: !!float [b]", "a tag does not fit"),
    "a list that a tag calls a mapping": ("a: !!map [b]", "a tag does not fit"),
    "aliases of a long text": (f"a: [&b {100_000 * 'x'}{2_000 * ', *b'}]", "more than 100,000 values"),
    "an unknown alias": ("a: *b", "found undefined alias"),
    "an alias of itself": ("a: &b [*b]", "an alias holds itself"),
    "a deep nest": ("a: " + 2000 * "[" + 2000 * "]", "nested too deeply"),
    "aliases of aliases": (
        "\n".join(["a0: &a0 [1, 1, 1]", *(f"a{n}: &a{n} [{', '.join(9 * [f'*a{n - 1}'])}]" for n in range(1, 10))]),
        "more than 100,000 values",
    ),
    "merges of merges": (
        "\n".join(
            ["a0: &a0 {b: 1}", *(f"a{n}: &a{n} {{<<: [{', '.join(9 * [f'*a{n - 1}'])}]}}" for n in range(1, 10))]
        ),
        "more than 100,000 values",
    ),
    "a merge of itself": ("a: &b {<<: *b}", "an alias holds itself"),
    "anchors without end": ("&" * 5_000 + "a", "line 1, column 2"),
    "a list as a key": ("? [a]\n: 1", "unhashable key"),
}


@pytest.mark.parametrize(("text", "message"), OTHER_TEXTS.values(), ids=OTHER_TEXTS.keys())
def test_other_texts_are_refused_on_one_line(text: str, message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_sweep(text, "sweep.yaml")
    (line,) = str(caught.value).splitlines()
    assert line.startswith("sweep.yaml: ")
    assert message in line


def test_anchors_and_merges_are_understood() -> None:
    sweep = parse_sweep(
        small(clipping=None).replace("clipping: null", "clipping: [&a {name: flat, bound: 1.0}, {<<: *a, bound: 2}]")
    )
    assert sweep.clipping == (Component("flat", {"bound": 1.0}), Component("flat", {"bound": 2}))


def test_files_that_hold_no_sweep_are_refused(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes("name: Grüße".encode("latin-1"))
    (tmp_path / "large").write_bytes(b"#" * 10_000_000)
    for name, message in {
        "latin": "not UTF-8",
        "large": "more than 262,144 bytes",
        "missing": "No such file",
        ".": "is no file, but a folder",
    }.items():
        with pytest.raises(InvalidInput, match=message):
            read_text(tmp_path / name)


def test_selection_on_public_data_needs_no_acceptance() -> None:
    sweep = parse_sweep(small(data={"name": "digits", "public_fraction": 0.1}, scheduler={"name": "asha"}))
    assert sweep.scheduler.name == "asha"


def test_a_grid_of_a_million_is_refused_before_it_is_made() -> None:
    with pytest.raises(InvalidInput, match=r"up to 4,000,000 trials, but a sweep at most 10,000; shorten its lists"):
        grid(parse_sweep(small(seeds=list(range(1000)), epochs=list(range(1, 1001)), clipping=["flat", "dpsgd_f"])))


def test_the_metric_of_the_worst_group_may_be_short_and_changes_no_trial() -> None:
    short, full = (parse_sweep(small(compare={"worst_group": name})) for name in ("tpr", "true_positive_rate"))
    assert short.compare.worst_group == full.compare.worst_group == "true_positive_rate"
    assert parse_sweep(SMALL).compare.worst_group is None, "accuracy, or what the task has in its place"
    assert [point.key for point in grid(short)] == [point.key for point in grid(parse_sweep(SMALL))]
    assert {*WORST_GROUPS} == {*WORST_GROUP_METRICS}
    with pytest.raises(InvalidInput, match=r"compare\.worst_group: .*'accuracy'.* but got 'tprs'"):
        parse_sweep(small(compare={"worst_group": "tprs"}))


@pytest.mark.parametrize("place", EXAMPLES)
def test_a_missing_key_is_named_with_a_value_that_it_takes(place: str) -> None:
    key, whole = place.rpartition(".")[2], with_sections_of(place)
    parse_sweep(yaml.safe_dump(whole))
    *sections, _ = place.split(".")
    without = whole
    for name in sections:
        without = without[name]
    del without[key]
    with pytest.raises(InvalidInput) as refused:
        parse_sweep(yaml.safe_dump(whole))
    assert str(refused.value) == f"sweep: {place}: this key is missing; add it, such as `{key}: {EXAMPLES[place]}`"


def with_sections_of(place: str) -> dict[str, Any]:
    """A sweep of the keys that have no default, and of those in the section of ``place``, each with its example."""
    whole: dict[str, Any] = {}
    for each, example in EXAMPLES.items():
        *sections, key = each.split(".")
        if not sections or sections[0] in EXAMPLES or each.split(".")[0] == place.split(".")[0]:
            section = whole
            for name in sections:
                section = section.setdefault(name, {})
            section[key] = yaml.safe_load(example.replace("1e-5", "0.00001"))
    if "tune" in whole:
        whole["data"] = {"name": whole["data"], "public_fraction": 0.1}
    return whole
