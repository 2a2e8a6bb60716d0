"""Bugs in what workers do around the steps of a training, by file."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Bug as B
from tests.mutants.mutant import Mutant, bugs_in
from tests.mutants.of_steps import DRAWS, TRAINING

LOOP: Final = (
    "tests/workers/training/test_private_training.py::test_a_state_does_not_go_on_with_edited_code_or_at_another_rounding",
    "tests/workers/training/test_private_training.py::test_a_fork_takes_no_step",
    "tests/workers/training/test_private_training.py::test_no_noise_follows_correlated_noise_that_was_made_in_part",
)

OUTSIDE: Final = ("tests/workers/training/test_outside_steps.py",)

WORKERS: Final[tuple[Mutant, ...]] = (
    *bugs_in(
        "workers/training/trial_mechanism.py",
        ("tests/workers/training/test_training_norms.py",),
        B(
            "method.refreshes or mechanism.sampling.displaced",
            "method.refreshes",
            "an example that displaces others changes when their norms are measured",
            True,
        ),
    ),
    *bugs_in(
        "workers/training/preprocessing.py",
        ("tests/workers/training/test_preprocessing.py",),
        B(
            "noise.added(moments[rows, columns], self.noise_multiplier)",
            "noise.added(moments[rows, columns], 0.0)",
            "DP-PCA has no noise",
            True,
        ),
        B(
            'GaussianRelease("dp_pca", self.noise_multiplier)',
            'GaussianRelease("dp_pca", 2.0 * self.noise_multiplier)',
            "DP-PCA is accounted with twice its noise",
            True,
        ),
        B(
            "return total / math.sqrt(2.0)",
            "return total",
            "sums and squares are accounted as one of both",
            True,
            ("tests/workers/training/test_preprocessing.py::TestStandardised",),
        ),
    ),
    *bugs_in(
        "workers/training/robust_ranges.py",
        ("tests/workers/training/test_preprocessing.py::TestRobustRanges",),
        B(
            "std = noise_multiplier * math.sqrt(ROUNDS)",
            "std = noise_multiplier",
            "three rounds of counts cost as one",
            True,
        ),
    ),
    *bugs_in(
        "workers/training/counters.py",
        TRAINING,
        B(
            "write_private(uri, json",
            "__import__('pathlib').Path(uri).write_bytes(json",
            "exact counters are public",
            True,
        ),
    ),
    *bugs_in(
        "workers/training/private_training.py",
        LOOP,
        B(
            "code_behind([*model.modules(), loss, optimizer, clipping])",
            "list[str]()",
            "one noise covers edited code too",
            True,
        ),
        B("if os.getpid() != self._process:", "if False:", "forks of an engine draw one noise", True),
        B(
            "self._noise_is_cut = self.steps",
            "self._noise_is_cut = False and self.steps",
            "correlated noise goes on after a step that made it in part",
            True,
        ),
        B(
            "self._outside.require_none()",
            "pass",
            "code around an engine updates the model by a batch without noise",
            True,
            OUTSIDE,
        ),
    ),
    *bugs_in(
        "workers/training/torch_optimizers.py",
        OUTSIDE,
        B("if optimizer not in _STEPPING:", "if False:", "the optimizer of an engine steps without noise", True),
    ),
    *bugs_in(
        "workers/gradients/modes.py",
        ("tests/workers/gradients/test_row_independence.py::test_a_module_or_hook_that_is_new_is_verified_at_once",),
        B(
            "module.training, module, id",
            "module.training, id",
            "a layer that another one replaces is not verified",
            True,
        ),
        B("*_hooks_of(module))", ")", "a hook that is added during the training is not verified", True),
    ),
    *bugs_in(
        "workers/trials/trial.py",
        ("tests/workers/trials/test_death.py::test_the_key_of_the_noise_does_not_outlive_the_training",),
        B(
            "trainer.gradients.finish()\n    forget_checkpoint(files.checkpoint)",
            "trainer.gradients.finish()",
            "the key of the noise outlives the training",
            True,
        ),
        B(
            "progress is not None and execution.stores_before_showing",
            "False",
            "an epoch is shown before it is stored",
            True,
            ("tests/workers/trials/test_death.py::test_an_epoch_is_stored_before_it_is_shown",),
        ),
    ),
    *bugs_in(
        "workers/trials/trial_results.py",
        TRAINING,
        B(
            "reasons=reasons_of_trial(spec, dataset.reasons)",
            "reasons=()",
            "the result of a seeded model gives no reason",
            True,
        ),
    ),
    *bugs_in(
        "workers/training/batch_gradients.py",
        DRAWS,
        B(
            "start_generator(self.augmentation_rng, spec.known_seed,",
            "start_generator(self.augmentation_rng, spec.seed,",
            "augmentation comes from the public seed",
            True,
        ),
    ),
    *bugs_in(
        "workers/trials/data_parallel.py",
        ("tests/workers/trials/test_ranks.py",),
        B(
            "self._group.scatter(given, _sizes(parts))",
            "self._group.scatter(given.flip(0), _sizes(parts))",
            "examples are weighed by the norms of others",
        ),
        B(
            "self._group.scatter(gradient, part.sizes)",
            "self._group.scatter(gradient.flip(0), part.sizes)",
            "parts of a parameter move by the gradients of others",
            tests=("tests/workers/trials/test_divided_model.py::test_they_equal_one_process",),
        ),
        B(
            "before.is_current() and modes_of(model) == self._modes",
            "True",
            "draws of the other ranks do not make contributions estimates",
            survives="in the gate's trials rank 0 draws too, and a batch without its rows is rare",
        ),
        B(
            "start_generator(generator, spec.known_seed,",
            "start_generator(generator, spec.seed,",
            "the other ranks draw from the public seed",
            True,
        ),
        B(
            "self._random_states = None\n        return torch.tensor_split",
            "return torch.tensor_split",
            "a resumed rank repeats its first draws",
        ),
    ),
    *bugs_in(
        "accounting/records/local_files.py",
        ("tests/workers/machine/test_checkpoint.py",),
        B(" or _is_partial_of(each, name)", "", "temporary files keep the key of the noise", True),
    ),
    *bugs_in(
        "workers/tasks/losses.py",
        ("tests/workers/tasks/test_tasks.py",),
        B(
            "return losses.sum(1) / counted",
            "return losses.sum(1) / counted.float().mean()",
            "the loss of an example depends on the tokens of others",
        ),
    ),
    *bugs_in(
        "workers/evaluation/outcomes.py",
        ("tests/workers/evaluation/test_outcomes.py",),
        B(
            "write_private(uri, encode_table(table))",
            "open(uri, 'wb').write(encode_table(table))",
            "predictions of single examples are public",
        ),
    ),
    *bugs_in(
        "workers/trials/membership.py",
        ("tests/workers/trials/test_attacks.py",),
        B(
            "chosen_members[half:] <= threshold",
            "chosen_members[:half] <= threshold",
            "the threshold is measured on what chose it",
        ),
    ),
    *bugs_in(
        "workers/trials/feasibility.py",
        ("tests/workers/trials/test_next_tokens.py",),
        B("max(moved) > max(", "max(moved) > 1e9 * max(", "a model reads the token that it predicts"),
        B(
            "{1, length // 4, length // 2, length // 2 + 1, 3 * length // 4, length - 1}",
            "{length // 2}",
            "a look at the next token inside a block is not seen",
        ),
        B("_TIMES * unmoved", "0.0 * unmoved", "experts that share a batch are taken for a look ahead"),
    ),
    *bugs_in(
        "workers/models/text_models.py",
        ("tests/workers/models/test_hugging_face.py",),
        B("in missing - new", "in new - missing", "a frozen head is random"),
    ),
    *bugs_in(
        "workers/models/hugging_face.py",
        ("tests/workers/models/test_hugging_face.py",),
        B("(*_head_parameters(loaded), *new)", "_head_parameters(loaded)", "a new pooler is random and frozen"),
    ),
)
