"""Trials whose ranks divide the frozen parameters of a model: equal to one process, and small in memory.

One trial is in the gate; the others are long, because every rank loads FSDP, which takes a second.
"""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.workers.gradients.divided import own_part
from dpsweep.workers.gradients.engine import GradientEngine
from dpsweep.workers.spec import AttackSpec, Component, DataSpec, ExecutionSpec, TrialSpec
from dpsweep.workers.tasks.losses import build_loss
from dpsweep.workers.trials.divisible import layers_to_divide, only_in_calls, require_divisible
from dpsweep.workers.trials.ranks import connected
from dpsweep.workers.trials.trial import run_trial
from tests.warm import FORKS
from tests.workers.data_folders import make_texts, make_tokenizer
from tests.workers.rank_runs import LOST, ended, started
from tests.workers.resumption import assert_same_trial, delete_unfinished
from tests.workers.trial_specs import small_trial
from tests.workers.trials.test_ranks import assert_equal_up_to_rounding
from tests.workers.user_modules import code_of

WIDTH, BLOCKS, FEATURES = 128, 4, 30
BLOCK = 4 * (WIDTH * WIDTH + WIDTH)
"""Bytes of the frozen parameters of a block."""
UNEVEN = ExecutionSpec(device="cpu", micro_batch_size=5, checkpoint_every_epochs=0.5)
"""Ranks have other numbers of micro-batches, so that one borrows layers while another has nothing to compute."""


class Block(nn.Module):
    """A frozen layer with an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.frozen(x) + self.up(self.down(x)))


class Adapted(nn.Module):
    """Blocks on a frozen embedding, with a trained head."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.flatten(1))
        for block in self.blocks:
            x = block(x)
        return torch.as_tensor(self.head(x))


def adapted(feature_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """A user's own model whose trunk is frozen."""
    assert math.prod(feature_shape) == FEATURES
    return Adapted(num_classes)


ADAPTED = small_trial(epochs=1, model=Component(f"{__file__}:adapted"), execution=UNEVEN)


def bytes_held(model: nn.Module) -> int:
    """Bytes of the frozen parameters that this process holds now."""
    return sum(own_part(each).nbytes for each in model.parameters() if not each.requires_grad)


def _uneven(number: int, size: int, folder: str) -> None:
    """A rank that computes for as many rows as its number says, and notes norms, sums, and bytes that it held."""
    from dpsweep.workers.trials.divided_trunk import divide, whole_values

    torch.manual_seed(0)
    whole = Adapted(2)
    x, y = torch.randn(12, FEATURES), torch.randint(0, 2, (12,))
    model, loss, held = Adapted(2), build_loss(Component("cross_entropy")), [0]
    model.load_state_dict(whole.state_dict())

    def note(module: nn.Module, given: object) -> None:
        held.append(bytes_held(model))

    with connected(number, size, f"{folder}/meeting", nccl=False, shard="frozen") as group:
        assert group.lending is not None
        divide(model, group.lending, torch.device("cpu"))
        at_rest = bytes_held(model)
        for block in model.blocks:
            block.get_submodule("frozen").register_forward_pre_hook(note)
        rows = slice(0, 12 - 9 * number)
        found, expected = (
            GradientEngine(each, loss, micro_batch_size=5).weighted_sum(x[rows], y[rows], lambda norms: 1 / norms.norms)
            for each in (model, whole)
        )
        group.meet()
        assert torch.equal(found.norms.norms, expected.norms.norms)
        assert all(torch.equal(found.gradients[name], each) for name, each in expected.gradients.items())
        if number == 0:
            stored = whole_values(model)
            assert stored.keys() == whole.state_dict().keys()
            assert all(torch.equal(stored[name], each) for name, each in whole.state_dict().items())
        group.meet()
    Path(folder, f"rank{number}").write_text(json.dumps([at_rest, max(held), bytes_held(model)]))


@pytest.mark.long
def test_ranks_hold_their_part_and_lend_it_while_they_have_nothing_to_compute(tmp_path: Path) -> None:
    """Twelve rows and three: norms, sums and what is stored have the bits of a whole model."""
    ranks = [FORKS.Process(target=_uneven, args=(number, 2, str(tmp_path))) for number in range(2)]
    for rank in ranks:
        rank.start()
    assert ended(ranks) == [0, 0]
    embedding = 4 * (FEATURES * WIDTH + WIDTH)
    for number in range(2):
        at_rest, most, after = json.loads((tmp_path / f"rank{number}").read_text())
        assert at_rest == after == (BLOCKS * BLOCK + embedding) / 2
        assert most <= embedding + 2 * BLOCK + (BLOCKS - 2) * BLOCK / 2, "a layer, and one that is fetched ahead"


def test_they_equal_one_process(tmp_path: Path) -> None:
    run_trial(ADAPTED, str(tmp_path / "alone"), code=code_of(ADAPTED))
    assert ended(started({"trial": ADAPTED}, tmp_path, 2, shard="frozen")) == [0, 0]
    assert_equal_up_to_rounding(ADAPTED, tmp_path / "alone", tmp_path / "trial")


@pytest.mark.long
def test_a_checkpoint_holds_what_trains_and_goes_on_with_whole_ranks_bit_for_bit(tmp_path: Path) -> None:
    """As the values that ranks gather are those that they would hold."""
    spec = replace(ADAPTED, epochs=2)
    assert ended(started({"trial": spec}, tmp_path / "whole", 2)) == [0, 0]
    assert ended(started({"trial": spec}, tmp_path, 2, dies=0, shard="frozen")) == [-signal.SIGKILL, LOST]
    assert Path(TrialFiles(str(tmp_path / "trial")).checkpoint).stat().st_size < 2 * BLOCK
    assert ended(started({"trial": spec}, tmp_path, 2)) == [0, 0]
    delete_unfinished(tmp_path / "trial")
    assert_same_trial(spec, tmp_path / "whole" / "trial", tmp_path / "trial")


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, first, second = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
        second.weight = first.weight
        self.blocks = nn.ModuleList([first, second]).requires_grad_(False)


def test_what_cannot_be_divided_is_refused_with_the_reason() -> None:
    for model in (nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2)), nn.Linear(2, 2)):
        with pytest.raises(InvalidInput, match=r"has none, and trained parameters are not divided: rank 0 alone adds"):
            layers_to_divide(model)
    with pytest.raises(InvalidInput, match=r"several share blocks\.0\.weight; leave shard out"):
        layers_to_divide(Shared())
    with pytest.raises(InvalidInput, match="averaging 'ema' evaluates a copy"):
        require_divisible(replace(ADAPTED, averaging=Component("ema")))


class Peeking(Adapted):
    """Reads the first layer's weights otherwise than by calling it."""

    def __init__(self, outputs: int, read: Callable[[Block, Tensor], Tensor]) -> None:
        super().__init__(outputs)
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        first, *others = self.blocks
        assert isinstance(first, Block)
        x = self.read(first, self.embed(x.flatten(1)))
        for block in others:
            x = block(x)
        return torch.as_tensor(self.head(x))


READS: Mapping[str, Callable[[Block, Tensor], Tensor]] = {
    "its weights": lambda block, x: nn.functional.linear(x, block.frozen.weight),
    "a part of it": lambda block, x: torch.as_tensor(block.frozen(x)),
    "its forward": lambda block, x: block.forward(x),
    "it, and its weights elsewhere": lambda block, x: torch.as_tensor(block(x)) @ block.frozen.weight.data,
}


@pytest.mark.parametrize("read", READS)
def test_a_layer_whose_parameters_are_read_without_a_call_is_refused(read: str) -> None:
    model = Peeking(2, READS[read])
    with pytest.raises(InvalidInput, match=r"layer blocks\.0 without calling it.* call the layer itself"):
        tried(model)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def test_a_layer_that_is_called_may_say_its_type_and_shape() -> None:
    def asked(block: Block, x: Tensor) -> Tensor:
        weight = block.frozen.weight
        return torch.as_tensor(block(x.to(weight.dtype).view(-1, weight.shape[1])))

    tried(Peeking(2, asked))


def tried(model: nn.Module) -> None:
    with only_in_calls(model, layers_to_divide(model)):
        model(torch.randn(3, FEATURES))


SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
TARGETS = {"bert": ["query", "value"], "llama": ["q_proj", "v_proj"]}


def fine_tuned(folder: Path) -> Mapping[str, TrialSpec]:
    """LoRA on a BERT, and on a Llama whose layers are computed again, attacked in the end; random weights."""
    import transformers

    trunks: Mapping[str, Any] = {
        "bert": lambda: transformers.BertModel(transformers.BertConfig(vocab_size=16, **SMALL)),
        "llama": lambda: transformers.LlamaModel(transformers.LlamaConfig(vocab_size=16, **SMALL)),
    }
    tokenizer, texts = make_tokenizer(folder / "tokenizer.json"), make_texts(folder / "texts.csv", 80)
    data = {"path": str(texts), "text": "body", "tokenizer": str(tokenizer), "max_length": 8, "label": "mood"}
    found = {}
    for name, make in trunks.items():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            make().save_pretrained(folder / name)
        adapter = {"method": "lora", "targets": TARGETS[name], "r": 2}
        model = {"path": str(folder / name), "head": "linear", "adapter": adapter, "checkpointing": name == "llama"}
        found[name] = small_trial(
            data=DataSpec("text", {**data, "classes": ["neg", "pos"]}, test_fraction=0.2),
            model=Component("hugging_face", model),
            attacks=AttackSpec(loss_threshold=name == "llama"),
            execution=UNEVEN,
        )
    return found


@pytest.mark.long
@pytest.mark.skipif(not all(map(find_spec, ("peft", "transformers"))), reason="needs transformers and peft")
@pytest.mark.parametrize("size", [2, 4])
def test_adapters_of_pretrained_architectures_train_on_a_divided_trunk(size: int, tmp_path: Path) -> None:
    """As one process to 1e-5, and as ranks that hold all to the last byte, also after the death of a rank."""
    trials = fine_tuned(tmp_path)
    for name, spec in trials.items():
        run_trial(spec, str(tmp_path / "alone" / name))
    assert ended(started(trials, tmp_path / "whole", size)) == [0] * size
    codes = ended(started(trials, tmp_path / "divided", size, dies=size - 1, shard="frozen"))
    assert codes == [LOST] * (size - 1) + [-signal.SIGKILL]
    assert ended(started(trials, tmp_path / "divided", size, shard="frozen")) == [0] * size
    for name, spec in trials.items():
        delete_unfinished(tmp_path / "divided" / name)
        assert_equal_up_to_rounding(spec, tmp_path / "alone" / name, tmp_path / "divided" / name)
        assert_same_trial(spec, tmp_path / "whole" / name, tmp_path / "divided" / name)
