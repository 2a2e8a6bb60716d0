"""Settings of torch for one trial (threads, determinism, precision, random state), and clearer errors of torch."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from typing import Final

import torch

from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.gradients.divided import any_divided
from dpsweep.workers.machine.devices import choose_device, lacks_memory, torch_defaults, without_tf32
from dpsweep.workers.spec import ExecutionSpec
from dpsweep.workers.training.less_memory import LackOfMemory


@contextlib.contextmanager
def reproducible(execution: ExecutionSpec, seed: int) -> Iterator[None]:
    """Set threads, determinism, precision and torch's global random state for one trial, and restore them afterwards.

    TensorFloat-32 is off: with it a clipped gradient could exceed its bound by far more than the rounding error that
    the noise covers. Debug mode "error" does the same as torch.use_deterministic_algorithms but does not import the
    compiler (torch._inductor), which reads its own setting from the environment.
    """
    device = choose_device(execution.device)
    if execution.deterministic:
        os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")
    threads, deterministic = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    gpus = [device] if device.type == "cuda" else []
    current: contextlib.AbstractContextManager[object] = torch.cuda.device(device) if gpus else contextlib.nullcontext()
    with torch_defaults(), without_tf32(), current, torch.random.fork_rng(devices=gpus):
        _use_threads(execution.threads)
        torch.set_deterministic_debug_mode("error" if execution.deterministic else "default")
        torch.default_generator.manual_seed(seed)  # torch.manual_seed asks for every kind of device, in .1 ms
        if gpus:
            torch.cuda.manual_seed(seed)
        try:
            yield
        finally:
            _use_threads(threads)
            torch.set_deterministic_debug_mode(deterministic)


def _use_threads(threads: int) -> None:
    if torch.get_num_threads() != threads:  # setting the same number would empty torch's cache of kernels
        torch.set_num_threads(threads)


@contextlib.contextmanager
def explained(execution: ExecutionSpec) -> Iterator[None]:
    """Turn torch errors that a field of ``execution`` can prevent into an `InvalidInput` that names the field."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        if "does not have a deterministic implementation" in reason:
            operation = reason.split()[0]
            raise InvalidInput(
                f"torch has no deterministic algorithm for {operation} on device {execution.device!r}; "
                "set execution.deterministic: false, or use a model without it"
            ) from error
        if lacks_memory(error):
            raise LackOfMemory(
                f"memory of device {execution.device!r} does not suffice at execution.micro_batch_size: "
                f"{json.dumps(execution.micro_batch_size)} (null is the whole batch at once); set it lower"
            ) from error
        if "modified by an inplace operation" in reason and any_divided():
            raise InvalidInput(
                "a backward pass needs parameters of a layer through another tensor than the layer's outputs, and "
                "ranks gather them for its outputs alone; return the tensor from the layer, in a tuple or dict if "
                "there are several, or leave resources.shard out"
            ) from error
        for words, advice in _OF_TRANSFORMS.items():
            if words in reason:
                raise InvalidInput(advice) from error
        raise


_OF_TRANSFORMS: Final[Mapping[str, str]] = {
    "function being transformed by a functorch": "the model runs a layer with parameters within torch.vmap or another "
    "transform of torch.func, where the gradients of single examples are not seen; run the layer on the whole batch",
    "escaped from inside a function being vmapped": "the model keeps a tensor of a forward pass, or computes a part "
    "that reads a parameter of the module around it again, as under torch.utils.checkpoint; put that part, with its "
    "parameters, into a module of its own, and checkpoint that: checkpoint(self.part, x, use_reentrant=False)",
}
"""Words of torch's errors about its transforms, and the error to raise instead."""
