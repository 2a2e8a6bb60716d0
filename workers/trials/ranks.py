"""Communication between the processes (ranks) that train one trial together, on one node or on several.

Rank 0 trains; the others compute their share of its gradients (`dpsweep.workers.trials.data_parallel`). Only tensors
are sent, so nothing is unpickled. On one node all sockets listen on the loopback interface only.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as distributed
from torch import Tensor
from torch._C._distributed_c10d import FileStore, Store

from dpsweep.accounting.errors import DpsweepError, InvalidInput
from dpsweep.workers.gradients.micro_batches import with_padding
from dpsweep.workers.machine.devices import lacks_memory
from dpsweep.workers.spec import Shard

_TIMEOUT: Final = timedelta(days=30)
"""Timeout of a rank that waits for others, which may evaluate or store meanwhile; a lost rank is noticed at once."""
_SIOCGIFADDR: Final = 0x8915
"""Linux's question for the address of an interface (netdevice(7))."""
_VALUES_AT_ONCE: Final = 2**24
"""Number of values of a sum that are gathered at a time."""


_NOTHING: Final = -1
"""Place that a rank names when it needs no group."""
_MOST_AXES: Final = 8
_DTYPES: Final = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool)


class RankLost(DpsweepError):
    """Another process of the trial has ended; the trial continues from its checkpoint when it is started again."""


class Lending:
    """Parameters that ranks have divided, and lend each other group by group, in rounds.

    In each round all ranks name the group that they need, if any, and lend their parts of those that are needed. So
    ranks may need other groups at the same time, or another number of them. size: number of ranks. shard: which
    parameters they divide.

    Raises: RankLost, from `borrow` and `lend`, when another process has ended.
    """

    def __init__(self, size: int, shard: Shard) -> None:
        self.size, self.shard = size, shard
        self._parts: list[Callable[[], Tensor]] = []

    def add(self, part: Callable[[], Tensor]) -> int:
        """Add a group and return its place; ``part``: the bytes that this rank has of it.

        All ranks add the same groups in the same order.
        """
        self._parts.append(part)
        return len(self._parts) - 1

    def borrow(self, place: int, whole: Tensor) -> None:
        """Fill ``whole`` with the bytes of a group, in the order of ranks."""
        self._round(place, whole)

    def lend(self) -> None:
        """Take part in rounds until no rank needs anything."""
        nothing = torch.empty(0, dtype=torch.uint8)
        while self._round(_NOTHING, nothing) != {_NOTHING}:
            pass

    def _round(self, needed: int, whole: Tensor) -> set[int]:
        """Return what the ranks needed in this round, after it."""
        told = torch.empty(self.size, dtype=torch.int64)
        with _reporting_lost_ranks():
            distributed.all_gather_into_tensor(told, torch.tensor([needed]))
            needs = set(told.tolist())
            for place in sorted(needs - {_NOTHING}):
                part = self._parts[place]()
                filled = whole if place == needed else part.new_empty(self.size * len(part))
                distributed.all_gather_into_tensor(filled, part)
        return needs


class RankGroup:
    """Processes connected by torch.distributed. All of them make matching calls in the same order.

    Results are bit-identical for equal inputs, because sums are added in the order of ranks.

    lending: the parts of parameters that ranks lend each other; None where each has all of them. While a rank waits for
    others, it lends.

    Raises: RankLost, from every method, when another process has ended.
    """

    def __init__(self, rank: int, size: int, through_host: bool, lending: Lending | None = None) -> None:
        self.rank, self.size, self._through_host, self.lending = rank, size, through_host, lending

    def meet(self) -> None:
        """Wait until rank 0 has called this too."""
        self.broadcast(torch.zeros(1))

    def broadcast(self, values: Tensor) -> Tensor:
        """Return the values of rank 0. Others pass a tensor like it, which may be overwritten."""
        if not values.numel():
            return values
        sent = self._ready(values)
        with self._meeting():
            distributed.broadcast(sent, 0)
        return sent.to(values.device)

    def shared(self, values: Tensor | None, device: torch.device) -> Tensor | None:
        """Return the tensor or None of rank 0; others pass None. It is on ``device``, or on the CPU if it is there."""
        header = torch.full((_MOST_AXES + 3,), -1)
        if values is not None:
            place = int(values.device.type != "cpu")
            header[: values.dim() + 3] = torch.tensor([_DTYPES.index(values.dtype), place, values.dim(), *values.shape])
        kind, place, axes, *shape = self.broadcast(header).tolist()
        if kind < 0:
            return None
        sent = torch.empty(shape[:axes], dtype=_DTYPES[kind]) if values is None else values.cpu()
        return self.broadcast(sent).to(device if place else sent.device)

    def gathered(self, part: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return, at rank 0, the rows ``part`` and what others `give`, by rank. sizes: rows of each rank."""
        sent = with_padding(self._ready(part), max(1, *sizes))
        received = self._gather_equal(sent)
        return torch.cat([each[:size] for each, size in zip(received, sizes, strict=True)]).to(part.device)

    def give(self, part: Tensor, most: int) -> None:
        """Send rows, at ranks other than 0, to `gathered`. most: largest number of rows that any rank sends."""
        self._send_to_rank_0(with_padding(self._ready(part), max(1, most)))

    def scatter(self, whole: Tensor, sizes: Sequence[int]) -> None:
        """Send, from rank 0, each rank its rows of ``whole``, in the order of ranks."""
        most = max(1, *sizes)
        parts = [with_padding(each, most) for each in torch.split(self._ready(whole), list(sizes))]
        with self._meeting():
            distributed.scatter(torch.empty_like(parts[0]), parts, 0)

    def taken(self, like: Tensor, most: int) -> Tensor:
        """Return, at ranks other than 0, the rows from `scatter`, with the shape, dtype and device of ``like``.

        most: largest number of rows that any rank receives.
        """
        own = self._ready(like.new_empty(max(1, most), *like.shape[1:]))
        with self._meeting():
            distributed.scatter(own, None, 0)
        return own[: len(like)].to(like.device)

    def total(self, part: Tensor) -> Tensor:
        """Return, at rank 0, the sum [n] of ``part`` and what others `add`, in double precision and rank order."""
        sums = []
        for piece in torch.split(self._ready(part), _VALUES_AT_ONCE):
            first, *others = self._gather_equal(piece)
            whole = first.double()
            for each in others:
                whole += each
            sums.append(whole.to(part))
        return torch.cat(sums)

    def add(self, part: Tensor) -> None:
        """Send, at ranks other than 0, ``part`` [n] to be added by `total`."""
        for piece in torch.split(self._ready(part), _VALUES_AT_ONCE):
            self._send_to_rank_0(piece)

    def _gather_equal(self, part: Tensor) -> list[Tensor]:
        received = [torch.empty_like(part) for _ in range(self.size)]
        with self._meeting():
            distributed.gather(part, received, 0)
        return received

    def _send_to_rank_0(self, part: Tensor) -> None:
        with self._meeting():
            distributed.gather(part, None, 0)

    @contextlib.contextmanager
    def _meeting(self) -> Iterator[None]:
        """Within this context a rank sends or receives, after all have come here."""
        if self.lending is not None:
            self.lending.lend()
        with _reporting_lost_ranks():
            yield

    def _ready(self, values: Tensor) -> Tensor:
        return (values.cpu() if self._through_host else values).contiguous()


@contextlib.contextmanager
def connected_ranks(
    rank: int,
    size: int,
    meeting_place: str | Store,
    *,
    nccl: bool,
    address: str = "127.0.0.1",
    shard: Shard | None = None,
) -> Iterator[RankGroup]:
    """Connect this process with the other ranks of its trial for the duration of a ``with`` block.

    `meeting_place`: path of a file that does not exist yet, the same for all ranks, in a folder closed to other users.
    Ranks on several nodes have a store in which strangers can neither read nor write.
    `address`: of this node, by which the others reach it.
    `nccl`: whether each rank has its own GPU; otherwise, and where torch sees none, values go through the memory of the
    host.
    `shard`: which parameters the ranks divide, if any.

    Where the block fails, the process of a rank with NCCL must end: NCCL would wait for ranks that wait elsewhere
    (pytorch#141510).
    """
    nccl = nccl and torch.cuda.is_available()
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface_of(address)
    store = FileStore(meeting_place, size) if isinstance(meeting_place, str) else meeting_place
    with _reporting_lost_ranks():
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if nccl else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=_TIMEOUT,
        )
    try:
        yield RankGroup(rank, size, through_host=not nccl, lending=Lending(size, shard) if shard else None)
    except BaseException:
        if not nccl:
            distributed.destroy_process_group()
        raise
    distributed.destroy_process_group()


def interface_of(address: str) -> str:
    """Return the network interface of this node that has an address. Raises: InvalidInput if none has."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                found = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    raise InvalidInput(
        f"no network interface of {socket.gethostname()} has the address {address}, by which Ray knows this node; give "
        "ranks one node, or start Ray with --node-ip-address"
    )


@contextlib.contextmanager
def _reporting_lost_ranks() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if lacks_memory(error):
            raise
        reason = "another process of the trial has ended"
        if isinstance(error, distributed.DistBackendError):
            reason = f"{reason}, or NCCL failed: {str(error).partition(chr(10))[0]}"
        raise RankLost(reason) from error
