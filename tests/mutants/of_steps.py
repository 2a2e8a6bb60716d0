"""Bugs in the steps of a training, by file; those that a review found no test for come first."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Bug as B
from tests.mutants.mutant import Mutant, bugs_in

CANARIES: Final = tuple(
    f"tests/workers/training/test_gradient_canaries.py::test_a_{each}"
    for each in (
        "score_of_the_last_model_depends_on_no_other_coin",
        "score_of_the_last_model_is_what_a_canary_added_and_noise",
        "canary_spends_the_budget_of_a_filter_on_all_steps",
    )
)
CHACHA: Final = ("tests/workers/noise/test_chacha.py",)
CHACHA_VALUES: Final = (
    "tests/workers/noise/test_gaussian_sources.py::test_draws_are_those_of_box_and_muller_from_the_bits_of_openssl",
)
DIVIDED: Final = ("tests/workers/trials/test_divided_model.py::test_they_equal_one_process",)
DRAWS: Final = ("tests/workers/training/test_training_draws.py",)
ENGINE: Final = ("tests/workers/gradients/test_edges.py",)
NOISE: Final = ("tests/workers/noise/test_gaussian_sources.py",)
NORMS: Final = ("tests/workers/training/test_training_norms.py",)
PRIVACY: Final = ("tests/workers/training/test_training_privacy.py",)
SAMPLING: Final = ("tests/workers/sampling/test_samplers.py",)
TRAINING: Final = ("tests/workers/training/test_trainer.py",)

STEPS: Final[tuple[Mutant, ...]] = (
    *bugs_in(
        "workers/training/gradient_canaries.py",
        CANARIES,
        B(
            "weights -= self.directions.along(gradients)",
            "pass",
            "real examples move the parameters that canaries have for themselves",
        ),
        B(
            "return {name: value - part[name] for name, value in mean.items()}",
            "return mean",
            "the model reads what the canaries add, so that their scores depend on each other",
        ),
        B(
            "return math.fsum(costs) <= limit.budget",
            "return math.fsum(costs) <= 2.0 * limit.budget",
            "a canary spends its budget long before the run ends",
        ),
    ),
    *bugs_in(
        "workers/training/trainer.py",
        TRAINING,
        B(
            "make_row_draws(spec.known_seed)",
            "make_row_draws(spec.seed)",
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
        B("self._step_noise.released(summed, std)", "summed, std", "the model gets no noise", True),
        B(
            "in_turn(sums, self.num_parameters, std)",
            "in_turn(sums, self.num_parameters, 0.0)",
            "a model that ranks divide gets no noise",
            True,
            DIVIDED,
        ),
        B(
            "batch_size = self._facts.batch_size",
            "batch_size = max(self.counters.empty_batches, 1)",
            "the sum is divided by something private",
            True,
        ),
        B("self._noise.added(answer, query.noise_std)", "answer", "the query gets no noise", True),
        B(
            'seed_torch(spec.known_seed, "model")',
            'seed_torch(spec.seed, "model")',
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
            ("tests/workers/training/test_modes.py",),
        ),
        B(
            "epochs = -(-self.step_count // self._mechanism.steps_per_epoch)",
            "epochs = self.step_count // self._mechanism.steps_per_epoch",
            "the trace of a run within an epoch lacks that epoch",
            True,
            ("tests/workers/training/test_trainer.py", *PRIVACY),
        ),
        B(
            "if self.epoch >= self._paid_epochs:",
            "if self._paid_epochs == 0:",
            "a validation schedule leaves its budget",
            False,
            PRIVACY,
        ),
        B(
            "None if dataset.public is None else evaluated(dataset.public)",
            "None if dataset.public is None else evaluated(dataset.train)",
            "the schedule reads the training data",
            True,
            TRAINING,
        ),
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
        "workers/training/trial_mechanism.py",
        TRAINING,
        B(
            'if highest > 0.0 and spec.clipping.name == "none":',
            "if False:",
            "noise without clipping is accepted",
            True,
        ),
        B(
            "= max(segment.noise_multiplier for segment in trace",
            "= min(segment.noise_multiplier for segment in trace",
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
        B(
            "repeatable = spec.augmentation is None and not spec.execution.autocast",
            "repeatable = True",
            "norms of other inputs are guarantees",
            True,
            NORMS,
        ),
        B(
            "*of_method, *releases)",
            "*releases)",
            "the initial median is not in the trace",
            True,
            PRIVACY,
        ),
        B(
            "*of_method, *releases)",
            "*of_method)",
            "what is released after training is not in the trace",
            True,
            ("tests/orchestration/execution/test_completing.py",),
        ),
        B("method.side_queries", "()", "queries are not in the trace", True, PRIVACY),
        B(
            "EpsilonBudget(spec.epsilon, delta)",
            "EpsilonBudget(spec.epsilon, 0.5)",
            "a budget at another delta",
            True,
            PRIVACY,
        ),
    ),
    *bugs_in(
        "workers/noise/noise_sources.py",
        NOISE,
        B(
            "from dpsweep.workers.noise.gaussian_sources import KeyedNoise\n\n    return KeyedNoise(device, draws)\n",
            "from dpsweep.workers.noise.gaussian_sources import SeededNoise\n\n    return SeededNoise(seed, device)\n",
            "noise of a released model comes from the seed",
            True,
        ),
    ),
    *bugs_in(
        "workers/noise/gaussian_sources.py",
        NOISE,
        B("_TWISTER_WORDS: Final = 624", "_TWISTER_WORDS: Final = 2", "64 bits of a generator are secret", True),
        B(
            "scale = 0, std / math.sqrt(self._draws)",
            "scale = 0, std / self._draws",
            "noise of four draws is half as large",
            True,
        ),
        B(
            "noisy.div_(grid).round_().mul_(grid)",
            "noisy",
            "low-order bits give values away",
            True,
        ),
        B('f"dpsweep:{purpose}:{seed}"', 'f"dpsweep:{seed}"', "all purposes share a seed"),
        B(".mul_(-2.0).sqrt_()", ".mul_(-1.0).sqrt_()", "noise is too small by sqrt 2", True),
        B("words.bitwise_right_shift(11)", "words.bitwise_right_shift(31)", "noise has 33 bits", True, CHACHA_VALUES),
        B(
            "        self._used += needed\n        return self._ahead[self._used - needed : self._used]",
            "        return self._ahead[:needed]",
            "steps have the same noise",
            True,
        ),
        B(
            'self._share(self._stream.again(state["shared"]), state["used"])',
            'self._share(self._stream.again(state["shared"]), 0)',
            "a trial that goes on uses noise again",
            True,
        ),
    ),
    *bugs_in(
        "workers/noise/step_noise.py",
        ("tests/workers/noise/test_step_noise.py",),
        B("= std * self._norm,", "= std,", "noise does not cover the columns of C", True),
        B("-_turned(noises, step)", "_turned(noises, step)", "earlier noise has the wrong sign", True),
        B('self.step = state["step"]', "self.step = 0", "noise of a trial that goes on is drawn twice", True),
        B("rows[step % len(rows)] = self._drawn", "rows[0] = self._drawn", "draws are not made again", True),
        B("piece * self._draws.most, size)", "0, size)", "pieces of a model have the same noise", True),
        B("rows.mul_(self._decays)", "rows.mul_(1.0)", "buffers of noise forget nothing", True),
        B('self._norm, self._count = state["norm"], state["count"]', "self._norm = 1.0", "noise shrinks", True),
    ),
    *bugs_in(
        "workers/noise/chacha.py",
        CHACHA,
        B(
            "ChaChaStream(fresh_key(), device)",
            "ChaChaStream(bytes(KEY_BYTES), device)",
            "the key is known",
            True,
        ),
        B("        self._series += 1\n", "", "all calls have the same noise", True),
        B("        self._next_block += blocks\n", "", "all parts of a call have the same noise", True),
        B("if last > MOST_BLOCKS:", "if last > 2 * MOST_BLOCKS:", "the counter begins anew within a call", True),
        B("for _ in range(10):", "for _ in range(4):", "ChaCha8 instead of ChaCha20", True),
    ),
    *bugs_in(
        "workers/noise/fused_kernels.py",
        ("tests/workers/noise/test_fused_kernels.py",),
        B("(_uniform(first)) * -2.0", "(_uniform(first)) * -1.0", "noise on a GPU is too small by sqrt 2", True),
        B("(block + first).to", "block.to", "all calls on a GPU have the same noise", True),
        B("z0 + z1 + z2 + z3, scale", "z0 + z1, scale", "every other value on a GPU has half the noise", True),
    ),
    *bugs_in(
        "workers/gradients/fused_norms.py",
        ("tests/workers/gradients/test_fused_norms.py",),
        B('tl.where(norm_sq < lost, float("nan"), norm_sq)', "norm_sq", "cancelled norms are not computed again", True),
        B("(scaled - high.to(tl.float32))", "(scaled - scaled)", "clipped gradients exceed their bound by 0.4 %", True),
    ),
    *bugs_in(
        "workers/sampling/samplers.py",
        ("tests/workers/sampling/test_poisson_gaps.py",),
        B("* _ONE) - 1", "* _ONE) * 2", "rows join twice as often", True),
        B("* _ONE) - 1", "* _ONE) + 1", "rows join more often than is stated", True),
        B("k % 2 == 1", "k % 2 == 0", "events occur where they should not", True),
        B("words > np.uint64(most)", "words > np.uint64(2**64 - 1)", "small integers are more likely", True),
        B(
            "if seed is None:\n        return KeyedRows",
            "if False:\n        return KeyedRows",
            "batches come from the seed",
            True,
            DRAWS,
        ),
        B("(expected << 72) // n", "(expected << 72) // n * 2", "rows join twice as often", True, SAMPLING),
        B(
            "self._rng.random(n) < expected / n",
            "self._rng.random(n) < 1.5 * expected / n",
            "rows join half again as often",
            True,
            SAMPLING,
        ),
        B(
            "in range(0, len(order), batch_size))",
            "in range(0, len(order) - batch_size + 1, batch_size))",
            "an epoch leaves out its last rows",
            True,
            SAMPLING,
        ),
        B(
            "self._draws.subset(self._dataset_size, self._batch_size)",
            "self._draws.subset(self._dataset_size, self._batch_size + 1)",
            "fixed batches have one row more",
            True,
            SAMPLING,
        ),
        B("joins[ties] = self._stream.words(len(ties)) < rest", "joins[ties] = True", "ties all join", tests=SAMPLING),
    ),
    *bugs_in(
        "accounting/calibration/planned_runs.py",
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
            ("tests/accounting/calibration/test_planned_runs.py",),
        ),
    ),
    *bugs_in(
        "workers/training/snapshot_intervals.py",
        ("tests/workers/training/test_norm_recorder.py",),
        B("order * (order - 1.0) / 2.0 / noise", "1e-9 / noise", "several rules count as their root mean square", True),
        B(
            "clamp(0.0, self.steps) / self.steps",
            "clamp(0.0, self.steps) / (self.steps + 1)",
            "an interval counts one step too many",
            True,
        ),
        B("(steps - since - 1.0)", "(steps - since)", "exact norms of consecutive steps are averaged", True),
        B("held + changed - earlier", "held + changed", "what a norm changes at earlier steps is counted twice", True),
        B("self.ruled_since > 1:", "self.ruled_since > 2:", "norms of a rule of two steps are not interpolated"),
        B("clamp(min=self.ruled_since)", "clamp(min=-1e18)", "norms are interpolated across rules", True),
    ),
    *bugs_in(
        "workers/training/norm_recorder.py",
        ("tests/workers/training/test_norm_recorder.py",),
        B(
            "min(0.75 * step, max(2.0 * steps_per_epoch, 0.25 * step))",
            "1e9",
            "old norms of examples in no batch are kept",
            False,
            NORMS,
        ),
        B(
            "for interval in self._interval.settled() if self._interval is not None else ():",
            "for interval in ():",
            "no norms are stored",
            False,
            NORMS,
        ),
    ),
    *bugs_in(
        "workers/gradients/engine.py",
        ENGINE,
        B(
            "gram_together(gradients.values())\n        for",
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
        "workers/gradients/pass_results.py",
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
        B(
            "for ordered in moved:",
            "for ordered in moved[1:]:",
            "rows may depend on their place in the batch",
            True,
            ("tests/workers/gradients/test_row_independence.py",),
        ),
        B("raise refused from None", "return True", "rows that are mixed pass in double precision", True),
        B(
            "if wrong or strange:",
            "if wrong:",
            "derivatives by other rows are not looked at",
            True,
            ("tests/workers/gradients/test_row_independence.py",),
        ),
        B(
            "<= ROUNDING * scale)",
            "<= TOLERANCE * scale)",
            "couplings that derivatives do not see pass in double precision",
            True,
            ("tests/workers/gradients/test_row_independence.py",),
        ),
        B(
            "require_no_traces(sorted(suspects & left))",
            "pass",
            "what a model keeps of examples without using it is not noticed",
            True,
            ("tests/workers/gradients/test_row_independence.py",),
        ),
    ),
    *bugs_in(
        "workers/gradients/proofs.py",
        ("tests/workers/gradients/test_proofs.py",),
        B(
            "for module in own_loaded_modules():",
            "for module in ():",
            "what is shown of one code counts for another",
            True,
        ),
        B(">= examples", ">= 1", "what is shown of a small batch counts for larger ones", True),
        B("if any(UNKNOWN in values", "if any(() is values", "objects that are not looked into count as equal", True),
    ),
    *bugs_in(
        "workers/own_code/code_digests.py",
        ("tests/workers/gradients/test_proofs.py",),
        B("yield from _bound_in(value)", "yield from ()", "what is shown of one closure counts for another", True),
        B("case staticmethod() |", "case", "what is shown of one static method counts for another", True),
        B("if value.__module__ != home:", "if True:", "what is shown of one class counts for another", True),
        B("yield name, known", "pass", "what is shown counts after a name stands for another class", True),
    ),
    *bugs_in(
        "workers/gradients/layers.py",
        ("tests/workers/gradients/test_compared_passes.py", "tests/workers/gradients/test_fallback.py"),
        B(
            "if is_new or (held and not found):",
            "if is_new:",
            "a later batch may give every row the tokens of others",
            True,
            ("tests/workers/gradients/test_refusals.py",),
        ),
        B(
            "if is_new or (held and not found):",
            "if held and not found:",
            "a part that is called for the first time may give every row the rows of others",
            True,
        ),
        B("axes.stacked.keys() | axes.held", "axes.held", "arguments that stacked rows may stack others", True),
        B(
            "axes.stacked.keys() | axes.held - axes.without_batch",
            "axes.stacked",
            "arguments with an entry for each row may have more",
            True,
        ),
    ),
    *bugs_in(
        "workers/machine/devices.py",
        ("tests/workers/machine/test_precision.py",),
        B(
            '_set_precisions(["ieee"] * len(before))',
            "pass",
            "convolutions are rounded where a program allows it by torch's newer settings",
            True,
        ),
    ),
    *bugs_in(
        "workers/gradients/micro_batches.py",
        ("tests/workers/gradients/test_static_shapes.py",),
        B(
            "with_padding(y, length), len(x) // multiplicity)",
            "with_padding(y, length), size)",
            "padding counts as examples",
            True,
        ),
    ),
    *bugs_in(
        "workers/gradients/deferred_checks.py",
        ("tests/workers/gradients/test_synchronisations.py",),
        B(
            "if math.isfinite(float(torch.stack(self._later).sum())):",
            "if True:",
            "norms that lost digits weigh as they are",
            True,
        ),
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
            "torch.maximum(squares.mul_(CANCELLATION), absolute.mul_(COHERENT_CANCELLATION))",
            "torch.zeros_like(squares)",
            "norms of positions that cancel lose their digits",
            True,
        ),
        B("if whole <= _BLOCK:", "if True:", "long sums of squares lose digits", True),
    ),
    *bugs_in(
        "workers/gradients/linear.py",
        ("tests/workers/gradients/test_engine.py",),
        B("zip(alike, gram", "zip(alike[::-1], gram", "layers have the norms of others", True),
    ),
)
