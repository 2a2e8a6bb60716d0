"""Trials on several ranks, in processes that a test starts."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from dpsweep.workers.noise import chacha
from dpsweep.workers.spec import Shard, TrialSpec
from dpsweep.workers.training.history import Progress
from dpsweep.workers.trials.ranks import RankLost, connected_ranks
from dpsweep.workers.trials.trial import follow_trial, run_trial
from tests.warm import FORKS
from tests.workers.user_modules import code_of

LOST = 3
"""Exit code of a rank that another one has left alone."""


def started(
    trials: Mapping[str, TrialSpec],
    root: Path,
    size: int,
    dies: int | None = None,
    drawn: str = "",
    shard: Shard | None = None,
) -> Sequence[BaseProcess]:
    """The ranks of a group that train all trials, one after the other, in folders of ``root`` with their names.

    dies: a rank that is killed after the first epoch of the first trial. drawn: beginning of the names of files in
    ``root``, one for each rank, with the blocks that it draws from secret keys; "" for none. shard: which parameters
    they divide.
    """
    from tests.workers.rank_runs import _take_part as take_part  # as it is now: a test of own code may load it again

    root.mkdir(exist_ok=True)
    place = Path(tempfile.mkdtemp(dir=root)) / "meeting"
    ranks = [
        FORKS.Process(target=take_part, args=(dict(trials), str(root), number, size, str(place), dies, drawn, shard))
        for number in range(size)
    ]
    for rank in ranks:
        rank.start()
    return ranks


def ended(ranks: Sequence[BaseProcess]) -> list[int | None]:
    """The exit code of each rank, within minutes."""
    for rank in ranks:
        rank.join(240.0)
        if rank.exitcode is None:
            rank.kill()
            rank.join()
    return [rank.exitcode for rank in ranks]


def _note_blocks(path: Path) -> None:
    """Note key, nonce and counter of every block that this process draws."""
    of_stream = chacha.keystream

    def noted(key: bytes, nonce: bytes, first: int, blocks: int, device: torch.device) -> torch.Tensor:
        with path.open("a") as file:
            file.writelines(f"{key.hex()} {nonce.hex()} {first + index}\n" for index in range(blocks))
        return of_stream(key, nonce, first, blocks, device)

    chacha.keystream = noted


def _take_part(
    trials: dict[str, TrialSpec],
    root: str,
    number: int,
    size: int,
    place: str,
    dies: int | None,
    drawn: str,
    shard: Shard | None,
) -> None:
    if drawn:
        Path(root, f"{drawn}{number}").touch()
        _note_blocks(Path(root, f"{drawn}{number}"))
    (Path(place).parent / str(number)).write_text(str(os.getpid()))

    def kill(progress: Progress) -> None:
        if dies is not None:
            os.kill(int((Path(place).parent / str(dies)).read_text()), signal.SIGKILL)

    try:
        with connected_ranks(number, size, place, nccl=False, shard=shard) as group:
            for name, spec in trials.items():
                if number == 0:
                    run_trial(spec, f"{root}/{name}", code=code_of(spec), group=group, on_progress=kill)
                else:
                    follow_trial(spec, f"{root}/{name}", group, code=code_of(spec))
    except RankLost:
        sys.exit(LOST)
