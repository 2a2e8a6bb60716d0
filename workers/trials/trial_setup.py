"""Sets a trial up: from its specification, or its checkpoint, to a trainer before its next step."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor

from dpsweep.accounting.errors import START_ANEW, DataCorruption, InvalidInput, count_of
from dpsweep.accounting.mechanism.trace import Release
from dpsweep.accounting.records.files import delete, exists, read_bytes, write_bytes_atomically
from dpsweep.accounting.records.sealed import write_private_sealed
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.accounting.records.user_files import write_users
from dpsweep.workers.clipping import make_clipping
from dpsweep.workers.data import Dataset, Split, load_dataset, ownership
from dpsweep.workers.gradients.checks import trained_parameters
from dpsweep.workers.machine.checkpoint import (
    fingerprint,
    load_checkpoint,
    part_of_rank,
    save_checkpoint,
)
from dpsweep.workers.machine.devices import choose_device, rounding_of
from dpsweep.workers.noise.gaussian_sources import NoiseSource
from dpsweep.workers.noise.noise_sources import make_noise_source
from dpsweep.workers.noise.step_noise import EARLIER
from dpsweep.workers.own_code.imports import UserCode
from dpsweep.workers.own_code.own_record import require_same_code, require_same_weights, store_code
from dpsweep.workers.sampling.users import population_of, with_rows_of_users
from dpsweep.workers.spec import TrialSpec, at_speed_of, divides_trained
from dpsweep.workers.training.batch_gradients import TrainingRecipe, recipe_of
from dpsweep.workers.training.counters import TextCounts
from dpsweep.workers.training.norm_recorder import stored_norms
from dpsweep.workers.training.preprocessing import make_preprocessing
from dpsweep.workers.training.trainer import Trainer
from dpsweep.workers.training.trial_mechanism import mechanism_of
from dpsweep.workers.trials.data_parallel import first_random_states
from dpsweep.workers.trials.divided_model import DividedOptimizer, divide
from dpsweep.workers.trials.divisible import require_divisible
from dpsweep.workers.trials.exposure import with_secrets
from dpsweep.workers.trials.feasibility import excerpt
from dpsweep.workers.trials.ranks import RankGroup


def as_begun(files: TrialFiles, spec: TrialSpec, code: UserCode) -> TrialSpec:
    """Return ``spec`` with the speed settings (`SPEED`) that the trial began with.

    Other settings would round the steps since the checkpoint differently, and as a resumed run repeats its noise, the
    noise would not hide such a difference. Raises: InvalidInput if the folder holds another trial, or one that began
    with other ``code``, and for weights that are to be trained and are not those of the run; DataCorruption if the
    stored spec is damaged.
    """
    if code.weights and not exists(files.training):
        require_same_weights(spec, code)
    if not exists(files.spec):
        return spec
    try:
        stored = TrialSpec.from_json(read_bytes(files.spec))
    except ValueError as error:
        raise DataCorruption(f"{files.spec} is damaged; {START_ANEW}") from error
    spec = at_speed_of(spec, stored.execution)
    ours, theirs = asdict(spec), asdict(stored)
    different = [name for name in ours if ours[name] != theirs[name]]
    if different:
        raise InvalidInput(
            f"{files.root} holds a trial that differs in {', '.join(different)}; use another folder, or {START_ANEW}"
        )
    require_same_code(files, spec, code)
    return spec


class _CheckpointWriter:
    """Stores the checkpoints of a trial, each once all norms before it are stored.

    Other ranks may store parts of a checkpoint. They are deleted when another checkpoint has replaced it.
    """

    def __init__(
        self,
        files: TrialFiles,
        owner: str,
        trainer: Trainer,
        fitted: Mapping[str, Tensor],
        random_states: Sequence[Tensor],
        drawn: Mapping[str, Any] | None,
        parts: set[str],
    ) -> None:
        """`fitted`, `random_states`: as in `TrialSetup`. `drawn`: rows of users. `parts`: of the last checkpoint."""
        self._files, self._owner, self._trainer, self._parts = files, owner, trainer, parts
        self._fitted, self._random_states, self._drawn = fitted, random_states, drawn
        self._rounding = rounding_of(trainer.local.data.device)

    def save(self) -> None:
        """Replace the checkpoint by the present state of the trial."""
        trainer = self._trainer
        for store in trainer.stores:
            store.wait()
        others = trainer.gradients.random_states() or self._random_states
        state: dict[str, Any] = {
            "preprocessing": self._fitted,
            "trainer": trainer.state(),
            "rounding": self._rounding,
            **({"ranks": others} if others else {}),
            **({"users": self._drawn} if self._drawn else {}),
        }
        save_checkpoint(self._files.checkpoint, self._owner, state)
        before, self._parts = self._parts, _parts(self._files, state["trainer"])
        for part in before - self._parts:
            delete(part)


@dataclass(frozen=True)
class TrialSetup:
    """A trial before its first step, or at its checkpoint.

    source: data set before preprocessing.
    fitted: state of the preprocessing.
    random_states: of the other ranks.
    save: writes the checkpoint.
    optimizer: of rank 0's parts, where ranks divide all parameters.
    """

    trainer: Trainer
    source: Dataset
    dataset: Dataset
    fitted: dict[str, Tensor]
    random_states: tuple[Tensor, ...]
    save: Callable[[], None]
    optimizer: DividedOptimizer | None


def set_up(
    spec: TrialSpec,
    files: TrialFiles,
    code: UserCode,
    releases: tuple[Release, ...],
    ranks: int = 1,
    group: RankGroup | None = None,
    data_digest: str | None = None,
) -> TrialSetup:
    """Load the data, build the model, and continue from the checkpoint in ``files``, or write the first one.

    Call it within `reproducible`. ranks: how many processes will share the gradients. group: these processes, where
    they divide the model. data_digest, Raises: as `dpsweep.workers.trials.trial.run_trial`.
    """
    source = load_dataset(spec.data, code)
    digest = source.digest()
    if data_digest not in (None, digest):
        raise InvalidInput(
            f"the data {source.name!r} are others than this trial is for: they have changed since it was planned or "
            "trained, and it would not compare with other trials; restore the data (a source of your own must give the "
            "same rows every time), and run the same command again"
        )
    method = make_clipping(spec.clipping, code)
    mechanism = mechanism_of(spec, method, population_of(spec, source), releases)
    owner = fingerprint(spec.to_json(), mechanism, digest)
    stored = load_checkpoint(files.checkpoint, owner)
    device = choose_device(spec.execution.device)
    noise = make_noise_source(spec.noise_source, spec.seed, device)

    dataset, drawn = with_rows_of_users(spec, source, stored.get("users") if stored else None)
    texts = _counted_texts(dataset.train)
    dataset = with_secrets(spec, dataset)
    fitted = stored["preprocessing"] if stored else _fitted(spec, dataset, noise)
    dataset = preprocessed(spec, dataset, fitted)

    if stored:
        random_states = _of_as_many(stored, ranks)
        _require_rounding(spec, stored["rounding"], rounding_of(device))
    else:
        random_states = first_random_states(spec, ranks, device)
    recipe, optimizer = divided_recipe(recipe_of(spec, method, dataset, code), spec, group)
    trainer = Trainer(spec, mechanism, dataset, noise, stored_norms(files, spec.norms), recipe)
    parts_before = _parts(files, stored["trainer"]) if stored else set[str]()
    checkpoints = _CheckpointWriter(files, owner, trainer, fitted, random_states, drawn, parts_before)
    if stored:
        trainer.restore(stored["trainer"])
    else:
        trainer.begin()
        _store_beginning(spec, files, code, dataset, digest)
        checkpoints.save()
    trainer.counters.texts = texts
    return TrialSetup(trainer, source, dataset, fitted, random_states, checkpoints.save, optimizer)


def _store_beginning(spec: TrialSpec, files: TrialFiles, code: UserCode, dataset: Dataset, digest: str) -> None:
    """Store code, specification and digest of the data, and who owns the training examples whose norms are taken."""
    if not exists(files.spec):  # else the code is that of the start before, which has been compared
        store_code(files, spec, code)
    write_bytes_atomically(files.spec, spec.to_json().encode())
    train = dataset.train
    if train.user_ids is not None and spec.users is None:
        write_users(files.users, train.example_ids.numpy(), *ownership(train.user_ids), spec.norms.rows_per_part)
    write_private_sealed(files.data_fingerprint, json.dumps({"data": digest}).encode())


def _counted_texts(train: Split) -> TextCounts | None:
    """Return how many texts are cut or have no token, before secrets are planted; None if there are none."""
    if train.flaws is None:
        return None
    cut, empty = train.flaws.sum(0).tolist()
    return TextCounts(len(train), train.features.shape[1], cut, empty)


def _parts(files: TrialFiles, state: Mapping[str, Any]) -> set[str]:
    """Return the places of the parts of a checkpoint that other ranks have stored. state: of the trainer."""
    earlier = state.get(EARLIER, {"step": 0, "others": ()})
    others = range(1, 1 + len(earlier["others"]))
    return {part_of_rank(files.checkpoint, earlier["step"], rank) for rank in others}


def _fitted(spec: TrialSpec, dataset: Dataset, noise: NoiseSource) -> dict[str, Tensor]:
    """Return the state of the trial's preprocessing, released with ``noise`` where it is private."""
    return {} if spec.preprocessing is None else make_preprocessing(spec.preprocessing).fit(dataset, noise)


def preprocessed(spec: TrialSpec, dataset: Dataset, fitted: dict[str, Tensor]) -> Dataset:
    """Return the data as the trial's preprocessing in the state ``fitted`` leaves them."""
    if spec.preprocessing is None:
        return dataset
    return make_preprocessing(spec.preprocessing).transform(dataset, fitted)


def of_the_shape(spec: TrialSpec, dataset: Dataset) -> Dataset:
    """Return a few examples as preprocessing would leave them, with any values: what a model is built for."""
    some = excerpt(dataset)
    return some if spec.preprocessing is None else make_preprocessing(spec.preprocessing).rehearse(some)


def divided_recipe(
    recipe: TrainingRecipe, spec: TrialSpec, group: RankGroup | None
) -> tuple[TrainingRecipe, DividedOptimizer | None]:
    """Return the recipe of a model that is built now and divided among the ranks; unchanged if they divide nothing.

    If they divide the parameters that train, also return the optimizer of this rank's parts. Raises: InvalidInput for
    a model that cannot be divided.
    """
    if group is None or group.lending is None:
        return recipe, None
    lending = group.lending
    require_divisible(spec, lending.shard)
    model = recipe.model()
    digest = recipe.digest(model)
    divide(model, lending, group.rank, choose_device(spec.execution.device))
    recipe = replace(recipe, model=lambda: model, digest=lambda _: digest)
    if not divides_trained(lending.shard):
        return recipe, None
    optimizer = DividedOptimizer(recipe.optimizer, trained_parameters(model), lending)
    return replace(recipe, optimizer=lambda _: optimizer), optimizer


def _of_as_many(stored: Mapping[str, Any], ranks: int) -> tuple[Tensor, ...]:
    """Return random states of the other ranks in a checkpoint. Raises: InvalidInput unless it is of so many ranks.

    Another number of ranks rounds sums differently, and repeated noise would not hide the difference.
    """
    found: tuple[Tensor, ...] = tuple(stored.get("ranks", ()))
    if len(found) + 1 != ranks:
        raise InvalidInput(
            f"the trial began with its gradients shared by {count_of(len(found) + 1, 'rank')} and cannot go on with "
            f"{ranks}, which round sums otherwise; set resources.ranks to {len(found) + 1}, or {START_ANEW}"
        )
    return found


def _require_rounding(spec: TrialSpec, before: str, here: str) -> None:
    """Raise InvalidInput where epochs may have been shown since the checkpoint and would be rounded otherwise here.

    Their noise is repeated, and would not hide the difference. A checkpoint of each epoch is stored before it is shown.
    """
    if here != before and not spec.execution.stores_before_showing:
        raise InvalidInput(
            f"the trial was stored by {before}, and {here} may round otherwise the epochs shown since: go on there, or "
            f"{START_ANEW}; with execution.checkpoint_every_epochs of at most 1, none are shown before they are stored"
        )
