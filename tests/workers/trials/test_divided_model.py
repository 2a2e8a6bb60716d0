"""Trials whose ranks divide the parameters of a model: equal to one process, and small in memory."""

from __future__ import annotations

import copy
import itertools
import json
import math
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.workers.gradients.capture import capturing
from dpsweep.workers.gradients.divided import is_away, is_divided, own_part, whole_values
from dpsweep.workers.gradients.engine import GradientEngine
from dpsweep.workers.gradients.layers import OUTERMOST, Layer
from dpsweep.workers.models import WeightStandardizedConv2d
from dpsweep.workers.spec import (
    AttackSpec,
    AuditSpec,
    Component,
    DataSpec,
    ExecutionSpec,
    NoiseSpec,
    NormSpec,
    RmiaSpec,
    SamplingSpec,
    Shard,
    TrialSpec,
)
from dpsweep.workers.tasks.losses import build_loss
from dpsweep.workers.training.reproducible import explained
from dpsweep.workers.trials.divided_model import divide
from dpsweep.workers.trials.divisible import layers_to_divide, only_in_calls, require_divisible, require_gathered
from dpsweep.workers.trials.ranks import connected_ranks
from dpsweep.workers.trials.trial import run_trial
from tests.known import known
from tests.warm import FORKS
from tests.workers.data_folders import make_texts, make_tokenizer
from tests.workers.rank_runs import LOST, ended, started
from tests.workers.resumption import assert_same_trial, delete_unfinished
from tests.workers.trial_specs import small_trial
from tests.workers.trials.test_ranks import assert_equal_up_to_rounding
from tests.workers.user_modules import code_of

WIDTH, BLOCKS, FEATURES = 128, 4, 30
BLOCK: Mapping[Shard, int] = {"frozen": 4 * (WIDTH * WIDTH + WIDTH), "all": 4 * (WIDTH * WIDTH + WIDTH + 4 * WIDTH)}
"""Bytes of the divided parameters of a block."""
OUTSIDE: Mapping[str, int] = {"frozen": 4 * (FEATURES * WIDTH + WIDTH), "all": 4 * (FEATURES * WIDTH + 3 * WIDTH + 2)}
"""Of the embedding; and with the head, which trains."""
every_shard = pytest.mark.parametrize("shard", get_args(Shard))
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


def trained(feature_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """The same model, all of which trains. Half of it has no gradient at first, so that the check moves parameters."""
    model = adapted(feature_shape, num_classes).requires_grad_()
    for name, each in model.named_parameters():
        nn.init.zeros_(each) if name.endswith("up.weight") else None
    return model


ADAPTED = small_trial(epochs=1, model=Component(f"{__file__}:adapted"), execution=UNEVEN)
TRAINED = replace(ADAPTED, model=Component(f"{__file__}:trained"), optimizer=Component("adam_corrected"))


def bytes_held(model: nn.Module, shard: Shard) -> int:
    """Bytes of the divided parameters that this process holds now."""
    divided = [each for each in model.parameters() if is_divided(each)]
    assert all(each.requires_grad <= (shard == "all") for each in divided)
    return sum(own_part(each).nbytes + (0 if is_away(each) else each.nbytes) for each in divided)


def _uneven(number: int, size: int, folder: str, shard: Shard) -> None:
    """A rank that computes for as many rows as its number says, and notes norms, sums, and bytes that it held."""
    torch.manual_seed(0)
    whole = Adapted(2)
    x, y = torch.randn(12, FEATURES), torch.randint(0, 2, (12,))
    model, loss, held = Adapted(2), build_loss(Component("cross_entropy")), [0]
    model.load_state_dict(whole.state_dict())

    def note(module: nn.Module, given: object) -> None:
        held.append(bytes_held(model, shard))

    with connected_ranks(number, size, f"{folder}/meeting", nccl=False, shard=shard) as group:
        divide(model, known(group.lending), number, torch.device("cpu"))
        at_rest = bytes_held(model, shard)
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
            stored = whole_values(model.state_dict(keep_vars=True))
            assert stored.keys() == whole.state_dict().keys()
            assert all(torch.equal(stored[name], each) for name, each in whole.state_dict().items())
        group.meet()
    Path(folder, f"rank{number}").write_text(json.dumps([at_rest, max(held), bytes_held(model, shard)]))


@pytest.mark.long
@every_shard
def test_ranks_hold_their_part_and_lend_it_while_they_have_nothing_to_compute(shard: Shard, tmp_path: Path) -> None:
    """Twelve rows and three: norms, sums and what is stored have the bits of a whole model."""
    ranks = [FORKS.Process(target=_uneven, args=(number, 2, str(tmp_path), shard)) for number in range(2)]
    for rank in ranks:
        rank.start()
    assert ended(ranks) == [0, 0]
    for number in range(2):
        at_rest, most, after = json.loads((tmp_path / f"rank{number}").read_text())
        assert at_rest == after == (BLOCKS * BLOCK[shard] + OUTSIDE[shard]) / 2
        assert most == at_rest + OUTSIDE[shard] + BLOCK[shard], "its parts, and a layer at a time"


@pytest.mark.parametrize("spec", [ADAPTED, TRAINED], ids=["frozen", "all"])
def test_they_equal_one_process(spec: TrialSpec, tmp_path: Path) -> None:
    shard: Shard = "all" if spec is TRAINED else "frozen"
    run_trial(spec, str(tmp_path / "alone"), code=code_of(spec))
    assert ended(started({"trial": spec}, tmp_path, 2, shard=shard)) == [0, 0]
    assert_equal_up_to_rounding(spec, tmp_path / "alone", tmp_path / "trial")


@pytest.mark.long
def test_a_checkpoint_holds_what_trains(tmp_path: Path) -> None:
    assert ended(started({"trial": ADAPTED}, tmp_path, 2, dies=0, shard="frozen")) == [-signal.SIGKILL, LOST]
    assert Path(TrialFiles(str(tmp_path / "trial")).checkpoint).stat().st_size < 2 * BLOCK["frozen"]


class Odd(nn.Module):
    """A layer that returns its input as it is, changed in place, a view, or among others."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.inner = kind, nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        match self.kind:
            case "as it is":
                return x
            case "in place":
                return (x * 1.0).add_(self.inner(x))
            case "given in place":
                return x.add_(self.inner(x.clone()))
            case "a view":
                return torch.cat([self.inner(x), x], 1)[:, :6]
            case _:
                return {"x": self.inner(x).tanh(), "before": x}


class Chain(nn.ModuleList):
    """Odd layers in a row, without parameters outside of them."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            found = layer(x)
            x = found["x"] + found["before"] if isinstance(found, dict) else found
        return x


@pytest.mark.thinned(7)
@pytest.mark.parametrize("kinds", list(itertools.permutations(["as it is", "in place", "a view", "among others"], 3)))
def test_layers_may_return_anything(kinds: Sequence[str], tmp_path: Path) -> None:
    """One rank, as the passes are those of any: it gathers each layer from itself. On some processors the last bits of
    a product follow where its factors lie in memory.
    """
    torch.manual_seed(0)
    first, last = nn.Linear(5, 6), nn.Linear(6, 2)
    whole = Chain([first, *map(Odd, kinds), Odd("given in place"), last])
    model = copy.deepcopy(whole)
    x, y, loss = torch.randn(7, 5), torch.randint(0, 2, (7,)), build_loss(Component("cross_entropy"))
    with connected_ranks(0, 1, str(tmp_path / "meeting"), nccl=False, shard="all") as group:
        divide(model, known(group.lending), 0, torch.device("cpu"))
        for _ in range(2):
            found, expected = (
                GradientEngine(each, loss, micro_batch_size=5).weighted_sum(x, y, lambda norms: 1 / norms.norms)
                for each in (model, whole)
            )
            assert_close(found.norms.norms, expected.norms.norms, rtol=1e-5, atol=1e-7)
            for name, each in expected.gradients.items():
                assert_close(found.gradients[name], each, rtol=1e-5, atol=1e-7)
        assert all(map(is_away, model.parameters()))


class Aside(nn.Module):
    """A layer with a tensor of which its output knows nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 5)
        self.seen = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        self.seen = self.last(x).square().mean(1, keepdim=True)
        return x


class Recalling(nn.Module):
    """Adds these tensors at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Aside(), Aside()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        first = self.blocks[0]
        assert isinstance(first, Aside)
        return x + first.seen


class Holder:
    """Hides a tensor."""

    def __init__(self, held: Tensor) -> None:
        self.held = held


class Hiding(nn.Module):
    """Returns what no hook sees."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor | Holder) -> Holder:
        given = x.held if isinstance(x, Holder) else x
        return Holder(torch.tanh(self.last(torch.tanh(self.first(given)))))


class Hidden(Recalling):
    """A chain of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Hiding(), Hiding()])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x)).held  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [Recalling, Hidden])
def test_a_backward_pass_around_a_layers_outputs_is_refused(make: type[nn.Module], tmp_path: Path) -> None:
    """It would read memory that was freed."""
    model, loss = make(), build_loss(Component("cross_entropy"))
    with connected_ranks(0, 1, str(tmp_path / "meeting"), nccl=False, shard="all") as group:
        divide(model, known(group.lending), 0, torch.device("cpu"))
        with pytest.raises(InvalidInput, match="through another tensor than the layer's outputs"), explained(UNEVEN):
            GradientEngine(model, loss).weighted_sum(torch.randn(7, 5), torch.arange(7) % 5, lambda norms: norms.norms)


def test_copies_of_parameters_are_made_only_where_they_are_gathered(tmp_path: Path) -> None:
    model = Chain([nn.Linear(5, 6), nn.Linear(6, 2)])
    names = {name: name for name, _ in model.named_parameters()}
    with connected_ranks(0, 1, str(tmp_path / "meeting"), nccl=False, shard="all") as group:
        divide(model, known(group.lending), 0, torch.device("cpu"))
        with (
            pytest.raises(
                InvalidInput, match=r"runs once per example, with its parts, and ranks have divided 0\.weight"
            ),
            capturing([Layer(OUTERMOST, model, names, "per example")], 3, 3),
        ):
            model(torch.randn(3, 5))


SGD = Component("sgd", {"learning_rate": 0.1, "momentum": 0.9})


def correlated(noise: str, params: dict[str, Any], sampling: str, size: int, **more: Any) -> dict[str, Any]:
    """Settings of a trial whose noise each step takes from those before."""
    noised = NoiseSpec(1.0, Component(noise, params))
    return {"noise": noised, "sampling": SamplingSpec(sampling, size, **more), "norms": NormSpec()}


KINDS: Mapping[str, TrialSpec] = {
    "an adapter": replace(ADAPTED, optimizer=SGD, epochs=2),
    "all": replace(TRAINED, epochs=2),
    "no noise": replace(TRAINED, noise=NoiseSpec(0.0), optimizer=SGD),
    "earlier draws": replace(TRAINED, **correlated("banded", {"bands": 3}, "cyclic_poisson", 15, cycle_length=3)),
    "earlier noise": replace(TRAINED, **correlated("lambda_cgd", {"decay": 0.6}, "fixed_order", 24)),
    "nothing outside of layers": replace(TRAINED, model=Component("mlp", {"hidden": [16, 16]})),
    "weights of the whole batch": replace(TRAINED, clipping=Component("dpsgd_f"), optimizer=Component("adam")),
}
"""Of models whose ranks divide all. They have more weights than one rank draws correlated noise for at a time."""


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 4])
def test_they_have_the_bits_of_whole_ranks_also_after_a_death(size: int, tmp_path: Path) -> None:
    assert ended(started(KINDS, tmp_path / "whole", size)) == [0] * size
    codes = ended(started(KINDS, tmp_path / "divided", size, dies=size - 1, shard="all"))
    assert codes == [LOST] * (size - 1) + [-signal.SIGKILL]
    assert ended(started(KINDS, tmp_path / "divided", size, shard="all")) == [0] * size
    for name, spec in KINDS.items():
        delete_unfinished(tmp_path / "divided" / name)
        assert_same_trial(spec, tmp_path / "whole" / name, tmp_path / "divided" / name)


@pytest.mark.long
@pytest.mark.parametrize("begun", [None, *get_args(Shard)])
def test_they_go_on_either_way_from_one_checkpoint(begun: Shard | None, tmp_path: Path) -> None:
    """With secret noise, by its key in the checkpoint, and with the state of the optimizer."""
    model = ADAPTED.model if begun == "frozen" else TRAINED.model
    spec = replace(TRAINED, model=model, noise_source="os_entropy", optimizer=Component("adam"), epochs=2)
    shard: Shard = begun or "all"
    assert ended(started({"trial": spec}, tmp_path / "whole", 2, dies=0, shard=begun)) == [-signal.SIGKILL, LOST]
    shutil.copytree(tmp_path / "whole" / "trial", tmp_path / "divided" / "trial")
    assert ended(started({"trial": spec}, tmp_path / "whole", 2)) == [0, 0]
    assert ended(started({"trial": spec}, tmp_path / "divided", 2, shard=shard)) == [0, 0]
    for name in ("whole", "divided"):
        delete_unfinished(tmp_path / name / "trial")
    assert_same_trial(spec, tmp_path / "whole" / "trial", tmp_path / "divided" / "trial")


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, first, second = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
        second.weight = first.weight
        self.blocks = nn.ModuleList([first, second]).requires_grad_(False)


class Standardized(nn.Module):
    """Blocks of which one reads its weights after a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(WeightStandardizedConv2d(3, 4, 3), nn.Conv2d(4, 4, 3))


REFUSED: Mapping[str, tuple[Shard, nn.Module, str]] = {
    "one frozen layer": ("frozen", nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2)), "or use sha"),
    "no frozen layer": ("frozen", nn.Linear(2, 2), r"the frozen parameters of layers .* has none; .* or freeze"),
    "no layers": ("all", nn.Linear(2, 2), r"divides the layers in .* of which the model has none; leave shard out$"),
    "shared weights": ("frozen", Shared(), r"several share blocks\.0\.weight; leave shard out"),
    "weights read later": ("all", Standardized(), r"gradients of blocks\.0 \(WeightStandardizedConv2d\) are computed"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_divided_is_refused_with_the_reason(case: str) -> None:
    shard, model, message = REFUSED[case]
    with pytest.raises(InvalidInput, match=message):
        layers_to_divide(model, shard)


@pytest.mark.parametrize(
    ("shard", "changes", "message"),
    [
        ("frozen", {"averaging": Component("ema")}, "averaging 'ema' evaluates a copy of the model, and with"),
        ("all", {"averaging": Component("ema")}, "averaging 'ema' evaluates a copy"),
        ("all", {"audit": AuditSpec(canaries=20)}, "an audit of rows canaries compares whole models or updates at"),
        ("all", {"attacks": AttackSpec(rmia=RmiaSpec(4))}, "attacks.rmia trains reference models at rank 0"),
    ],
)
def test_what_needs_a_whole_model_is_refused_by_name(shard: Shard, changes: dict[str, Any], message: str) -> None:
    require_divisible(ADAPTED, shard)
    with pytest.raises(InvalidInput, match=message):
        require_divisible(replace(ADAPTED, **changes), shard)


@every_shard
def test_modules_that_run_once_per_example_may_not_hold_divided_layers(shard: Shard) -> None:
    model = Adapted(2)
    layers = layers_to_divide(model, shard)
    require_gathered(model, layers, ["blocks.0", "blocks.1.down", "head"])
    for outer in ("blocks", OUTERMOST):
        with pytest.raises(InvalidInput, match=f"{outer} runs once per example, with its parts"):
            require_gathered(model, layers, [outer])


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
    for shard in get_args(Shard):
        with only_in_calls(model, layers_to_divide(model, shard), shard):
            model(torch.randn(3, FEATURES))


SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
TARGETS = {"bert": ["query", "value"], "llama": ["q_proj", "v_proj"]}


def fine_tuned(folder: Path) -> Mapping[str, TrialSpec]:
    """LoRA on a BERT, and on a Llama whose layers are computed again, attacked in the end; both trained as a whole."""
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
        model = {"path": str(folder / name), "head": "linear", "checkpointing": name == "llama"}
        lora = {"adapter": {"method": "lora", "targets": TARGETS[name], "r": 2}}
        for kind, more in (("adapter", lora), ("whole", {})):
            found[f"{name} {kind}"] = small_trial(
                data=DataSpec("text", {**data, "classes": ["neg", "pos"]}, test_fraction=0.2),
                model=Component("hugging_face", {**model, **more}),
                optimizer=Component("adamw", {"learning_rate": 0.01}),
                attacks=AttackSpec(loss_threshold=name == "llama"),
                execution=UNEVEN,
            )
    return found


@pytest.mark.long
@pytest.mark.skipif(not all(map(find_spec, ("peft", "transformers"))), reason="needs transformers and peft")
@pytest.mark.parametrize("size", [2, 4])
@every_shard
def test_pretrained_architectures_train_while_divided(shard: Shard, size: int, tmp_path: Path) -> None:
    """As one process to 1e-5, and as ranks that hold all to the last byte, also after the death of a rank."""
    trials = {name: spec for name, spec in fine_tuned(tmp_path).items() if shard == "all" or "adapter" in name}
    for name, spec in trials.items():
        run_trial(spec, str(tmp_path / "alone" / name))
    assert ended(started(trials, tmp_path / "whole", size)) == [0] * size
    codes = ended(started(trials, tmp_path / "divided", size, dies=size - 1, shard=shard))
    assert codes == [LOST] * (size - 1) + [-signal.SIGKILL]
    assert ended(started(trials, tmp_path / "divided", size, shard=shard)) == [0] * size
    for name, spec in trials.items():
        delete_unfinished(tmp_path / "divided" / name)
        assert_equal_up_to_rounding(spec, tmp_path / "alone" / name, tmp_path / "divided" / name)
        assert_same_trial(spec, tmp_path / "whole" / name, tmp_path / "divided" / name)
