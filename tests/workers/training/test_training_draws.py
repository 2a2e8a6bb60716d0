"""Random numbers of models and augmentation: as secret as the noise, and known where norms depend on them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from torch import Tensor, nn
from torch.nn import functional
from torchvision.ops import StochasticDepth

from dpsweep.workers.spec import Component, DataSpec, NormSpec, TrialSpec
from dpsweep.workers.training.trainer import Trainer
from tests.workers.devices import DEVICE
from tests.workers.trial_runs import made_trainer, train
from tests.workers.trial_specs import DROPOUT_NET, small_trial

AUGMENTED = small_trial(
    data=DataSpec("digits", keep={str(digit): 4 for digit in range(10)}),
    augmentation=Component("flip_and_crop", {"padding": 2}),
)


def trainer_of(spec: TrialSpec, folder: Path) -> Trainer:
    """As `run_trial` makes it."""
    torch.manual_seed(spec.seed)
    return made_trainer(spec, folder)


def first_sum(spec: TrialSpec, folder: Path) -> Tensor:
    """The clipped sum over all examples at the start."""
    trainer = trainer_of(spec, folder)
    trainer.begin()
    gradients = trainer._clipped_sum(torch.arange(len(trainer._data), device=DEVICE)).gradients
    return torch.cat([gradient.flatten() for gradient in gradients.values()])


@pytest.mark.thinned(4)
@pytest.mark.parametrize("spec", [small_trial(model=DROPOUT_NET), AUGMENTED], ids=["dropout", "augmentation"])
@pytest.mark.parametrize("noise_source", ["os_entropy", "os_entropy_secure"])
def test_what_training_draws_is_not_known_from_the_seed(spec: TrialSpec, noise_source: str, tmp_path: Path) -> None:
    """Else an example more would shift the known draws of all others, and move the sum by several sensitivities."""
    secret = replace(spec, noise_source=noise_source)
    assert not torch.equal(first_sum(secret, tmp_path), first_sum(secret, tmp_path))
    assert torch.equal(first_sum(spec, tmp_path), first_sum(spec, tmp_path))


@pytest.mark.parametrize("noise_source", ["os_entropy", "os_entropy_secure"])
def test_no_seed_of_torch_gives_away_what_training_draws(noise_source: str, tmp_path: Path) -> None:
    """The generators of the CPU take 32 bits of a seed, as many as can be tried one after the other."""
    state = trainer_of(replace(AUGMENTED, noise_source=noise_source), tmp_path).state()
    for name in ("torch", "augmentation"):
        first = int.from_bytes(bytes(state[name][24:28].tolist()), "little")  # of a seeded state, the seed itself
        assert not torch.equal(torch.Generator().manual_seed(first).get_state()[8:], state[name][8:])


@pytest.mark.parametrize("noise_source", ["os_entropy", "os_entropy_secure"])
def test_batches_come_from_a_cryptographic_stream(noise_source: str, tmp_path: Path) -> None:
    """An independent ChaCha20 of key and nonce says who joins."""
    trainer = trainer_of(replace(AUGMENTED, noise_source=noise_source), tmp_path)
    state, n = trainer.state()["sampler"], len(trainer._data)
    first = Cipher(ChaCha20(state["draws"]["key"], bytes(16)), mode=None).encryptor().update(bytes(n))
    threshold = 256 * AUGMENTED.sampling.expected_size(n) / n
    batch = trainer._sampler.next_batch().tolist()
    undecided = {row for row in range(n) if first[row] == int(threshold)}
    assert set(batch) - undecided == {row for row in range(n) if first[row] < int(threshold)}


@pytest.mark.parametrize("noise_source", ["seeded", "os_entropy"])
def test_the_first_weights_come_from_the_seed_alone(noise_source: str, tmp_path: Path) -> None:
    """They are no secret, and what is drawn later does not depend on how many of them there are."""
    spec = small_trial(noise_source=noise_source, model=Component("mlp", {"hidden": [8]}))
    models = [made_trainer(spec, tmp_path).released_model() for _ in range(2)]
    for first, second in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(first, second)


class Drawing(nn.Module):
    """Two layers with something random between them."""

    def __init__(self, feature_shape: tuple[int, ...], num_classes: int, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.last = nn.Linear(feature_shape[0], 8), nn.Linear(8, num_classes)
        self.cells = nn.LSTM(8, 8, 2, batch_first=True, dropout=0.5) if kind == "recurrent" else None
        self.depth, self.slope = StochasticDepth(0.5, "row"), nn.RReLU()

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.kind == "functional dropout":
            h = functional.dropout(h, 0.5, self.training)
        elif self.kind == "stochastic depth":
            h = self.depth(h)
        elif self.kind == "random slopes":
            h = self.slope(h)
        elif self.cells is not None:
            h = self.cells(h[:, None])[0][:, -1]
        out: Tensor = self.last(h)
        return out


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("kind", "claim"),
    [
        ("functional dropout", "estimate"),
        ("stochastic depth", "estimate"),
        ("random slopes", "estimate"),
        ("recurrent", "estimate"),
        ("nothing", "output_specific"),
    ],
)
def test_norms_of_a_model_that_draws_are_estimates(kind: str, claim: str, tmp_path: Path) -> None:
    """However it draws: another pass has other gradients."""
    model = Component(f"{__file__}:Drawing", {"kind": kind})
    _, trace, _ = train(small_trial(model=model, norms=NormSpec("every_step"), epochs=1), tmp_path)
    assert trace.contributions == claim


@pytest.mark.parametrize(("model", "claim"), [(DROPOUT_NET, "estimate"), (Component("logistic"), "output_specific")])
def test_a_model_that_draws_is_known_before_the_first_step(model: Component, claim: str, tmp_path: Path) -> None:
    trainer = trainer_of(small_trial(model=model, norms=NormSpec("every_step")), tmp_path)
    assert trainer.mechanism.contributions == claim


class Remembering(nn.Module):
    """Keeps its last activation to look at."""

    def __init__(self, feature_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(feature_shape[0], 8), nn.Linear(8, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.first(x).relu()
        out: Tensor = self.last(self.hidden)
        return out


def test_a_model_that_keeps_activations_can_be_averaged(tmp_path: Path) -> None:
    """torch copies no tensor that autograd made."""
    model = Component(f"{__file__}:Remembering")
    result, _, _ = train(small_trial(model=model, averaging=Component("ema", {"decay": 0.9})), tmp_path)
    assert result.epochs == 2
