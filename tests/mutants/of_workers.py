"""Bugs in workers, by file; those that a review found no test for come first."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Bug as B
from tests.mutants.mutant import Mutant, bugs_in

CHACHA: Final = ("tests/workers/test_chacha.py",)
CHACHA_VALUES: Final = ("tests/workers/test_noise.py::test_draws_are_those_of_box_and_muller_from_the_bits_of_openssl",)
DRAWS: Final = ("tests/workers/test_training_draws.py",)
ENGINE: Final = ("tests/workers/gradients/test_edges.py",)
NOISE: Final = ("tests/workers/test_noise.py",)
NORMS: Final = ("tests/workers/test_training_norms.py",)
PRIVACY: Final = ("tests/workers/test_training_privacy.py",)
SAMPLING: Final = ("tests/workers/test_sampling.py",)
TRAINING: Final = ("tests/workers/test_training.py",)

WORKERS: Final[tuple[Mutant, ...]] = (
    *bugs_in(
        "workers/training.py",
        TRAINING,
        B(
            "make_row_draws(spec.noise_source, spec.seed)",
            'make_row_draws("seeded", spec.seed)',
            "batches of a released model come from the public seed",
            True,
            DRAWS,
        ),
        B(
            "self._rule.sensitivity * (1.0 + NORM_ERROR)",
            "self._rule.sensitivity",
            "noise does not cover the rounding of norms",
            True,
        ),
        B(
            "std = sigma * self._rule.sensitivity",
            "std = sigma * min(self._rule.sensitivity, 1.0)",
            "noise of a bound above 1 is that of 1",
            True,
        ),
        B("self._noise.added_to_each(gradients, std)", "gradients", "the model gets no noise", True),
        B(
            "batch_size = self._setting.batch_size",
            "batch_size = max(self.counters.empty_batches, 1)",
            "the sum is divided by something private",
            True,
        ),
        B("self._noise.added(answer, query.noise_std)", "answer", "the query gets no noise", True),
        B(
            'seed_torch(spec.noise_source, spec.seed, "model")',
            'seed_torch("seeded", spec.seed, "model")',
            "dropout comes from the public seed",
            True,
            DRAWS,
        ),
        B(
            "not self._method.keeps_to_contributions and local.engine.draws(",
            "False and local.engine.draws(",
            "norms of a model that draws are guarantees",
            True,
            DRAWS,
        ),
        B(
            "lambda std: float(self._noise.normal((1,), std))",
            "lambda std: 0.0",
            "the initial median has no noise",
            True,
            TRAINING,
        ),
        B(
            "repeatable = before.is_current() and modes_of(self._model) == self._modes",
            "repeatable = True",
            "models that change later keep guarantees",
            True,
            ("tests/workers/test_modes.py",),
        ),
        B(
            "epochs = -(-self.step_count // self._planned.steps_per_epoch)",
            "epochs = self.step_count // self._planned.steps_per_epoch",
            "the trace of a run within an epoch lacks that epoch",
            True,
            ("tests/workers/test_training.py", *PRIVACY),
        ),
        B(
            "if self.epoch >= self._paid_epochs:",
            "if self._paid_epochs == 0:",
            "a validation schedule leaves its budget",
            False,
            PRIVACY,
        ),
        B(
            "None if public is None else evaluate(shown, public,",
            "None if public is None else evaluate(shown, self._dataset.train,",
            "the schedule reads the training data",
            True,
            TRAINING,
        ),
        B(
            '    def store_norms(self) -> None:\n        """Have',
            '    def store_norms(self) -> None:\n        return\n        """Have',
            "no norms are stored",
            False,
            NORMS,
        ),
        B("**self._average.values})", "})", "the average is not what is shown"),
        B(
            "self._everyone.renew(rows, clipped.norms)",
            "pass",
            "norms of batches are forgotten",
            False,
            NORMS,
        ),
        B(
            "is not self._decided_from:",
            "is None:",
            "a rule outlives the state that it came from",
            True,
        ),
    ),
    *bugs_in(
        "workers/requirements.py",
        TRAINING,
        B(
            'if highest > 0.0 and spec.clipping.name == "none":',
            "if False:",
            "noise without clipping is accepted",
            True,
        ),
        B(
            "= max(segment.noise_multiplier for segment in mechanism",
            "= min(segment.noise_multiplier for segment in mechanism",
            "noise that rises without clipping is accepted",
            True,
        ),
        B(
            "if (spec.norms.when_sampled or spec.norms.are_off) and method.refreshes:",
            "if False:",
            "bounds of single examples rest on norms of batches",
            True,
            NORMS,
        ),
    ),
    *bugs_in(
        "workers/noise.py",
        NOISE,
        B("std / math.sqrt(self._draws)", "std / self._draws", "noise of four draws is half as large", True),
        B(
            "return KeyedNoise(device)\n",
            "return SeededNoise(seed, device)\n",
            "noise of a released model comes from the seed",
            True,
        ),
        B(
            ".div_(grid).round_().mul_(grid))",
            ")",
            "low-order bits give values away",
            True,
        ),
        B("_TWISTER_WORDS: Final = 624", "_TWISTER_WORDS: Final = 2", "64 bits of a generator are secret", True),
        B('f"dpsweep:{purpose}:{seed}"', 'f"dpsweep:{seed}"', "all purposes share a seed"),
    ),
    *bugs_in(
        "workers/gaussians.py",
        NOISE,
        B(".mul_(-2.0).sqrt_()", ".mul_(-1.0).sqrt_()", "noise is too small by sqrt 2", True),
        B("words.bitwise_right_shift(11)", "words.bitwise_right_shift(31)", "noise has 33 bits", True, CHACHA_VALUES),
        B("max(1, count)", "count", "trials that began with SHAKE-256 go on with other noise", True),
    ),
    *bugs_in(
        "workers/chacha.py",
        CHACHA,
        B(
            "ChaChaStream(os.urandom(KEY_BYTES), device)",
            "ChaChaStream(bytes(KEY_BYTES), device)",
            "the key is known",
            True,
        ),
        B("        self._series += 1\n", "", "all calls have the same noise", True),
        B("        self._next_block += blocks\n", "", "all parts of a call have the same noise", True),
        B("if first + blocks > MOST_BLOCKS:", "if first > MOST_BLOCKS:", "the counter begins anew within a call", True),
        B("for _ in range(10):", "for _ in range(4):", "ChaCha8 instead of ChaCha20", True),
    ),
    *bugs_in(
        "workers/gaps.py",
        ("tests/workers/test_gaps.py",),
        B("* _ONE) - 1", "* _ONE) * 2", "rows join twice as often", True),
        B("* _ONE) - 1", "* _ONE) + 1", "rows join more often than is stated", True),
        B("k % 2 == 1", "k % 2 == 0", "events occur where they should not", True),
        B("words > np.uint64(most)", "words > np.uint64(2**64 - 1)", "small integers are more likely", True),
    ),
    *bugs_in(
        "workers/sampling.py",
        SAMPLING,
        B(
            "if noise_source_kind(noise_source).is_secret:\n        return KeyedRows",
            "if False:\n        return KeyedRows",
            "batches come from the seed",
            True,
            DRAWS,
        ),
        B("(expected << 72) // n", "(expected << 72) // n * 2", "rows join twice as often", True),
        B(
            "self._rng.random(n) < expected / n",
            "self._rng.random(n) < 1.5 * expected / n",
            "rows join half again as often",
            True,
        ),
        B(
            "if len(self._remaining) == 0:",
            "if len(self._remaining) < self._batch_size:",
            "an epoch leaves out its last rows",
            True,
        ),
        B(
            "self._draws.subset(self._dataset_size, self._batch_size)",
            "self._draws.subset(self._dataset_size, self._batch_size + 1)",
            "fixed batches have one row more",
            True,
        ),
        B("joins[ties] = self._stream.words(len(ties)) < rest", "joins[ties] = True", "ties all join"),
    ),
    *bugs_in(
        "accounting/planning.py",
        PRIVACY,
        B(
            'contributions = "estimate" if planned.noise_follows_results else self.contributions',
            "contributions = self.contributions",
            "contributions under reacting noise are guarantees",
            True,
            PRIVACY,
        ),
        B(
            "replace(self.run, schedule=with_initial(self.run.schedule, noise_multiplier))",
            "self.run",
            "the noise that is searched is not in the run",
            True,
            ("tests/accounting/test_planning.py",),
        ),
    ),
    *bugs_in(
        "workers/mechanism.py",
        NORMS,
        B(
            "repeatable = spec.augmentation is None and not spec.execution.autocast",
            "repeatable = True",
            "norms of other inputs are guarantees",
            True,
        ),
        B(
            "*clipping.releases(spec.clipping, code), *releases)",
            "*releases)",
            "the initial median is not in the trace",
            True,
            PRIVACY,
        ),
        B(
            "*clipping.releases(spec.clipping, code), *releases)",
            "*clipping.releases(spec.clipping, code))",
            "what is released after training is not in the trace",
            True,
            ("tests/orchestration/execution/test_completing.py",),
        ),
        B("clipping.side_queries(spec.clipping, code)", "()", "queries are not in the trace", True, PRIVACY),
        B(
            "EpsilonBudget(spec.epsilon, delta)",
            "EpsilonBudget(spec.epsilon, 0.5)",
            "a budget at another delta",
            True,
            PRIVACY,
        ),
    ),
    *bugs_in(
        "workers/recording.py",
        ("tests/workers/test_recording.py",),
        B("_ORDER * (_ORDER - 1.0) / 2.0 / max", "1e-9 / max", "several rules count as their root mean square", True),
        B(
            "self._total() / self.steps) / self.rate",
            "self._total() / (self.steps + 1)) / self.rate",
            "an interval counts one step too many",
            True,
        ),
        B(
            "return step == 0 or math.floor",
            "return math.floor",
            "nothing is due at step 0",
            survives="equivalent: floor of -rate is -1, so step 0 is due by the second condition too",
        ),
    ),
    *bugs_in(
        "workers/gradients/engine.py",
        ENGINE,
        B(
            "square_together(gradients.values())\n        for",
            "gradients.popitem()\n        for",
            "norms leave out a parameter",
            True,
            ("tests/workers/gradients/test_engine.py",),
        ),
        B("first.random_state.restore()", "pass", "the summed pass draws other masks than the measured one", True),
        B(
            "require_same(torch.stack(differ))",
            "pass",
            "passes that differ are not noticed",
            True,
            ("tests/workers/gradients/test_refusals.py",),
        ),
    ),
    *bugs_in(
        "workers/gradients/norms.py",
        ENGINE,
        B(
            "values.nan_to_num_(nan=math.inf, posinf=math.inf)",
            "values.nan_to_num_(nan=0.0, posinf=math.inf)",
            "gradients that are not finite have norm 0",
            True,
        ),
    ),
    *bugs_in(
        "workers/gradients/verification.py",
        ("tests/workers/gradients/test_verification.py",),
        B("raise refused from None", "return True", "rows that are mixed pass in double precision", True),
    ),
    *bugs_in(
        "workers/gradients/micro_batches.py",
        ("tests/workers/gradients/test_static_shapes.py",),
        B(
            "with_padding(y, rows), len(x) // multiplicity)",
            "with_padding(y, rows), size)",
            "padding counts as examples",
            True,
        ),
    ),
    *bugs_in(
        "workers/gradients/looks.py",
        ("tests/workers/gradients/test_synchronisations.py",),
        B("if together.all_finite():", "if True:", "norms that lost digits weigh as they are", True),
        B(
            "return torch.where((now == self._precise).all(), total, math.nan)",
            "return total",
            "old gains decide",
            True,
        ),
    ),
    *bugs_in(
        "workers/gradients/factors.py",
        ("tests/workers/gradients/test_norm_error.py",),
        B(
            "torch.maximum(CANCELLATION * squares, COHERENT_CANCELLATION * absolute)",
            "torch.zeros_like(squares)",
            "norms of positions that cancel lose their digits",
            True,
        ),
        B("if whole <= _BLOCK:", "if True:", "long sums of squares lose digits", True),
    ),
    *bugs_in(
        "workers/preprocessing.py",
        ("tests/workers/test_preprocessing.py",),
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
    ),
    *bugs_in(
        "workers/trial.py",
        ("tests/workers/test_death.py::test_the_key_of_the_noise_does_not_outlive_the_training",),
        B(
            "begun.dataset, predictions, inputs, code)\n    forget_checkpoint(files.checkpoint)",
            "begun.dataset, predictions, inputs, code)",
            "the key of the noise outlives the training",
            True,
        ),
        B(
            "write_private(files.private_training,",
            "write_bytes_atomically(files.private_training,",
            "exact counters are public",
            True,
            TRAINING,
        ),
        B(
            "research_mode=not noise_source_kind(spec.noise_source).is_secret",
            "research_mode=False",
            "a seeded model is not called research",
            True,
            TRAINING,
        ),
    ),
    *bugs_in(
        "workers/batch_gradients.py",
        DRAWS,
        B(
            "start_generator(self.augmentation_rng, spec.noise_source,",
            'start_generator(self.augmentation_rng, "seeded",',
            "augmentation comes from the public seed",
            True,
        ),
    ),
    *bugs_in(
        "workers/divided.py",
        ("tests/workers/test_ranks.py",),
        B(
            "self._group.scatter(given, _sizes(parts))",
            "self._group.scatter(given.flip(0), _sizes(parts))",
            "examples are weighed by the norms of others",
        ),
        B(
            "if decision.state is not self._sent:",
            "if self._sent is None:",
            "the other ranks keep to the first clipping bound",
        ),
        B(
            "before.is_current() and modes_of(model) == self._modes",
            "True",
            "draws of the other ranks do not make contributions estimates",
            survives="in the gate's trials rank 0 draws too, and a batch without its rows is rare",
        ),
        B(
            "self._send_model(self._local.model)\n\n    def _send_model",
            "pass\n\n    def _send_model",
            "the other ranks keep the first model",
        ),
        B(
            "start_generator(generator, spec.noise_source,",
            'start_generator(generator, "seeded",',
            "the other ranks draw from the public seed",
            True,
        ),
        B(
            "self._random_states = None\n        return torch.tensor_split",
            "return torch.tensor_split",
            "a resumed rank repeats its first draws",
        ),
        B(
            "if model is not self._local.model:\n            self._send_model(self._local.model)\n        self._random",
            "self._random",
            "the other ranks train the averaged model on",
        ),
    ),
    *bugs_in(
        "workers/ranks.py",
        ("tests/workers/test_ranks.py",),
        B("for each in others:", "for each in others[1:]:", "a rank's sum is left out"),
    ),
    *bugs_in(
        "workers/checkpoint.py",
        ("tests/workers/test_checkpoint.py",),
        B(
            " or info.base_name.startswith",
            " or False and info.base_name.startswith",
            "temporary files keep the key of the noise",
            True,
        ),
    ),
    *bugs_in(
        "workers/evaluation.py",
        ("tests/workers/test_evaluation.py",),
        B(
            "group.main - before[group.name] for",
            "before[group.name] - group.main for",
            "the cost of privacy has the wrong sign",
        ),
    ),
    *bugs_in(
        "workers/losses.py",
        ("tests/workers/test_tasks.py",),
        B(
            "return losses.sum(1) / counted",
            "return losses.sum(1) / counted.float().mean()",
            "the loss of an example depends on the tokens of others",
        ),
    ),
    *bugs_in(
        "workers/tasks/segmentation.py",
        ("tests/workers/test_tasks.py",),
        B(
            "share(right, predicted + labelled - right)",
            "share(right, predicted + labelled)",
            "the union counts what is right twice",
        ),
        B(
            "torch.where(labels == IGNORED, ignored, outputs.argmax(1).to(labels))",
            "outputs.argmax(1).to(labels)",
            "pixels that are not counted are predicted wrong",
        ),
    ),
    *bugs_in(
        "workers/augmentation.py",
        ("tests/workers/test_training_augmentation.py",),
        B(
            "if y.ndim < 3:",
            "if y.ndim < 9:",
            "masks stay where they are while pictures move",
        ),
    ),
    *bugs_in(
        "workers/data/mapped.py",
        ("tests/workers/data/test_mapped.py",),
        B("fcntl.flock(opened, fcntl.LOCK_EX)", "pass", "every process of a node writes the tokens"),
    ),
    *bugs_in(
        "workers/models/transformer.py",
        ("tests/workers/models/test_language_models.py",),
        B("mask = mask.tril() if self.causal else mask", "mask = mask", "a position reads what it predicts"),
        B("return (hidden * weights).sum(1)", "return hidden.sum(1)", "padding is part of the mean"),
    ),
    *bugs_in(
        "workers/data/targets.py",
        ("tests/workers/data/test_text.py",),
        B("counter=first * counters", "counter=0", "every block is masked alike"),
    ),
    *bugs_in(
        "workers/rates.py",
        ("tests/workers/test_rates.py",),
        B(
            "return highest(values) - lowest(values)",
            "return highest(values) - values.mean(-1)",
            "the gap is to the mean",
        ),
        B("_equalized_odds(gap, highest)", "_equalized_odds(gap, lowest)", "equalised odds is the smaller gap"),
        B(
            "counts[..., 1, 1], counts[..., :, 1].sum(-1)",
            "counts[..., 1, 1], counts[..., 1, :].sum(-1)",
            "recall as precision",
        ),
    ),
    *bugs_in(
        "workers/outcomes.py",
        ("tests/workers/test_outcomes.py",),
        B(
            "write_private(uri, stream.getvalue().to_pybytes())",
            "open(uri, 'wb').write(stream.getvalue().to_pybytes())",
            "predictions of single examples are public",
        ),
    ),
    *bugs_in(
        "workers/attacks.py",
        ("tests/workers/test_attacks.py",),
        B(
            "chosen_members[half:] <= threshold",
            "chosen_members[:half] <= threshold",
            "the threshold is measured on what chose it",
        ),
    ),
)
