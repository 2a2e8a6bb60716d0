"""Data parallelism: the rows of every batch are divided among the ranks of a trial.

Rank 0 draws batches, decides on clipping, adds the noise, updates the model, records norms and writes files, as one
process does alone. For each batch:

1. Rank 0 sends the rows. Each rank, rank 0 included, takes one contiguous part of them and computes its norms.
2. If each weight depends only on its own example, all ranks compute weights by the clipping rule of the step. Otherwise
   rank 0 gathers the norms of the whole batch and sends the weights.
3. Each rank sums its weighted gradients. Rank 0 adds these sums once, in the order of ranks.
4. After its update, rank 0 sends the model. Where ranks divide all parameters, each keeps its sum instead, and they
   update together (`dpsweep.workers.trials.divided_model`).

The sum therefore equals that of one process up to rounding and has the same sensitivity. The noise is added once, at
rank 0. Independent noise is drawn there, and its key never leaves it. Correlated noise of large models is drawn by all
ranks, each for its share of the weights (`dpsweep.workers.noise.step_noise.NoiseShare`), to the same bits. So each
keeps its share of the earlier noise. They read its key in the private checkpoint. To evaluate, each rank takes some of
the batches that one process would take, and rank 0 joins the predictions, which are bit-identical.

Each rank has its own generators for random draws of the model (dropout) and of augmentation; their states are in the
checkpoint. A trial that draws is therefore another run of the same mechanism than with one process.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor, nn

from dpsweep.workers.clipping import ClippingState
from dpsweep.workers.data import Dataset, Split
from dpsweep.workers.evaluation.predictions import Predictions, batches_of, predict
from dpsweep.workers.gradients.divided import is_divided
from dpsweep.workers.gradients.engine import Weigh
from dpsweep.workers.gradients.modes import RandomState, modes_of, set_modes
from dpsweep.workers.gradients.pass_results import BatchNorms, WeightedSum
from dpsweep.workers.machine.checkpoint import DIGEST_BYTES
from dpsweep.workers.noise.gaussian_sources import one_thread, start_generator, start_of
from dpsweep.workers.noise.step_noise import NoiseShare
from dpsweep.workers.spec import TrialSpec, divides_trained
from dpsweep.workers.tasks.losses import Loss
from dpsweep.workers.training.batch_gradients import Decision, LocalGradients
from dpsweep.workers.trials.divided_model import DividedOptimizer
from dpsweep.workers.trials.ranks import RankGroup


class _Order(IntEnum):
    """Commands of rank 0 to the other ranks."""

    END = 0
    TAKE_MODEL = 1
    TAKE_CLIPPING = 2
    NORMS = 3
    SUM = 4
    SUM_ROWWISE = 5
    SEND_RANDOM_STATE = 6
    PREDICT = 7
    NOISE = 8
    STORE_EARLIER_NOISE = 9
    NEXT_NOISE = 10
    GIVE_SUM = 11
    TAKE_GRADIENT = 12
    UPDATE = 13


class DividedGradients:
    """`dpsweep.workers.training.batch_gradients.BatchGradients` at rank 0, while the other ranks `follow`.

    random_states: initial states of the generators of the other ranks.
    """

    def __init__(self, local: LocalGradients, group: RankGroup, random_states: Sequence[Tensor]) -> None:
        self._local, self._group = local, group
        self._random_states: tuple[Tensor, ...] | None = tuple(random_states)
        self._sent: ClippingState | None = None
        self.others_repeat = True

    def norms(self, rows: Tensor) -> BatchNorms:
        parts = self._send(_Order.NORMS, rows)
        found = self._joined(self._local.norms(parts[0]), parts)
        self._count()
        return found

    def weighted_sum(self, rows: Tensor, weigh: Weigh) -> WeightedSum:
        parts = self._send(_Order.SUM, rows)

        def weights(own: BatchNorms) -> Tensor:
            given = weigh(self._joined(own, parts)).to(_like_weights(own))
            if given.dim() < _like_weights(own).dim():
                given = given[:, None].expand(-1, _like_weights(own).shape[1])
            self._group.scatter(given, _sizes(parts))
            return given[: len(parts[0])]

        return self._added(self._local.weighted_sum(parts[0], weights), parts)

    def weighted_sum_rowwise(self, rows: Tensor, decision: Decision) -> WeightedSum:
        if decision.state is not self._sent:
            _order(self._group, _Order.TAKE_CLIPPING)
            _share_clipping(self._local, self._group, decision.state)
            self._sent = decision.state
        parts = self._send(_Order.SUM_ROWWISE, rows)
        return self._added(self._local.weighted_sum_rowwise(parts[0], decision), parts)

    def predict(self, model: nn.Module, split: Split, dataset: Dataset, loss: Loss) -> Predictions:
        if model is not self._local.model:
            self._send_model(model)
        _order(self._group, _Order.PREDICT, _place(split, dataset))
        parts = _shares(model, split, dataset, self._group.size)
        own = _predicted(predict(model, split, dataset, loss, parts[0]))
        self._group.broadcast(torch.tensor(own.shape[1]))
        whole = self._group.gathered(own, [_rows(part) for part in parts]).numpy()
        if model is not self._local.model:
            self._send_model(self._local.model)
        self._random_states = None
        return Predictions(whole[:, 0], whole[:, 1:])

    def model_changed(self) -> None:
        self._send_model(self._local.model)

    def _send_model(self, model: nn.Module) -> None:
        _order(self._group, _Order.TAKE_MODEL)
        _share_model(model, self._group)

    def random_states(self) -> tuple[Tensor, ...]:
        if self._random_states is None:
            _order(self._group, _Order.SEND_RANDOM_STATE)
            states = self._group.gathered(_random_state(self._local)[None], [1] * self._group.size)
            self._random_states = tuple(state.clone() for state in states[1:])
        return self._random_states

    def finish(self) -> None:
        _order(self._group, _Order.END)

    def _send(self, order: _Order, rows: Tensor) -> tuple[Tensor, ...]:
        """Have all ranks compute with ``rows``; returns the rows of each rank."""
        _order(self._group, order, len(rows))
        self._group.broadcast(rows.cpu())
        self._random_states = None
        return torch.tensor_split(rows, self._group.size)

    def _joined(self, own: BatchNorms, parts: tuple[Tensor, ...]) -> BatchNorms:
        """Return the norms of all ranks, in the order of their rows."""
        return _norms(self._group.gathered(_table(own), _sizes(parts)), own)

    def _added(self, own: WeightedSum, parts: tuple[Tensor, ...]) -> WeightedSum:
        return WeightedSum(
            self._joined(own.norms, parts),
            self._group.gathered(own.weights, _sizes(parts)),
            self._total(own.gradients),
            self._count(own.non_finite),
        )

    def _total(self, own: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if _update_together(self._group):
            return _Totals(own, self._group)
        return _unflat(self._group.total(_flat(own)), own)

    def _count(self, non_finite: int = 0) -> int:
        """Collect the counts of all ranks, and update `others_repeat`; returns the number of non-finite gradients."""
        counts = self._group.gathered(_counts(non_finite, repeatable=True), [1] * self._group.size)
        self.others_repeat &= bool(counts[1:, 1].all())
        return int(counts[:, 0].sum())


class _Totals(Mapping[str, Tensor]):
    """Sums of all ranks by parameter, each added when it is looked up: once, as the ranks then forget theirs."""

    def __init__(self, own: Mapping[str, Tensor], group: RankGroup) -> None:
        self._names, self._own, self._group = tuple(own), dict(own), group

    def __getitem__(self, name: str) -> Tensor:
        _order(self._group, _Order.GIVE_SUM, self._names.index(name))
        own = self._own.pop(name)
        return self._group.total(own.flatten()).view(own.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class DividedUpdate:
    """`dpsweep.workers.training.optimizers.InTurn`, while the other ranks `follow`."""

    def __init__(self, optimizer: DividedOptimizer, group: RankGroup) -> None:
        self._optimizer, self._group = optimizer, group

    def step(self, gradients: Iterator[tuple[str, Tensor]], factor: float, noise_std: float) -> None:
        own = {}
        for place, (name, gradient) in enumerate(gradients):
            _order(self._group, _Order.TAKE_GRADIENT, place)
            part = self._optimizer.parts[name]
            self._group.scatter(gradient, part.sizes)
            own[name] = part.of(gradient).clone()
        _order(self._group, _Order.UPDATE)
        self._group.broadcast(torch.tensor([factor, noise_std], dtype=torch.float64))
        self._optimizer.step(own, factor, noise_std)


def _update_together(group: RankGroup) -> bool:
    """Return whether the ranks divide the parameters that train."""
    return group.lending is not None and divides_trained(group.lending.shard)


def _order(group: RankGroup, order: _Order, count: int = 0) -> None:
    """Send a command to the other ranks."""
    group.broadcast(torch.tensor([order, count]))


class DividedNoise:
    """`dpsweep.workers.noise.step_noise.OtherShares` at rank 0, while the other ranks `follow`."""

    def __init__(self, group: RankGroup) -> None:
        self._group, self.ranks = group, group.size

    def noise(self, own: NoiseShare, count: int) -> Iterator[Tensor]:
        _order(self._group, _Order.NOISE, count)
        rounds = own.noise(count)
        while True:  # a last command has the others end the step
            _order(self._group, _Order.NEXT_NOISE)
            found = next(rounds, None)
            if found is None:
                return
            sizes, noise = found
            yield self._group.gathered(noise, sizes)

    def store(self, step: int) -> tuple[bytes, ...]:
        _order(self._group, _Order.STORE_EARLIER_NOISE, step)
        digests = self._group.gathered(_row_of(bytes(DIGEST_BYTES)), [1] * self.ranks)
        return tuple(bytes(each.tolist()) for each in digests[1:])


@dataclass(frozen=True)
class StoredShare:
    """A rank's share of correlated noise. store: stores its rows for a checkpoint after so many steps; their digest."""

    share: NoiseShare
    store: Callable[[int], bytes]


class Follower:
    """Executes the commands of rank 0 at another rank.

    optimizer: of its parts of the parameters, if ranks divide those that train.
    """

    def __init__(
        self,
        local: LocalGradients,
        dataset: Dataset,
        group: RankGroup,
        noise: StoredShare | None,
        optimizer: DividedOptimizer | None,
    ) -> None:
        self._local, self._dataset, self._group, self._modes = local, dataset, group, modes_of(local.model)
        self._noise, self._optimizer = noise, optimizer
        self._rounds: Iterator[tuple[list[int], Tensor]] = iter(())
        self._sums, self._gradients = dict[str, Tensor](), dict[str, Tensor]()
        self._decision: Decision | None = None
        self._computes: Mapping[int, Callable[[tuple[Tensor, ...]], int]] = {
            _Order.NORMS: self._norms,
            _Order.SUM: self._weighted_sum,
            _Order.SUM_ROWWISE: self._weighted_sum_rowwise,
        }

    def follow(self) -> None:
        """Compute this rank's share of the commands of rank 0, until rank 0 has finished."""
        while self._obeys():
            pass

    def _obeys(self) -> bool:
        """Execute the next command of rank 0; False after the last one."""
        order, count = self._group.broadcast(torch.zeros(2, dtype=torch.int64)).tolist()
        if order in self._computes:
            self._compute(order, count)
        elif order == _Order.TAKE_MODEL:
            _share_model(self._local.model, self._group)
        elif order == _Order.TAKE_CLIPPING:
            self._decision = self._local.decision(_share_clipping(self._local, self._group))
        elif order == _Order.SEND_RANDOM_STATE:
            self._group.give(_random_state(self._local)[None], 1)
        elif order == _Order.PREDICT:
            self._predict(count)
        elif order == _Order.NOISE:
            self._rounds = self._own_noise.share.noise(count)
        elif order == _Order.NEXT_NOISE:
            self._give_noise()
        elif order == _Order.GIVE_SUM:
            self._group.add(self._sums.pop(self._trained[count]).flatten())
        elif order == _Order.TAKE_GRADIENT:
            self._take_gradient(self._trained[count])
        elif order == _Order.UPDATE:
            self._update()
        elif order == _Order.STORE_EARLIER_NOISE:
            self._group.give(_row_of(self._own_noise.store(count)), 1)
        return bool(order != _Order.END)

    @property
    def _own_noise(self) -> StoredShare:
        assert self._noise is not None, "rank 0 asks for noise only where it is correlated"
        return self._noise

    def _give_noise(self) -> None:
        with one_thread():
            for sizes, noise in itertools.islice(self._rounds, 1):
                self._group.give(noise, max(sizes))

    @property
    def _own_optimizer(self) -> DividedOptimizer:
        assert self._optimizer is not None, "rank 0 asks for updates only where ranks divide all parameters"
        return self._optimizer

    @property
    def _trained(self) -> tuple[str, ...]:
        return tuple(self._own_optimizer.parts)

    def _take_gradient(self, name: str) -> None:
        part = self._own_optimizer.parts[name]
        self._gradients[name] = self._group.taken(part.own, max(part.sizes))

    def _update(self) -> None:
        factor, noise_std = self._group.broadcast(torch.zeros(2, dtype=torch.float64)).tolist()
        self._own_optimizer.step(self._gradients, factor, noise_std)
        self._gradients = {}

    def _predict(self, place: int) -> None:
        split = _splits(self._dataset)[place]
        assert split is not None, "rank 0 evaluates what is there"
        parts = _shares(self._local.model, split, self._dataset, self._group.size)
        mine = parts[self._group.rank]
        own = _predicted(predict(self._local.model, split, self._dataset, self._local.loss, mine)) if mine else None
        width = int(self._group.broadcast(torch.tensor(0)))
        rows = torch.zeros(0, width, dtype=torch.float64) if own is None else own
        self._group.give(rows, max(map(_rows, parts)))

    def _compute(self, order: int, count: int) -> None:
        device, model = self._local.data.device, self._local.model
        rows = self._group.broadcast(torch.zeros(count, dtype=torch.int64)).to(device)
        before = RandomState.of(device)
        non_finite = self._computes[order](torch.tensor_split(rows, self._group.size))
        repeatable = before.is_current() and modes_of(model) == self._modes
        self._group.give(_counts(non_finite, repeatable), 1)

    def _norms(self, parts: tuple[Tensor, ...]) -> int:
        self._give_norms(self._local.norms(parts[self._group.rank]), parts)
        return 0

    def _weighted_sum(self, parts: tuple[Tensor, ...]) -> int:
        def weights(own: BatchNorms) -> Tensor:
            self._give_norms(own, parts)
            return self._group.taken(_like_weights(own), max(_sizes(parts)))

        return self._give_sum(self._local.weighted_sum(parts[self._group.rank], weights), parts)

    def _weighted_sum_rowwise(self, parts: tuple[Tensor, ...]) -> int:
        assert self._decision is not None, "rank 0 sends the clipping state first"
        return self._give_sum(self._local.weighted_sum_rowwise(parts[self._group.rank], self._decision), parts)

    def _give_norms(self, own: BatchNorms, parts: tuple[Tensor, ...]) -> None:
        self._group.give(_table(own), max(_sizes(parts)))

    def _give_sum(self, own: WeightedSum, parts: tuple[Tensor, ...]) -> int:
        self._give_norms(own.norms, parts)
        self._group.give(own.weights, max(_sizes(parts)))
        if _update_together(self._group):
            self._sums = dict(own.gradients)
        else:
            self._group.add(_flat(own.gradients))
        return own.non_finite


def _splits(dataset: Dataset) -> tuple[Split | None, ...]:
    """Return the splits that may be evaluated, in the same order at all ranks."""
    return dataset.test, dataset.public, dataset.held_out


def _place(split: Split, dataset: Dataset) -> int:
    return next(place for place, each in enumerate(_splits(dataset)) if each is split)


def _shares(model: nn.Module, split: Split, dataset: Dataset, size: int) -> list[list[slice]]:
    """Return the batches that each rank evaluates, in the order of ranks; their numbers differ by at most one."""
    batches = batches_of(model, split, dataset)
    ends = [-(-len(batches) * rank // size) for rank in range(size + 1)]
    return [batches[start:end] for start, end in itertools.pairwise(ends)]


def _rows(batches: Sequence[slice]) -> int:
    return sum(batch.stop - batch.start for batch in batches)


def _predicted(found: Predictions) -> Tensor:
    """Return the losses and kept values of each example as one float64 table [n, 1 + m]."""
    return torch.cat((torch.from_numpy(found.losses)[:, None], torch.from_numpy(found.kept)), 1)


def _sizes(parts: tuple[Tensor, ...]) -> list[int]:
    return [len(rows) for rows in parts]


def _table(norms: BatchNorms) -> Tensor:
    """Norms, losses and norms per layer as one float64 table [b, 2 + L]."""
    layers = [] if norms.layer_norms is None else [norms.layer_norms]
    return torch.cat([each.double() for each in (norms.norms[:, None], norms.losses[:, None], *layers)], 1)


def _norms(table: Tensor, like: BatchNorms) -> BatchNorms:
    """Return the norms in a `_table`, in the dtypes of ``like``."""
    layers = None if like.layer_norms is None else table[:, 2:].to(like.layer_norms)
    return BatchNorms(table[:, 0].to(like.norms), layers, table[:, 1].to(like.losses))


def _like_weights(norms: BatchNorms) -> Tensor:
    """Return a tensor with the shape of weights: [b], or [b, L] for per-layer clipping."""
    return norms.norms if norms.layer_norms is None else norms.layer_norms


def _flat(gradients: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([each.flatten() for each in gradients.values()])


def _unflat(flat: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    parts = flat.split([each.numel() for each in like.values()])
    return {name: part.view(each.shape).to(each.dtype) for (name, each), part in zip(like.items(), parts, strict=True)}


def _row_of(digest: bytes) -> Tensor:
    return torch.tensor([list(digest)], dtype=torch.uint8)


def _counts(non_finite: int, repeatable: bool) -> Tensor:
    """[1, 2]: number of non-finite gradients, and whether the passes drew nothing and changed the mode of no module."""
    return torch.tensor([[non_finite, repeatable]])


def _share_clipping(local: LocalGradients, group: RankGroup, state: ClippingState | None = None) -> ClippingState:
    """Send the clipping state of rank 0 to every rank. state: given by rank 0 only."""
    shared: dict[str, Any] = {}
    for name in (each.name for each in fields(ClippingState)):
        value = None if state is None else getattr(state, name)
        number = isinstance(value, float | int)
        sent = group.shared(torch.tensor(value, dtype=torch.float64) if number else value, local.data.device)
        shared[name] = float(sent) if sent is not None and not sent.dim() else sent
    return ClippingState(**shared)


@torch.no_grad()
def _share_model(model: nn.Module, group: RankGroup) -> None:
    """Give every rank the trainable parameters, buffers and modes of rank 0. Of divided ones, each has its part."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad and not is_divided(p)}
    received = _unflat(group.broadcast(_flat(trainable)), trainable) if trainable else {}
    for name, values in received.items():
        trainable[name].copy_(values)
    for buffer in model.buffers():
        buffer.copy_(group.broadcast(buffer))
    modes = modes_of(model)
    training = group.broadcast(torch.tensor([*modes.values()], dtype=torch.uint8))
    set_modes(model, dict(zip(modes, training.bool().tolist(), strict=True)))


def first_random_states(spec: TrialSpec, size: int, device: torch.device) -> tuple[Tensor, ...]:
    """Return the initial states of the generators of ranks 1, 2, ...; rank 0 has the generators of a single process.

    They come from the trial's seed, or from secret keys if the noise source is secret; see
    `dpsweep.workers.noise.gaussian_sources.start_generator`.
    """
    return tuple(_first_random_state(spec, rank, device) for rank in range(1, size))


def _first_random_state(spec: TrialSpec, rank: int, device: torch.device) -> Tensor:
    states = []
    for purpose in ("model", "augmentation"):
        generator = torch.Generator()
        start_generator(generator, spec.known_seed, f"{purpose} of rank {rank}")
        states.append(generator.get_state())
    if device.type == "cuda":
        start = start_of(spec.known_seed, f"model of rank {rank}")
        states.append(torch.Generator(device).manual_seed(start).get_state())
    return torch.cat(states)


def _random_state(local: LocalGradients) -> Tensor:
    """States of the generators of this process, for the model and for augmentation, as bytes."""
    device = local.data.device
    cuda = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return torch.cat([torch.get_rng_state(), local.augmentation_rng.get_state(), *cuda])


def restore_random_state(local: LocalGradients, state: Tensor) -> None:
    """Set the generators of this process to one of the states of `DividedGradients.random_states`."""
    length, device = len(local.augmentation_rng.get_state()), local.data.device
    torch.set_rng_state(state[:length].clone())
    local.augmentation_rng.set_state(state[length : 2 * length].clone())
    if device.type == "cuda" and len(state) > 2 * length:  # a run may resume on the other kind of device
        torch.cuda.set_rng_state(state[2 * length :].clone(), device)
