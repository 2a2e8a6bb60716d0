"""Loads a trained model from its trial's folder, together with the preprocessing and preparation of its inputs.

Files are read as tensors, numbers and strings. The user's own code is imported only if the caller allows it, and only
as it was when the trial began.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from dpsweep.accounting.errors import LARGEST_WHOLE, START_ANEW, DataCorruption, InvalidInput
from dpsweep.accounting.records.files import read_bytes
from dpsweep.accounting.records.json_text import parsed_json
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.workers.data import (
    Dataset,
    Preparation,
    RowReader,
    Scaling,
    Split,
    Tokens,
    load_source,
    made_preparation,
    plain_preparation,
    reader_of_rows,
)
from dpsweep.workers.dataset_description import NO_GROUPS
from dpsweep.workers.evaluation.predictions import evaluation_batch_size, first_columns, in_batches, slices
from dpsweep.workers.machine.devices import lacks_memory, torch_defaults
from dpsweep.workers.machine.stored_tensors import NoTensors, load_tensors
from dpsweep.workers.models import build_for_shape, offered
from dpsweep.workers.own_code.imports import NO_CODE, UserCode, is_import_path
from dpsweep.workers.own_code.own_record import require_same_code
from dpsweep.workers.own_code.own_sources import GIVEN
from dpsweep.workers.spec import TrialSpec
from dpsweep.workers.training.preprocessing import State, make_preprocessing

_INPUTS: Final = {"example_shape", "example_type", "feature_shape", "num_classes", "preparation", "fitted", "columns"}
"""Keys of `describe_inputs`."""


@dataclass(frozen=True)
class TrainedModel:
    """A model in evaluation mode on the CPU, with the preprocessing and preparation of its inputs.

    `example_shape`, `example_type`: shape and dtype of one example as the data source stores it. `fitted`: the state of
    the preprocessing. `columns`: how rows of another table are read; None for other data, and where that is not
    declared.
    """

    model: nn.Module
    spec: TrialSpec
    example_shape: tuple[int, ...]
    example_type: torch.dtype
    num_classes: int
    preparation: Preparation
    fitted: State
    columns: RowReader | None = None

    @torch_defaults()
    def logits(self, features: npt.ArrayLike | Tensor) -> npt.NDArray[np.float32]:
        """Return outputs of the model for examples [n, ...]: logits [n, classes], or the outputs of another task.

        Further columns, of heads that only the user's own loss reads, are left out.

        features: as the data source stores them. Preprocessing and preparation are applied as in the trial's
        evaluation. The model runs on at most `dpsweep.workers.evaluation.predictions.BATCH_SIZE` examples at once;
        memory holds the preprocessed features of all examples and their logits.

        Raises: InvalidInput for another shape, or for values that the stored type cannot represent.
        """
        dataset = self._preprocessed(self._dataset(self._checked(features)))
        batches = in_batches(
            self.model,
            dataset.train.features,
            dataset.prepare,
            lambda logits, _: first_columns(logits, self.num_classes).float().cpu(),
            slices(len(dataset.train), evaluation_batch_size(self.model, dataset.train.features, dataset.prepare)),
        )
        found: npt.NDArray[np.float32] = (
            torch.cat(batches).numpy() if batches else np.empty((0, self.num_classes), "f4")
        )
        return found

    def _preprocessed(self, dataset: Dataset) -> Dataset:
        """Return the data as the model takes them; no cache that the specification names is written or read."""
        named = self.spec.preprocessing
        if named is None or not len(dataset.train):
            return dataset
        uncached = {key: value for key, value in named.params.items() if key != "cache"}
        try:
            return make_preprocessing(replace(named, params=uncached)).transform(dataset, self.fitted)
        except (KeyError, RuntimeError) as error:
            if lacks_memory(error):
                raise
            raise DataCorruption(
                f"what the trial keeps of its preprocessing {named.name!r} does not fit it; restore its folder from a "
                f"backup, or {START_ANEW}"
            ) from error

    def _checked(self, features: npt.ArrayLike | Tensor) -> Tensor:
        expected = f"numbers of shape [n, {', '.join(map(str, self.example_shape))}] and type {self.example_type}"
        array = np.array(features.numpy(force=True) if isinstance(features, Tensor) else features)
        if array.dtype.kind not in "biuf" or array.ndim == 0 or array.shape[1:] != self.example_shape:
            raise InvalidInput(
                f"the examples have shape {array.shape} and type {array.dtype}, but must be {expected}, as the data "
                f"source {self.spec.data.name!r} stores them"
            )
        given = torch.from_numpy(array)
        stored = given.to(self.example_type)
        if not stored.is_floating_point() and not torch.equal(stored.to(given.dtype), given):
            raise InvalidInput(
                f"the examples hold numbers that {self.example_type} does not; give {expected}, not yet scaled"
            )
        if not stored.isfinite().all():
            raise InvalidInput(
                f"the examples hold NaN, infinity or numbers beyond the range of {self.example_type}; give finite ones"
            )
        scaled = stored[:, self.columns.scaled] if self.columns else stored[:0]
        if ((scaled < 0.0) | (scaled > 1.0)).any():
            raise InvalidInput(
                "the examples hold numbers that the ranges of the table do not scale to [0, 1]; give the table itself "
                "to `predict_table`, or `dpsweep predict`, which scale it"
            )
        return stored

    def _dataset(self, features: Tensor) -> Dataset:
        """Return a data set with the examples as its training split, which preprocessing takes; labels are zeros."""
        none = torch.zeros(len(features), dtype=torch.int64)
        rows = Split(features, none, none, torch.arange(len(features)))
        names = tuple(map(str, range(self.num_classes)))
        empty = rows.select(np.empty(0, dtype=np.int64))
        return Dataset(self.spec.data.name, rows, empty, None, NO_GROUPS, names, self.preparation)


def describe_inputs(spec: TrialSpec, source: Dataset, dataset: Dataset, fitted: State) -> dict[str, Any]:
    """Return the facts that `load_trained` needs besides the weights; all are public.

    `source`: the data as loaded. `dataset`: the data after preprocessing. `fitted`: the state of the preprocessing,
    which for private preprocessing is its release. The preparation is included only if it is known not to depend on the
    rows.
    """
    return {
        "example_shape": list(source.train.features.shape[1:]),
        "example_type": str(source.train.features.dtype).removeprefix("torch."),
        "feature_shape": list(dataset.feature_shape),
        "num_classes": dataset.num_classes,
        "offered": offered(source.preparation),
        "preparation": _kept_preparation(spec, source.preparation),
        "fitted": {name: value.cpu() for name, value in fitted.items()},
        "columns": None if source.columns is None else json.dumps(source.columns),
    }


def _kept_preparation(spec: TrialSpec, preparation: Preparation) -> dict[str, Any] | None:
    """Return the preparation as plain values; None for the user's own, which may be code or statistics of rows."""
    if is_import_path(spec.data.name) and preparation not in (Scaling(), Tokens()):
        return None
    kept = plain_preparation(preparation)
    return None if kept is None else {"name": kept[0], **kept[1]}


@torch_defaults()
def load_model(files: TrialFiles, spec: TrialSpec, code: UserCode = NO_CODE) -> nn.Module:
    """Return the trained model of ``spec`` on the CPU, in evaluation mode, with averaged parameters if it has any.

    Raises:
        InvalidInput: the trial has not finished training, the weights do not fit, the
            user's own model is not in ``code``, or ``code`` has changed since the trial began.
        DataCorruption: a stored file is damaged.
    """
    return _build(files, spec, _read_inputs(files), code)


@torch_defaults()
def load_trained(files: TrialFiles, spec: TrialSpec, code: UserCode = NO_CODE) -> TrainedModel:
    """Return the trained model of ``spec`` with the preprocessing and preparation of its inputs.

    Data are read only for a source of the user's own with its own preparation. Raises: see `load_model`.
    """
    inputs = _read_inputs(files)
    return TrainedModel(
        model=_build(files, spec, inputs, code),
        spec=spec,
        example_shape=tuple(inputs["example_shape"]),
        example_type=getattr(torch, inputs["example_type"]),
        num_classes=inputs["num_classes"],
        preparation=_preparation(files, spec, inputs, code),
        fitted=inputs["fitted"],
        columns=_columns(files, inputs),
    )


def _build(files: TrialFiles, spec: TrialSpec, inputs: Mapping[str, Any], code: UserCode) -> nn.Module:
    require_same_code(files, spec, code, f"allow the files there in place of yours: {files.code}/...")
    location = spec.model.name.rpartition(":")[0]
    if location.startswith(f"{GIVEN}/") and code.named(location) is None:
        raise InvalidInput(
            f"model {spec.model.name!r} is an object that the sweep was given in Python, and runs only if you trust "
            f"it: open the sweep with allow_code=['{files.code}/{location}'], its source, or with the object itself"
        )
    weights = _read(files.model)
    shape, offers = tuple(inputs["feature_shape"]), inputs["offered"]
    model = build_for_shape(spec.model, shape, inputs["num_classes"], spec.seed, code, offers)
    try:
        model.load_state_dict(weights)
    except (RuntimeError, TypeError, AttributeError) as error:
        raise InvalidInput(
            f"{files.model} does not fit the model {spec.model.name!r}: its code or its parameters have changed since; "
            "use those that it was trained with"
        ) from error
    return model.eval()


def _preparation(files: TrialFiles, spec: TrialSpec, inputs: Mapping[str, Any], code: UserCode) -> Preparation:
    kept = inputs["preparation"]
    if kept is None and (is_import_path(spec.data.name) or spec.data.name == GIVEN):
        return load_source(spec.data, code).preparation
    try:
        fields = dict(kept)
        made = made_preparation(fields.pop("name"), fields)
        made(torch.zeros(0, *inputs["feature_shape"]))
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise _damaged(files.inputs) from error
    return made


def _columns(files: TrialFiles, inputs: Mapping[str, Any]) -> RowReader | None:
    """Return how rows are read, as `describe_inputs` stored it; None where it did not."""
    if inputs["columns"] is None:
        return None
    try:
        found = reader_of_rows(parsed_json(inputs["columns"]))
        fits = found.example_shape == inputs["example_shape"]
    except (InvalidInput, ValueError) as error:
        raise _damaged(files.inputs) from error
    if not fits:
        raise _damaged(files.inputs)
    return found


def _read_inputs(files: TrialFiles) -> dict[str, Any]:
    """Return what `describe_inputs` stored. Raises: as `_read`, and for values that it does not store."""
    inputs = _read(files.inputs, _INPUTS)
    sizes = (inputs["example_shape"], inputs["feature_shape"], [inputs["num_classes"]])
    is_sound = (
        all(isinstance(each, list) and all(type(n) is int and 0 < n <= LARGEST_WHOLE for n in each) for each in sizes)
        and isinstance(getattr(torch, str(inputs["example_type"]), None), torch.dtype)
        and isinstance(inputs["offered"], dict)
        and isinstance(inputs["fitted"], dict)
        and all(isinstance(each, Tensor) for each in inputs["fitted"].values())
        and isinstance(inputs["columns"], str | None)
    )
    if not is_sound:
        raise _damaged(files.inputs)
    return inputs


def _damaged(uri: str) -> DataCorruption:
    return DataCorruption(f"{uri} is damaged; restore it from a backup, or {START_ANEW}")


def _read(uri: str, keys: Set[str] = frozenset()) -> dict[str, Any]:
    """Return the mapping at ``uri``. Raises: InvalidInput if missing, DataCorruption if damaged or without ``keys``."""
    try:
        content = read_bytes(uri)
    except FileNotFoundError:
        raise InvalidInput(
            f"{uri} does not exist: the trial has not trained to its end, or a version of dpsweep without this file "
            "trained it; resume the sweep, or run it again in another folder"
        ) from None
    try:
        stored = load_tensors(io.BytesIO(content))
    except NoTensors as error:
        raise _damaged(uri) from error
    if not isinstance(stored, dict) or not stored.keys() >= keys:
        raise _damaged(uri)
    return stored
