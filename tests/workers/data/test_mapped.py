"""Tokens in memory-mapped files: the same examples, written once, and in memory only while they are used."""

from __future__ import annotations

import stat
import threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.records.encryption import KEY_VARIABLE
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.workers.data import cifar, encoder, load_dataset, mapped
from dpsweep.workers.machine.folders import NODE_FOLDER
from dpsweep.workers.spec import Component, DataSpec
from dpsweep.workers.training.batch_gradients import TrainingData
from dpsweep.workers.trials.trial import run_trial
from tests.warm import FORKS
from tests.workers.data_folders import make_cifar_jpegs, make_image_folder, make_texts, make_tokenizer
from tests.workers.trial_specs import small_trial

OBJECTIVES: dict[str, dict[str, Any]] = {
    "label": {"objective": "label", "label": "mood", "classes": ["neg", "pos"]},
    "masked_lm": {"objective": "masked_lm", "mask_seed": 7},
    "causal_lm": {"objective": "causal_lm"},
}


def spec_of(folder: Path, objective: str, cache: Path | None, rows: int = 9000, **cuts: Any) -> DataSpec:
    """More rows than a selection may have in memory."""
    path, tokenizer = folder / "texts.jsonl", folder / "tokenizer.json"
    if not path.exists():
        make_texts(path, rows)
        make_tokenizer(tokenizer)
    params = {"path": str(path), "text": "body", "tokenizer": str(tokenizer), "max_length": 8, "group": "lang"}
    given = {**params, "groups": ["de", "en"], **OBJECTIVES[objective], **({"cache": str(cache)} if cache else {})}
    return DataSpec("text", given, **{"test_fraction": 0.2, "public_fraction": 0.2, "keep": {"en": 0.9}, **cuts})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("texts")


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_examples_are_those_in_memory(objective: str, folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "tokens"
    there, here = (load_dataset(spec_of(folder, objective, each)) for each in (cache, None))
    assert there.digest() == here.digest()
    assert there.train.place is not None
    assert there.train.features.shape == here.train.features.shape
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) & 0o077 for file in cache.glob("*.[01]")} == {0}
    assert not list(cache.glob("*.unfinished"))


def test_they_are_written_once_for_all_that_read_them(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four that load at once, one encodes; a later one finds the files. Another seed has files of its own."""
    spec, encoded = spec_of(folder, "masked_lm", tmp_path / "tokens"), []
    encode = encoder.TextEncoder.encode

    def counted(self: Any, some: Any) -> Any:
        encoded.append(len(some))
        return encode(self, some)

    monkeypatch.setattr(encoder.TextEncoder, "encode", counted)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: load_dataset(spec).digest(), range(4)))
    assert len({*found, load_dataset(spec).digest()}) == 1
    assert sum(encoded) == 9000
    other = replace(spec, params={**spec.params, "mask_seed": 8})
    assert load_dataset(other).digest() != found[0]
    assert sum(encoded) == 18000


def test_pictures_are_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, decoded = make_cifar_jpegs(tmp_path), []
    decode = cifar._decode

    def counted(*picture: Any) -> Any:
        decoded.append(picture[2])
        return decode(*picture)

    monkeypatch.setattr(cifar, "_decode", counted)
    found = [
        load_dataset(DataSpec("cifar10", {"root": str(root), **({"cache": str(tmp_path / "c")} if cached else {})}))
        for cached in (True, True, False)
    ]
    assert len({each.digest() for each in found}) == 1
    assert len(decoded) == 2 * 80
    assert found[1].train.place is not None


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that an embedded run has on its node."""
    monkeypatch.setenv(NODE_FOLDER, str(tmp_path / "run" / "data"))
    (tmp_path / "run").mkdir(mode=0o700)
    return tmp_path / "run" / "data"


def test_trials_of_a_run_share_what_is_decoded(tmp_path: Path, node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures of CIFAR-10, folders of pictures and texts, each once; the examples are those without sharing."""
    made = tmp_path / "sources"
    made.mkdir()
    make_image_folder(made / "pictures")
    sources = [
        DataSpec("cifar10", {"root": str(make_cifar_jpegs(made))}),
        DataSpec("image_folder", {"path": str(made / "pictures"), "size": 8}),
        spec_of(made, "causal_lm", None, rows=50, keep={}),
    ]
    shared = [load_dataset(source) for source in sources]
    files = {file: file.stat().st_mtime_ns for file in node.iterdir()}
    assert len([file for file in files if file.suffix != ".lock"]) >= 4
    assert {stat.S_IMODE(file.stat().st_mode) for file in files if file.suffix != ".lock"} == {0o600}
    for decode in (
        "dpsweep.workers.data.cifar._decode",
        "dpsweep.workers.data.images.read_image",
        "dpsweep.workers.data.encoder.TextEncoder.encode",
    ):
        monkeypatch.setattr(decode, None)
    again = [load_dataset(source) for source in sources]
    assert {file: file.stat().st_mtime_ns for file in node.iterdir()} == files
    monkeypatch.undo()
    alone = [load_dataset(source) for source in sources]
    assert [each.digest() for each in shared] == [each.digest() for each in again] == [each.digest() for each in alone]
    assert all(each.train.place is None for each in shared), "only what is decoded is mapped, not each selection of it"


@pytest.mark.parametrize("why", ["a key", "no room", "no folder"])
def test_nothing_is_shared_where_it_may_not_or_cannot_be(
    why: str, tmp_path: Path, node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = DataSpec("cifar10", {"root": str(make_cifar_jpegs(tmp_path))})
    if why == "a key":
        monkeypatch.setenv(KEY_VARIABLE, "11" * 32)
    elif why == "no room":
        monkeypatch.setattr(mapped, "_ROOM", 1e15)
    else:
        node.parent.rmdir()
    assert len(load_dataset(source).train)
    assert not node.exists()


@pytest.mark.long
def test_a_trial_has_the_same_bits(folder: Path, tmp_path: Path) -> None:
    model = Component("language_model", {"width": 4, "depth": 1, "heads": 1})
    weights = []
    for cache in (tmp_path / "tokens", None):
        data = spec_of(folder, "causal_lm", cache, keep={"en": 0.5})
        spec = small_trial(data=data, model=model, loss=Component("causal_lm"), epochs=1)
        spec = replace(spec, sampling=replace(spec.sampling, batch_size=500))
        root = tmp_path / f"trial-{cache is None}"
        result = run_trial(spec, str(root))
        weights.append((torch.load(TrialFiles(str(root)).model, weights_only=True), result.evaluation))
    (mapped, first), (held, second) = weights
    assert first == second
    assert all(torch.equal(mapped[name], values) for name, values in held.items())


def test_data_without_room_on_the_device_go_over_batch_by_batch(folder: Path) -> None:
    dataset, device = load_dataset(spec_of(folder, "causal_lm", None)), torch.device("cpu")
    near, far = (TrainingData(dataset, device, room) for room in (1e9, 0.0))
    for one, other in zip(near.inputs(torch.tensor([5, 0, 5])), far.inputs(torch.tensor([5, 0, 5])), strict=True):
        assert torch.equal(one, other)


def peak_of_its_own(path: Path, tokenizer: Path, cache: Path | None) -> float:
    """Of a process that takes all examples in batches, the most memory that no file backs, in MB."""
    peak, ended = [anonymous_megabytes()], threading.Event()

    def watch() -> None:
        while not ended.wait(0.002):
            peak[0] = max(peak[0], anonymous_megabytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    params = {"path": str(path), "text": "body", "tokenizer": str(tokenizer), "max_length": 512}
    own = {} if cache is None else {"cache": str(cache)}
    dataset = load_dataset(DataSpec("text", {**params, "objective": "causal_lm", **own}, test_fraction=0.5))
    data = TrainingData(dataset, torch.device("cpu"), float("inf"))
    for rows in torch.randperm(len(data)).split(256):
        data.inputs(rows)
    dataset.digest()
    ended.set()
    watcher.join()
    return peak[0]


def anonymous_megabytes() -> float:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) / 1024


@pytest.mark.long
def test_memory_does_not_grow_with_the_texts(tmp_path: Path) -> None:
    """10,000 more texts of 512 tokens and as many labels are 41 MB; what the process holds of its own grows by less
    than a quarter, and without `cache` by more. Pages of the files are the system's, which drops them when it must.
    Fewer than 7,500 texts do not fill what is decoded at a time."""
    tokenizer, peaks = make_tokenizer(tmp_path / "tokenizer.json"), []
    for rows, cache in ((7_500, tmp_path / "tokens"), (17_500, tmp_path / "tokens"), (17_500, None)):
        path = make_texts(tmp_path / f"{rows}.parquet", rows)
        with ProcessPoolExecutor(1, mp_context=FORKS) as alone:
            peaks.append(alone.submit(peak_of_its_own, path, tokenizer, cache).result())
    few, many, held = peaks
    assert many - few < 10
    assert held - few > 41


def test_a_cache_that_cannot_be_is_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput, match=r"cache '.*/file' cannot hold the examples \(.*\); name another folder"):
        load_dataset(spec_of(folder, "causal_lm", tmp_path / "file"))
    monkeypatch.setenv("DPSWEEP_KEY", "0" * 64)
    with pytest.raises(InvalidInput, match="which DPSWEEP_KEY does not encrypt; leave out `cache`, or unset the key"):
        load_dataset(spec_of(folder, "causal_lm", tmp_path / "tokens"))


def test_a_file_that_was_cut_is_written_again(folder: Path, tmp_path: Path) -> None:
    """As when the machine lost power, or its disk was full."""
    spec = spec_of(folder, "causal_lm", tmp_path / "tokens")
    whole = load_dataset(spec).digest()
    for file in (tmp_path / "tokens").glob("*.[01]"):
        with file.open("r+b") as opened:
            opened.truncate(file.stat().st_size // 2)
    assert load_dataset(spec).digest() == whole


@pytest.mark.parametrize("ending", ["lock", "0"])
def test_a_link_in_a_cache_leads_nowhere(ending: str, folder: Path, tmp_path: Path) -> None:
    spec, cache = spec_of(folder, "causal_lm", tmp_path / "tokens"), tmp_path / "tokens"
    load_dataset(spec)
    for file in cache.glob(f"*.{ending}"):
        file.unlink()
        file.symlink_to(tmp_path / "victim")
    with pytest.raises(InvalidInput, match=r"cache '.*/tokens' cannot hold the examples"):
        load_dataset(spec)
    assert not (tmp_path / "victim").exists()
