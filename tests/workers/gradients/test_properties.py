"""Random architectures against brute force."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dpsweep.workers.gradients.engine import GradientEngine
from dpsweep.workers.models.extra_layers import WeightStandardizedConv2d
from tests.workers.brute_force import gradients_one_by_one, norms_of, per_example_loss
from tests.workers.devices import DEVICE


@st.composite
def convolutional_models(draw: st.DrawFn) -> nn.Module:
    channels = 2 * draw(st.integers(1, 4))
    layers: list[nn.Module] = []
    inputs = 3
    for _ in range(draw(st.integers(1, 3))):
        groups = draw(st.sampled_from([1, 2])) if inputs % 2 == 0 else 1
        kernel = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
        if draw(st.booleans()):
            layers.append(
                nn.Conv2d(
                    inputs,
                    channels,
                    kernel,
                    stride=draw(st.integers(1, 2)),
                    padding=draw(st.integers(1, 2)),
                    dilation=draw(st.integers(1, 2)),
                    groups=groups,
                    bias=draw(st.booleans()),
                    padding_mode=draw(st.sampled_from(["zeros", "replicate"])),
                )
            )
        else:
            layers.append(WeightStandardizedConv2d(inputs, channels, 3, stride=draw(st.integers(1, 2)), padding=1))
        layers.append(draw(st.sampled_from([nn.Identity(), nn.GroupNorm(1, channels)])))
        layers.append(draw(st.sampled_from([nn.Tanh(), nn.ReLU(inplace=True), nn.SiLU()])))
        inputs = channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * inputs, 3))


@st.composite
def sequence_models(draw: st.DrawFn) -> nn.Module:
    layers: list[nn.Module] = []
    width = 4
    for _ in range(draw(st.integers(1, 4))):
        wider = draw(st.integers(2, 9))
        choices = [
            nn.Sequential(nn.Linear(width, wider, bias=draw(st.booleans())), nn.GELU()),
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, wider)),
            nn.Sequential(nn.RMSNorm(width), nn.Linear(width, wider)),
            nn.Sequential(nn.PReLU(), nn.Linear(width, wider), nn.Tanh()),
        ]
        layers.append(draw(st.sampled_from(choices)))
        width = wider
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(6 * width, 3))


def assert_agrees(model: nn.Module, shape: tuple[int, ...], multiplicity: int, micro_batch_size: int | None) -> None:
    generator = torch.Generator(DEVICE).manual_seed(0)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    model = model.double()
    x = torch.randn(4, *shape, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (4,), generator=generator)
    expected = gradients_one_by_one(model, x, y, multiplicity)
    weights = torch.linspace(0.5, 1.0, 4 // multiplicity, dtype=torch.float64)
    engine = GradientEngine(model, per_example_loss, multiplicity=multiplicity, micro_batch_size=micro_batch_size)

    got = engine.weighted_sum(x, y, lambda norms: weights)

    size = norms_of(expected).norm()
    torch.testing.assert_close(got.norms.norms, norms_of(expected), rtol=1e-9, atol=1e-12)
    for name, gradient in got.gradients.items():
        reference = torch.tensordot(weights, expected[name], 1)
        assert float((gradient - reference).norm()) <= 1e-9 * float(size) + 1e-12


EXECUTIONS = st.tuples(st.sampled_from([1, 2]), st.sampled_from([None, 1]))


@pytest.mark.long
@settings(max_examples=12, deadline=None, derandomize=True)
@given(convolutional_models(), EXECUTIONS)
def test_random_convolutional_models(model: nn.Module, execution: tuple[int, int | None]) -> None:
    assert_agrees(model, (3, 12, 11), *execution)


@pytest.mark.long
@settings(max_examples=12, deadline=None, derandomize=True)
@given(sequence_models(), EXECUTIONS)
def test_random_sequence_models(model: nn.Module, execution: tuple[int, int | None]) -> None:
    assert_agrees(model, (6, 4), *execution)
