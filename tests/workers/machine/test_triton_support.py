"""Every Triton kernel is compiled to machine code of two GPUs, which needs none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from dpsweep.workers.machine.triton_support import has_triton

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from dpsweep.workers.gradients import fused_norms  # noqa: E402
from dpsweep.workers.machine import trial_kernel  # noqa: E402
from dpsweep.workers.noise import fused_kernels  # noqa: E402

SECRET = {**{f"k{place}": "i32" for place in range(8)}, **{f"n{place}": "i32" for place in range(3)}}
LIMITS = dict.fromkeys(("cancellation", "coherent", "share", "large"), "fp32")
GRAMS = dict.fromkeys(("activations", "grads", "out"), "*fp32")
SPLIT = {"weights": "*fp32", "upper": "*bf16", "lower": "*bf16", "count": "i64", "per_example": "i32"}
SIZES = {"first": "i64", "count": "i32", "scale": "i64", "grid": "i64"}
KERNELS: Mapping[str, tuple[Any, Mapping[str, str], Mapping[str, int]]] = {
    "trial": (trial_kernel._double, {"values": "*fp32", "count": "i32"}, {"SIZE": 16}),
    "words": (fused_kernels._write_words, {"out": "*i64", **SECRET, "first": "i32", "count": "i32"}, {"BLOCKS": 128}),
    "noise": (fused_kernels._add_noise, {"values": "*fp32", **SECRET, **SIZES}, {"DRAWS": 1, "BLOCKS": 128}),
    "noise of four": (fused_kernels._add_noise, {"values": "*bf16", **SECRET, **SIZES}, {"DRAWS": 4, "BLOCKS": 128}),
    "ghost norm": (
        fused_norms._ghost_norm,
        {**GRAMS, "length": "i32", "entries": "i32", **LIMITS},
        {"TILE": 2048},
    ),
    "halves": (fused_norms._scale_and_split, {"values": "*bf16", **SPLIT}, {"VALUES": 1024}),
    "halves of float32": (fused_norms._scale_and_split, {"values": "*fp32", **SPLIT}, {"VALUES": 1024}),
}


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", KERNELS)
def test_it_compiles(name: str, capability: int) -> None:
    kernel, arguments, constants = KERNELS[name]
    signature = {**arguments, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(fn=kernel, signature=signature, constexprs=dict(constants))
    assert triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]


def test_a_cpu_has_none() -> None:
    assert not has_triton(torch.device("cpu"))
