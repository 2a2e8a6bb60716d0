"""Tries the first step of a trial on a few examples when a sweep is planned.

Data, preprocessing, model, loss and augmentation run through the trainer's own code, so that a combination that a
worker would refuse is refused before training starts. Nothing is fitted, downloaded or stored.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from dpsweep.accounting.errors import DpsweepError, InvalidInput, count_of, public_text
from dpsweep.workers.data import Dataset, Tokens, as_targets
from dpsweep.workers.gradients.checks import in_its_precision, precision_named, require_autocast
from dpsweep.workers.gradients.engine import GradientEngine
from dpsweep.workers.gradients.layers import OUTERMOST
from dpsweep.workers.gradients.modes import modes_kept
from dpsweep.workers.gradients.reached import listed_layers, require_reached
from dpsweep.workers.machine.devices import lacks_memory
from dpsweep.workers.models import FrozenBatchNorm, build_model
from dpsweep.workers.own_code.imports import UserCode, blamed_on, is_import_path
from dpsweep.workers.spec import Component, Shard, divides_trained
from dpsweep.workers.tasks import task_called
from dpsweep.workers.tasks.losses import FURTHER_COLUMNS, Loss, build_loss
from dpsweep.workers.training.augmentation import augmented, make_augmentation
from dpsweep.workers.training.preprocessing import make_preprocessing
from dpsweep.workers.trials.divisible import layers_to_divide, only_in_calls, require_gathered

EXAMPLES: Final = 3
"""Examples in the trial step: as many as the check of per-example gradients compares."""
_LOOKED_AT: Final = 51
_AT_ONCE: Final = 16
"""Examples that are searched for a gradient of parameters to which the trial step gives none, and how many at once."""
_MANY, _MOST_VALUES = 65, 2**20
"""Rows of a batch on which a model shows that it returns as many, and the most numbers in them."""
_COPIES: Final = 2
"""Augmented copies per example in the trial step."""
_ROUNDING: Final = 1e-5
"""Tolerated change of a logit by later tokens, relative to the largest one."""
_TIMES: Final = 4.0
"""Tolerated ratio of changes to those of a row whose tokens stay, which experts that share a batch may cause."""
_EMBEDDING_HINT: Final = "; whole numbers need a model that embeds them, such as transformer with `vocabulary`"


@dataclass(frozen=True)
class TriedModel:
    """A model that can train: the number of its trainable parameters, and sentences about it.

    share: which parameters train, if not all do. surprises: what is slower or gets less than a user expects.
    """

    parameters: int
    share: tuple[str, ...]
    surprises: tuple[str, ...]


@dataclass(frozen=True)
class StepSpec:
    """The fields of a trial that decide whether a step is possible.

    without_gradient: patterns of names of trainable parameters that need not get a gradient. shard: which parameters
    ranks divide.
    """

    model: Component
    loss: Component
    preprocessing: Component | None
    augmentation: Component | None
    autocast: bool
    without_gradient: tuple[str, ...] = ()
    shard: Shard | None = None


def excerpt(dataset: Dataset) -> Dataset:
    """Return a copy of the first few examples of ``dataset``, so that the others can be freed."""
    train = dataset.train.select(np.arange(min(_LOOKED_AT, len(dataset.train))))
    test = dataset.test.select(np.arange(min(EXAMPLES, len(dataset.test))))
    return replace(dataset, train=train, test=test, public=None)


def check_feasible(combination: StepSpec, dataset: Dataset, code: UserCode) -> TriedModel:
    """Compute per-example gradients of ``dataset`` (an `excerpt`) on the CPU, as a training step does.

    Raises: InvalidInput naming the component that does not fit the others, or trainable parameters that do not affect
    the loss, which noise alone would change.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if combination.preprocessing is not None:
            with _blamed_on("preprocessing", combination.preprocessing, dataset.train.features):
                dataset = make_preprocessing(combination.preprocessing).rehearse(dataset)
        x, y, copies = _batch(combination.augmentation, dataset, slice(EXAMPLES))
        loss = build_loss(combination.loss, code, dataset.task)
        model = build_model(combination.model, dataset, 0, code)
        autocast = torch.bfloat16 if combination.autocast else None
        with _blamed_on("model", combination.model, x, model):
            require_autocast(model.cpu(), autocast)
            shard = combination.shard
            layers = [] if shard is None else layers_to_divide(model, shard)
            with contextlib.nullcontext() if shard is None else only_in_calls(model, layers, shard):
                logits = _checked_logits(model, x, y, dataset, combination.loss)
                if isinstance(dataset.preparation, Tokens) and dataset.preparation.causal:
                    require_causal(model, dataset.preparation, x)
        with _blamed_on("loss", combination.loss, logits):
            losses = loss(logits, y)
        with _blamed_on("model", combination.model, x, model):
            _require_finite(losses, model, x)
            engine = GradientEngine(model, loss, multiplicity=copies, autocast=autocast)
            engine.norms(x, y)
            if shard is not None and divides_trained(shard):
                require_gathered(model, layers, engine.per_example)
            reached = _reached(combination, model, loss, dataset)
            surprises = (*_per_example(engine), *reached)
        trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
        name = f"model {combination.model.name!r}"
        share = tuple(f"{name} {fact}" for fact in _trained_share(model))
        return TriedModel(trained, share, tuple(f"{name} {fact}" for fact in surprises))


def _reached(combination: StepSpec, model: nn.Module, loss: Loss, dataset: Dataset) -> tuple[str, ...]:
    """Refuse trainable parameters that get no gradient from ``dataset``; see `require_reached`, also for the result."""

    def losses(place: slice) -> Tensor:
        x, y, _ = _batch(combination.augmentation, dataset, place)
        return loss(model(x), y)

    later = range(EXAMPLES, len(dataset.train), _AT_ONCE)
    places = (slice(EXAMPLES), *(slice(start, start + _AT_ONCE) for start in later))
    return require_reached(model, losses, places, combination.without_gradient)


def _trained_share(model: nn.Module) -> Iterator[str]:
    parameters = dict(model.named_parameters())
    trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
    if len(trained) < len(parameters):
        numbers = sum(parameters[name].numel() for name in trained)
        total = sum(parameter.numel() for parameter in parameters.values())
        yield f"trains {numbers:,} of its {total:,} parameters: {listed_layers(trained)}"
    if norms := [name for name, part in model.named_modules() if isinstance(part, FrozenBatchNorm)]:
        yield f"keeps the statistics, scales and shifts of its batch normalisation: {listed_layers(norms)}"


def _per_example(engine: GradientEngine) -> tuple[str, ...]:
    """Return which layers run once per example, why, and what that costs."""
    slow: dict[str, list[str]] = {}
    for name, why in engine.per_example.items():
        slow.setdefault(why, []).append(name)
    return tuple(_costing(engine.model, names, why) for why, names in slow.items())


def _costing(model: nn.Module, names: list[str], why: str) -> str:
    layers = [model if name == OUTERMOST else model.get_submodule(name) for name in names]
    kinds = sorted({type(layer).__name__ for layer in layers})
    numbers = sum(each.numel() for layer in layers for each in layer.parameters() if each.requires_grad)
    return (
        f"runs {listed_layers(names)} ({', '.join(kinds)}) once per example, as {why}; that may take several times "
        f"a plain step, and memory for {numbers:,} gradients of each example in a micro-batch; see docs/performance.md"
    )


@contextlib.contextmanager
def _blamed_on(what: str, component: Component, features: Tensor, model: nn.Module | None = None) -> Iterator[None]:
    """Turn any error into an `InvalidInput` that names the component and the features it was given.

    model: the component, once it is built; one that embeds whole numbers is not told to.

    Messages of other libraries and of the user's code may quote rows, so they stay in the cause; only the type and the
    place of the error are shown.
    """
    subject = f"{what} {component.name!r}"
    try:
        yield
    except (Exception, SystemExit) as error:
        reason = public_text(error)
        embeds = model is not None and any(isinstance(each, nn.Embedding) for each in model.modules())
        if isinstance(error, DpsweepError) and reason == str(error):
            if reason.startswith(subject):
                raise
            raise InvalidInput(f"{subject}: {reason}") from error
        if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and lacks_memory(error)):
            raise InvalidInput(
                f"{subject} does not fit in the memory of this machine ({reason}); give it smaller sizes"
            ) from error
        raise InvalidInput(
            f"{subject} cannot take features of shape {tuple(features.shape[1:])} and type {features.dtype} ({reason})"
            f"{'' if embeds or features.is_floating_point() else _EMBEDDING_HINT}"
        ) from error


def _batch(augmentation: Component | None, dataset: Dataset, place: slice) -> tuple[Tensor, Tensor, int]:
    """Prepared rows of the training examples at ``place``, their labels, and the number of rows per example."""
    with blamed_on(dataset.name, "the preparation of"):
        x, y = dataset.prepare(dataset.train.features[place]), as_targets(dataset.train.labels[place])
    if augmentation is None:
        return x, y, 1
    augment = make_augmentation(augmentation)
    with _blamed_on("augmentation", augmentation, x):
        copies, labels = (
            each.unflatten(0, (len(x), augment.multiplicity))[:, :_COPIES]
            for each in augmented(augment, x, y, torch.Generator().manual_seed(0))
        )
    return copies.flatten(0, 1), labels.flatten(0, 1), copies.shape[1]


def _check_shape(logits: object, rows: int, output: tuple[int, ...], outputs: str, loss: Component) -> None:
    """Refuse logits of another shape than [rows, *output].

    `loss`: where it is the user's, it may take further columns, such as a second head. `outputs`: what a row must have,
    for the error. Raises: InvalidInput.
    """
    shape = tuple(logits.shape) if isinstance(logits, Tensor) else ()
    is_wider = len(shape) == 2 and len(output) == 1 and shape[0] == rows and shape[1] > output[0]
    if shape == (rows, *output) or (is_wider and is_import_path(loss.name)):
        return
    is_moved = len(shape) > len(output) and shape[:1] != (rows,)
    lost = "; its first axis must be the rows" * is_moved or (
        "; a squeeze() takes off the batch axis: name the axis, as in squeeze(-1)" * (shape[:1] != (rows,))
    )
    wider = f"; {FURTHER_COLUMNS}" * is_wider
    raise InvalidInput(
        f"for {count_of(rows, 'row')} it returns the shape {shape}, but must return {(rows, *output)}: for each "
        f"row {outputs}{lost}{wider}"
    )


def _require_finite(losses: object, model: nn.Module, x: Tensor) -> None:
    """Raises: InvalidInput where no loss is a finite number, nor an output for zeros: then no gradient counts, and
    noise alone trains. Where zeros have finite outputs the rows are at fault, which weigh nothing in a step.
    """
    if not (isinstance(losses, Tensor) and losses.is_floating_point()) or losses.isfinite().any() or not len(losses):
        return
    with torch.no_grad():
        outputs = model(torch.zeros_like(x))
    if not outputs.isfinite().any():
        raise InvalidInput(
            f"the losses of the first {count_of(len(losses), 'row')} are all NaN or infinite at the initial weights, "
            "and so are outputs for zeros; look for NaN and huge numbers in weights and scales"
        )


def _tensor(found: object, of: str) -> Tensor:
    if not isinstance(found, Tensor):
        raise InvalidInput(f"{of} returns a {type(found).__name__}, but must return a tensor of logits")
    return found


def _checked_logits(model: nn.Module, x: Tensor, y: Tensor, dataset: Dataset, loss: Component) -> Tensor:
    """Return the logits of ``x``, checked here because a later failure in the gradients would not name the cause."""
    task = task_called(dataset.task)
    output, outputs = task.output_shape(y, dataset.class_names), task.outputs(dataset.class_names)
    with torch.enable_grad(), in_its_precision(model, x.device), precision_named(model, x.dtype):
        logits = _tensor(model(x), "its forward")
    _check_shape(logits, len(x), output, outputs, loss)
    with torch.no_grad(), modes_kept(model), in_its_precision(model, x.device):
        model.eval()  # batch normalisation, which the engine refuses by name, takes no single row in training
        for rows in (1, min(_MANY, max(1, _MOST_VALUES // max(1, x[0].numel())))):
            evaluated = _tensor(model(x[torch.arange(rows) % len(x)]), "in evaluation mode its forward")
            _check_shape(evaluated, rows, output, outputs, loss)
    if not logits.is_floating_point():
        raise InvalidInput(f"it returns logits of {logits.dtype}, but they must be floating-point numbers")
    if not logits.requires_grad:
        raise InvalidInput(
            "its logits do not depend on a trainable parameter; do not detach them, nor compute them under no_grad"
        )
    return logits


def require_causal(model: nn.Module, preparation: Tokens, features: Tensor) -> None:
    """Raises: InvalidInput where a logit of ``model`` depends on a token behind its position.

    Such a model reads the token that it is to predict. It is run twice in evaluation mode on random tokens of the
    vocabulary, without padding. The second time the tokens from a position on differ, and logits before it must not.

    features: prepared ones, as the model takes them, [b, t].
    """
    length = features.shape[1]
    vocabulary = preparation.vocabulary or int(features.max()) + 1
    known = torch.arange(vocabulary, device=features.device)
    known = known[known != (-1 if preparation.padding is None else preparation.padding)]
    if length < 2 or len(known) < 2:
        return  # there is no earlier position, or no other token
    inside = {1, length // 4, length // 2, length // 2 + 1, 3 * length // 4, length - 1} - {0, length}
    cuts = (length, *sorted(inside))  # of two neighbours, one lies inside a block that is read at once
    drawn = torch.randint(len(known), (len(cuts), length), device=features.device)
    other = (drawn + 1 + torch.randint(max(1, len(known) - 1), drawn.shape, device=features.device)) % len(known)
    is_later = torch.arange(length, device=features.device) >= torch.tensor(cuts, device=features.device)[:, None]
    with torch.no_grad(), modes_kept(model), in_its_precision(model, features.device):
        model.eval()
        tokens = [known[each] for each in (drawn, torch.where(is_later, other, drawn))]
        for each in tokens:
            each[:, 0] = features[0, 0]  # a model may ask for the token with which texts begin
        before, after = (model(each).float() for each in tokens)
    changes = (after - before).abs().amax(-1)
    unmoved, *moved = (changes[row, :cut].max().item() for row, cut in enumerate(cuts))
    if max(moved) > max(_TIMES * unmoved, _ROUNDING * before.abs().max().item()):
        raise InvalidInput(
            "its logit at a position changes with later tokens, so that it reads the token to predict; objective: "
            "causal_lm needs a model with a causal mask, such as GPT-2 or Llama; or set objective: masked_lm"
        )
