"""Data parallelism: the rows of every batch are divided among the ranks of a trial.

Rank 0 does all that one process does: it draws batches, decides on weights, adds the noise, updates the model, records
norms and writes files. For a batch it sends the rows; each rank, itself included, takes one contiguous part of them and
computes the norms. These are gathered; rank 0 weighs all examples by its rule and sends the weights back; each rank
sums its weighted gradients; the sums are added once, at rank 0, in the order of the ranks. After its update rank 0
sends the model. So the sum is that of one process up to rounding, its sensitivity is the same, the noise is drawn and
added once, and its key never leaves rank 0.

Random draws of the model (dropout) and of augmentation come from generators of each rank's own, whose states are in the
checkpoint: trials that draw are therefore other runs of the same mechanism than those of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum

import torch
from torch import Tensor, nn

from accounting.keyed import KeyedStream
from workers.batch_gradients import LocalGradients, Weigh, WeighRows
from workers.gradients import BatchNorms, RandomState, WeightedSum, modes_of, set_modes
from workers.noise import derive_seed, noise_source_kind, start_generator
from workers.ranks import RankGroup
from workers.spec import TrialSpec


class _Order(IntEnum):
    """What rank 0 has the others do next."""

    END = 0
    TAKE_MODEL = 1
    NORMS = 2
    SUM = 3
    SUM_ROWWISE = 4
    SEND_RANDOM_STATE = 5


class DividedGradients:
    """`workers.batch_gradients.BatchGradients` at rank 0, while the other ranks are in `follow`.

    random_states: of the others, as they begin.
    """

    def __init__(self, local: LocalGradients, group: RankGroup, random_states: Sequence[Tensor]) -> None:
        self._local, self._group = local, group
        self._random_states: tuple[Tensor, ...] | None = tuple(random_states)
        self.others_repeat = True

    def norms(self, rows: Tensor) -> BatchNorms:
        parts = self._send(_Order.NORMS, rows)
        own = self._local.norms(parts[0])
        table = self._group.gathered(_table(own), _sizes(parts))
        self._count()
        return _norms(table, own)

    def weighted_sum(self, rows: Tensor, weigh: Weigh) -> WeightedSum:
        parts = self._send(_Order.SUM, rows)
        exchange = _Deciding(self._group, [parts], lambda norms, _: weigh(norms))
        return self._added(self._local.weighted_sum(parts[0], exchange.of_batch), exchange)

    def weighted_sum_rowwise(self, rows: Tensor, weigh: WeighRows) -> WeightedSum:
        parts = self._send(_Order.SUM_ROWWISE, rows)
        exchange = _Deciding(self._group, _turns(parts, self._local), weigh)
        return self._added(self._local.weighted_sum_rowwise(parts[0], exchange.of_rows), exchange)

    def model_changed(self) -> None:
        self._order(_Order.TAKE_MODEL)
        _share_model(self._local.model, self._group)

    def random_states(self) -> tuple[Tensor, ...]:
        if self._random_states is None:
            self._order(_Order.SEND_RANDOM_STATE)
            states = self._group.gathered(_random_state(self._local)[None], [1] * self._group.size)
            self._random_states = tuple(state.clone() for state in states[1:])
        return self._random_states

    def finish(self) -> None:
        self._order(_Order.END)

    def _order(self, order: _Order, count: int = 0) -> None:
        self._group.broadcast(torch.tensor([order, count]))

    def _send(self, order: _Order, rows: Tensor) -> tuple[Tensor, ...]:
        """Have all ranks compute with ``rows``; returns those of each rank."""
        self._order(order, len(rows))
        self._group.broadcast(rows.cpu())
        self._random_states = None
        return torch.tensor_split(rows, self._group.size)

    def _added(self, own: WeightedSum, exchange: _Deciding) -> WeightedSum:
        exchange.finish()
        total = self._group.total(_flat(own.gradients))
        norms, weights = exchange.in_order(own.norms)
        return WeightedSum(norms, weights, _unflat(total, own.gradients), self._count(own.non_finite))

    def _count(self, non_finite: int = 0) -> int:
        """Collect what `_Follower` counts; returns how many gradients of all ranks were not finite."""
        counts = self._group.gathered(_counts(non_finite, repeatable=True), [1] * self._group.size)
        self.others_repeat &= bool(counts[1:, 1].all())
        return int(counts[:, 0].sum())


def follow(local: LocalGradients, group: RankGroup) -> None:
    """Compute this rank's share of whatever rank 0 orders, until it has finished."""
    follower = _Follower(local, group)
    while follower.obeys():
        pass


class _Follower:
    """A rank other than 0."""

    def __init__(self, local: LocalGradients, group: RankGroup) -> None:
        self._local, self._group, self._modes = local, group, modes_of(local.model)
        self._computes: Mapping[int, Callable[[tuple[Tensor, ...]], int]] = {
            _Order.NORMS: self._norms,
            _Order.SUM: self._weighted_sum,
            _Order.SUM_ROWWISE: self._weighted_sum_rowwise,
        }

    def obeys(self) -> bool:
        """Do what rank 0 orders next; False when there is nothing left to do."""
        order, count = self._group.broadcast(torch.zeros(2, dtype=torch.int64)).tolist()
        if order in self._computes:
            self._compute(order, count)
        elif order == _Order.TAKE_MODEL:
            _share_model(self._local.model, self._group)
        elif order == _Order.SEND_RANDOM_STATE:
            self._group.give(_random_state(self._local)[None], 1)
        return bool(order != _Order.END)

    def _compute(self, order: int, count: int) -> None:
        device, model = self._local.data.device, self._local.model
        rows = self._group.broadcast(torch.zeros(count, dtype=torch.int64)).to(device)
        before = RandomState.of(device)
        non_finite = self._computes[order](torch.tensor_split(rows, self._group.size))
        repeatable = before.is_current() and modes_of(model) == self._modes
        self._group.give(_counts(non_finite, repeatable), 1)

    def _norms(self, parts: tuple[Tensor, ...]) -> int:
        self._group.give(_table(self._local.norms(parts[self._group.rank])), max(_sizes(parts)))
        return 0

    def _weighted_sum(self, parts: tuple[Tensor, ...]) -> int:
        exchange = _Exchange(self._group, [parts])
        return self._added(self._local.weighted_sum(parts[self._group.rank], exchange.of_batch), exchange)

    def _weighted_sum_rowwise(self, parts: tuple[Tensor, ...]) -> int:
        exchange = _Exchange(self._group, _turns(parts, self._local))
        return self._added(self._local.weighted_sum_rowwise(parts[self._group.rank], exchange.of_rows), exchange)

    def _added(self, own: WeightedSum, exchange: _Exchange) -> int:
        exchange.finish()
        self._group.add(_flat(own.gradients))
        return own.non_finite


class _Exchange:
    """Sends the norms of this rank to rank 0, and returns the weights that rank 0 sends back.

    turns: for each call, the rows of every rank. All ranks make as many calls; `finish` makes those without rows.
    """

    def __init__(self, group: RankGroup, turns: Sequence[tuple[Tensor, ...]]) -> None:
        self._group, self._turns, self._done = group, turns, 0
        self._nothing: BatchNorms | None = None

    def of_batch(self, norms: BatchNorms) -> Tensor:
        """Weights [b] or, where clipping is by layer, [b, L], in the dtype of the norms."""
        turn = self._turns[self._done]
        self._done += 1
        layers = norms.layer_norms
        self._nothing = BatchNorms(norms.norms[:0], None if layers is None else layers[:0], norms.losses[:0])
        return self._answered(norms, turn, norms.norms if layers is None else layers)

    def of_rows(self, norms: BatchNorms, rows: Tensor) -> Tensor:
        """The same for the rows of one micro-batch."""
        return self.of_batch(norms)

    def finish(self) -> None:
        """Make the calls that rank 0 makes for more micro-batches than this rank has."""
        while self._done < len(self._turns) and self._nothing is not None:
            self.of_batch(self._nothing)

    def _answered(self, norms: BatchNorms, turn: tuple[Tensor, ...], like: Tensor) -> Tensor:
        self._group.give(_table(norms), max(_sizes(turn)))
        return self._group.taken(like, max(_sizes(turn)))


class _Deciding(_Exchange):
    """The exchange at rank 0, which weighs the examples of all ranks."""

    def __init__(self, group: RankGroup, turns: Sequence[tuple[Tensor, ...]], weigh: WeighRows) -> None:
        super().__init__(group, turns)
        self._weigh = weigh
        self._tables, self._weights = list[Tensor](), list[Tensor]()

    def _answered(self, norms: BatchNorms, turn: tuple[Tensor, ...], like: Tensor) -> Tensor:
        sizes = _sizes(turn)
        table = self._group.gathered(_table(norms), sizes)
        weights = self._weigh(_norms(table, norms), torch.cat(turn)).to(like)
        if weights.dim() < like.dim():
            weights = weights[:, None].expand(-1, like.shape[1])
        self._tables.append(table)
        self._weights.append(weights)
        self._group.scatter(weights, sizes)
        return weights[: sizes[0]]

    def in_order(self, own: BatchNorms) -> tuple[BatchNorms, Tensor]:
        """Norms and weights of the whole batch, in its order."""
        return _norms(self._by_rank(self._tables), own), self._by_rank(self._weights)

    def _by_rank(self, calls: Sequence[Tensor]) -> Tensor:
        parts = [call.split(_sizes(turn)) for call, turn in zip(calls, self._turns, strict=True)]
        return torch.cat([torch.cat(of_rank) for of_rank in zip(*parts, strict=True)])


def _turns(parts: tuple[Tensor, ...], local: LocalGradients) -> Sequence[tuple[Tensor, ...]]:
    """The rows of every rank in each of its micro-batches; rank 0 has the most."""
    most = max(1, len(parts[0]))
    size = local.micro_batch_size or most
    return [tuple(rows[start : start + size] for rows in parts) for start in range(0, most, size)]


def _sizes(parts: tuple[Tensor, ...]) -> list[int]:
    return [len(rows) for rows in parts]


def _table(norms: BatchNorms) -> Tensor:
    """Norms, losses and norms by layer as one table [b, 2 + L] in double precision."""
    layers = [] if norms.layer_norms is None else [norms.layer_norms]
    return torch.cat([each.double() for each in (norms.norms[:, None], norms.losses[:, None], *layers)], 1)


def _norms(table: Tensor, like: BatchNorms) -> BatchNorms:
    """The norms in a table, in the dtypes of ``like``."""
    layers = None if like.layer_norms is None else table[:, 2:].to(like.layer_norms)
    return BatchNorms(table[:, 0].to(like.norms), layers, table[:, 1].to(like.losses))


def _flat(gradients: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([each.flatten() for each in gradients.values()])


def _unflat(flat: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    parts = flat.split([each.numel() for each in like.values()])
    return {name: part.view(each.shape).to(each.dtype) for (name, each), part in zip(like.items(), parts, strict=True)}


def _counts(non_finite: int, repeatable: bool) -> Tensor:
    """[1, 2]: gradients that are not finite, and whether the passes drew nothing and changed the mode of no module."""
    return torch.tensor([[non_finite, repeatable]])


@torch.no_grad()
def _share_model(model: nn.Module, group: RankGroup) -> None:
    """Give every rank the trainable parameters, buffers and modes of rank 0."""
    trainable = {name: each for name, each in model.named_parameters() if each.requires_grad}
    received = group.broadcast(_flat(trainable))
    for each, values in zip(trainable.values(), _unflat(received, trainable).values(), strict=True):
        each.copy_(values)
    for buffer in model.buffers():
        buffer.copy_(group.broadcast(buffer))
    modes = modes_of(model)
    training = group.broadcast(torch.tensor([*modes.values()], dtype=torch.uint8))
    set_modes(model, dict(zip(modes, training.bool().tolist(), strict=True)))


def first_random_states(spec: TrialSpec, size: int, device: torch.device) -> tuple[Tensor, ...]:
    """The states of the generators of all ranks but the first, which are those of one process, before the first step.

    They come from the trial's seed, or from secret keys where the noise does; see `workers.noise.start_generator`.
    """
    return tuple(_first_random_state(spec, rank, device) for rank in range(1, size))


def _first_random_state(spec: TrialSpec, rank: int, device: torch.device) -> Tensor:
    states = []
    for purpose in ("model", "augmentation"):
        generator = torch.Generator()
        start_generator(generator, spec.noise_source, spec.seed, f"{purpose} of rank {rank}")
        states.append(generator.get_state())
    if device.type == "cuda":
        secret = noise_source_kind(spec.noise_source).is_secret
        seed = KeyedStream.from_os().words(1)[0] if secret else derive_seed(spec.seed, f"model of rank {rank}")
        states.append(torch.Generator(device).manual_seed(int(seed)).get_state())
    return torch.cat(states)


def _random_state(local: LocalGradients) -> Tensor:
    """The states of the generators that this process draws from, as bytes: those of the model and of augmentation."""
    device = local.data.device
    cuda = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return torch.cat([torch.get_rng_state(), local.augmentation_rng.get_state(), *cuda])


def restore_random_state(local: LocalGradients, state: Tensor) -> None:
    """Set the generators of this process to a state of `DividedGradients.random_states`."""
    length, device = len(local.augmentation_rng.get_state()), local.data.device
    torch.set_rng_state(state[:length].clone())
    local.augmentation_rng.set_state(state[length : 2 * length].clone())
    if device.type == "cuda" and len(state) > 2 * length:  # a run may resume on the other kind of device
        torch.cuda.set_rng_state(state[2 * length :].clone(), device)
