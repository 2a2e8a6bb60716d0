"""The calculator commands: every documented example as written, and one clear line for every impossible request."""

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.accountants.paper_only import algorithm_2
from dpsweep.accounting.individual.epsilons import individual_epsilons
from dpsweep.accounting.mechanism.samplings import FixedBatchSampling, PoissonSampling, Sampling, ShuffledSampling
from dpsweep.accounting.mechanism.schedules import make_schedule
from dpsweep.accounting.mechanism.trace import GaussianRelease, PureRelease, Segment, SideQuery, Trace
from dpsweep.accounting.pld.groups import epsilon_of_examples
from dpsweep.accounting.records.shards import NormSnapshot
from dpsweep.accounting.records.traces import write_trace
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.orchestration.commands.run_flags import RunFlags
from tests.accounting.stored_trial import write_norms
from tests.orchestration.processes import Command

Answer = Callable[[str], Any]
Trial = tuple[Path, npt.NDArray[np.float64]]


@pytest.fixture
def dpsweep(command: Command) -> Command:
    """Of a command line, as a user writes it."""
    return lambda line: command(*shlex.split(line))


@pytest.fixture
def answer(dpsweep: Command) -> Answer:
    """The JSON that a command line prints."""

    def run(line: str) -> Any:
        code, out, err = dpsweep(f"{line} --json")
        assert (code, err) == (0, "")
        return json.loads(out)

    return run


class TestDocumentedExamples:
    def test_schedule(self, answer: Answer) -> None:
        line = "epsilon --noise-multiplier 1.4 --schedule exponential:decay=0.004 --sampling poisson --sample-rate 0.02"
        printed = answer(f"{line} --epochs 100 --delta 1e-5 --accountant pld")
        assert printed["steps"] == 5000
        assert printed["epsilon"] == pytest.approx(7.6248, rel=2e-4)

    def test_decay(self, answer: Answer) -> None:
        line = "calibrate --schedule time --noise-multiplier 10 --sampling shuffle --budget-rho 0.78125 --epochs 60"
        printed = answer(f"{line} --solve decay")
        assert round(printed["decay"], 3) == 0.019
        assert printed["value"] == printed["decay"]
        assert printed["rho"] <= printed["target"] == 0.78125

    @pytest.mark.parametrize("accountant", ["rdp", "zcdp-sampled", "dp-accounting-rdp"])
    def test_the_epsilon_reached_has_the_kind_of_its_accountant(
        self, answer: Answer, dpsweep: Command, accountant: str
    ) -> None:
        run = f"--delta 1e-5 --sample-rate 0.001 --steps 500 --accountant {accountant}"
        line = f"calibrate --target-epsilon 0.5 {run}"
        printed = answer(line)
        assert printed["kind"] == answer(f"epsilon --noise-multiplier 9 {run}")["kind"]
        assert (printed["kind"] == "guarantee") == (accountant == "rdp")
        assert f", {printed['kind']}, 500 steps)" in dpsweep(line)[1]


class TestMore:
    def test_length(self, answer: Answer) -> None:
        noise = "--noise-multiplier 10 --schedule exponential:decay=0.01"
        assert answer(f"calibrate --solve epochs --budget-rho 0.78125 --sampling shuffle {noise}")["epochs"] == 71
        steps = answer(
            "calibrate --solve steps --target-epsilon 2 --delta 1e-5 --sample-rate 0.01 --noise-multiplier 1 "
            "--accountant rdp"
        )
        assert steps["steps"] == steps["value"] > 500
        assert steps["epsilon"] <= 2.0

    def test_releasing_only_the_best_run(self, answer: Answer, dpsweep: Command) -> None:
        line = "epsilon --noise-multiplier 1 --sample-rate 0.01 --steps 2000 --delta 1e-5 --selection-trials 14"
        printed = answer(line)
        assert (printed["accountant"], printed["kind"], printed["selection_shape"]) == ("selection-pld", "guarantee", 1)
        costs = [printed[name] for name in ("one_trial_epsilon", "epsilon", "all_trials_epsilon")]
        assert costs == pytest.approx([2.584, 4.197, 11.35], rel=1e-3)
        assert answer(f"{line} --selection-shape 0")["epsilon"] == pytest.approx(3.906, rel=1e-3)
        assert "of 14 runs that are all released, 11.350" in dpsweep(line)[1]
        of_four = answer(f"{line} --group-size 4")
        assert of_four["one_trial_epsilon"] < of_four["epsilon"] < of_four["all_trials_epsilon"]
        target = "calibrate --target-epsilon 3 --delta 1e-5 --sample-rate 0.01 --epochs 20"
        alone, best = answer(target), answer(f"{target} --selection-trials 14")
        assert best["epsilon"] <= 3.0
        assert best["noise_multiplier"] > 1.2 * alone["noise_multiplier"]
        assert best["selection_trials"] == 14

    def test_no_noise_is_an_explicit_infinity(self, answer: Answer, dpsweep: Command) -> None:
        line = "epsilon --noise-multiplier 0 --sampling shuffle --epochs 4 --delta 1e-5"
        printed = answer(line)
        assert (printed["epsilon"], printed["private"]) == (None, False)
        assert "infinite" in dpsweep(line)[1]

    def test_shuffled_batches_of_unknown_size_have_no_lower_bound(self, answer: Answer) -> None:
        line = "epsilon --noise-multiplier 6 --sampling shuffle --epochs 4 --delta 1e-5"
        printed, sized = answer(line), answer(f"{line} --dataset-size 60 --batch-size 6")
        assert (printed["epsilon"], printed["lower_epsilon"]) == (sized["epsilon"], None)

    def test_table(self, dpsweep: Command) -> None:
        line = "epsilon --noise-multiplier 6 --sampling shuffle --epochs 400 --delta 1e-5 --accountant zcdp"
        code, out, _ = dpsweep(f"{line} --group-size 1,2")
        assert code == 0
        assert "21.5507" in out
        assert "group of 2" in out

    def test_plot(self, dpsweep: Command, tmp_path: Path) -> None:
        target = tmp_path / "epsilon.html"
        line = "epsilon --noise-multiplier 6 --sampling shuffle --epochs 40 --delta 1e-5 --accountant gdp --plot"
        assert dpsweep(f"{line} {target}")[0] == 0
        page = target.read_text()
        assert "group size k" in page
        assert "cdn.plot.ly" not in page.split("<body>")[0]

    def test_groups_beside_the_published_comparisons(self, answer: Answer, dpsweep: Command, tmp_path: Path) -> None:
        line = "epsilon --noise-multiplier 1 --sample-rate 0.01 --steps 2000 --delta 1e-6 --accountant pld --compare"
        for found in answer(f"{line} --group-size 1..2,4"):
            assert found["linear_growth"] <= found["epsilon"] <= found["vadhan_upper_bound"] * (1.0 + 1e-3)
            assert found["linear_growth_is"] == "reference, no bound"
        page = tmp_path / "p.html"
        full = "epsilon --noise-multiplier 6 --sample-rate 1 --epochs 4 --delta 1e-5 --group-size 1..3 --compare"
        assert [found["group_size"] for found in answer(full)] == [1, 2, 3]
        code, out, _ = dpsweep(f"{full} --plot {page}")
        assert code == 0
        for name in ("Vadhan (upper bound)", "linear (lower bound)"):
            assert name in out
            assert name in page.read_text()

    def test_warns_of_a_large_delta(self, dpsweep: Command) -> None:
        line = "epsilon --noise-multiplier 6 --dataset-size 1000 --batch-size 10 --epochs 1 --delta 1e-2 --accountant"
        code, _, err = dpsweep(f"{line} rdp")
        assert code == 0
        assert err.startswith(
            "warning: delta is 0.01, but with 1000 training examples it should be well below 1/n = 0.001"
        )


EPSILON = "epsilon --delta 1e-5"
SHUFFLE = f"{EPSILON} --noise-multiplier 6 --sampling shuffle"
CALIBRATE = "calibrate --sampling shuffle"
SAMPLED = f"{EPSILON} --noise-multiplier 1 --sample-rate 0.01"
SAMPLED_RUN = "calibrate --sample-rate 0.02 --steps 200"


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (f"{EPSILON} --noise-multiplier nan --sampling shuffle --epochs 4", "--noise-multiplier is nan"),
        (f"{EPSILON} --noise-multiplier -1 --sampling shuffle --epochs 4", "must be at least 0"),
        (f"{EPSILON} --sampling shuffle --epochs 4", "--noise-multiplier is missing"),
        (f"{SHUFFLE}", "exactly one of --steps and --epochs"),
        (f"{SHUFFLE} --epochs 4 --steps 4", "exactly one of --steps and --epochs"),
        (f"{SHUFFLE} --epochs 0", "--epochs is 0"),
        (f"{SHUFFLE} --steps 40", "--dataset-size and --batch-size"),
        (f"{SHUFFLE} --epochs 4 --sample-rate 0.1", "drop it"),
        (f"{SHUFFLE} --epochs 4 --group-size 0", "'0'"),
        (f"{SHUFFLE} --epochs 4 --group-size 1,x", "'x'"),
        (f"{SHUFFLE} --epochs 4 --group-size 3..1", "'3..1'"),
        (f"{SHUFFLE} --epochs 4 --group-size 1..99999", "more than 10000"),
        (f"{SHUFFLE} --epochs 4 --release laplace:1", "unknown release 'laplace'"),
        (f"{SHUFFLE} --epochs 4 --release gaussian:nan", "is nan"),
        (f"{SHUFFLE} --epochs 4 --release gaussian", "gaussian:SIGMA"),
        (f"{EPSILON} --noise-multiplier 1 --epochs 4", "Poisson batches need --sample-rate"),
        (f"{EPSILON} --noise-multiplier 1 --epochs 4 --sample-rate 2", "--sample-rate is 2"),
        (f"{EPSILON} --noise-multiplier 1 --epochs 4 --sample-rate 0.1 --batch-size 3", "not both"),
        (f"{EPSILON} --noise-multiplier 1 --epochs 4 --dataset-size 10 --batch-size 30", "batch_size is 30"),
        (f"{EPSILON} --noise-multiplier 1 --epochs 4 --sampling fixed", "--sampling fixed needs --dataset-size"),
        *(
            (f"epsilon --delta {delta} --noise-multiplier 1 --dataset-size 100 --batch-size 10 --steps 10", "delta is ")
            for delta in ("2", "-0.5", "nan")
        ),
        (f"{CALIBRATE} --epochs 4", "exactly one of --target-epsilon, --budget-rho"),
        (f"{CALIBRATE} --epochs 4 --target-epsilon 3", "needs --delta"),
        (f"{CALIBRATE} --epochs 4 --target-epsilon 0 --delta 1e-5", "target epsilon is 0"),
        (f"{CALIBRATE} --epochs 4 --budget-rho 1 --noise-multiplier 3", "being solved for"),
        (f"{CALIBRATE} --epochs 4 --budget-rho 1 --noise-multiplier 3 --solve epochs", "drop --epochs"),
        (f"{CALIBRATE} --budget-rho 1 --noise-multiplier 3 --solve decay --schedule time", "needs --epochs"),
        (
            f"{CALIBRATE} --budget-rho 1 --noise-multiplier 3 --solve decay --schedule time:decay=1 --epochs 3",
            "being solved for",
        ),
        (
            f"{CALIBRATE} --budget-rho 1 --noise-multiplier 3 --solve decay --schedule time:epochs=1 --epochs 3",
            "unknown key 'epochs' of noise schedule 'time'",
        ),
        (
            f"{SHUFFLE} --epochs 4 --schedule time:initial_noise_multiplier=1",
            "unknown key 'initial_noise_multiplier' of noise schedule 'time'",
        ),
        (f"{SHUFFLE} --epochs 4 --selection-trials 0.5", "number of trials is 0.5, but must be at least 1.0"),
        (f"{SHUFFLE} --epochs 4 --selection-shape 1", "--selection-shape has no effect without --selection-trials"),
        (f"{SHUFFLE} --epochs 4 --selection-trials 5 --risk", "--risk has no effect beside --selection-trials"),
        (f"{SHUFFLE} --epochs 4 --selection-trials 5 --accountant gdp", "choose auto, pld or rdp"),
        (f"{CALIBRATE} --epochs 5 --budget-rho 1 --selection-trials 5", "without --target-epsilon"),
        (f"{SAMPLED} --steps 10000000000", "--steps is 10000000000, but must be at most 1000000000"),
        (f"{SAMPLED} --epochs 10000001", "--epochs is 10000001, but must be at most 10000000"),
        (f"{SAMPLED} --steps 9 --dataset-size 500", "give either --sample-rate or --dataset-size with --batch-size"),
        (f"{SAMPLED} --steps 9 --prior 0.1", "--prior has no effect without --risk"),
        (f"{SAMPLED} --steps 9 --curve /no/such/folder/x.html", "--curve /no/such/folder/x.html cannot be written"),
        (f"{SAMPLED} --steps 9 --plot /no/such/folder/x.html", "--plot /no/such/folder/x.html cannot be written"),
        (f"{SAMPLED_RUN} --target-tpr 0.05", "--target-tpr and --at-fpr belong together"),
        (f"{SAMPLED_RUN} --target-advantage 0.1 --at-fpr 0.05", "--target-tpr and --at-fpr belong together"),
        (f"{SAMPLED_RUN} --target-advantage 0.1 --delta 1e-5", "--delta has no effect without --target-epsilon"),
        (f"{SAMPLED_RUN} --target-tpr 0.1 --at-fpr 0.01 --accountant rdp", "'pld' alone computes"),
        (f"{SAMPLED_RUN} --budget-rho 1 --accountant gdp", "'zcdp' alone computes rho"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(dpsweep: Command, line: str, complaint: str) -> None:
    code, out, err = dpsweep(line)
    assert (code, out) == (2, "")
    assert complaint in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    """The folder of a small trial with three snapshots of 50 examples, ids 1, 4, 7, ..."""
    root = tmp_path / "trial"
    contributions = np.random.default_rng(0).uniform(0.1, 1.0, (3, 50))
    write_trace(TrialFiles(str(root)).trace, TRACE)
    ids, groups = np.arange(50) * 3 + 1, np.zeros(50, int)
    rows = zip((0, 40, 80), contributions, strict=True)
    snapshots = (NormSnapshot(step, ids, groups, values, values, values) for step, values in rows)
    write_norms(TrialFiles(str(root)).norms, 16, *snapshots)
    return root, contributions.T


TRACE = Trace(50, (Segment(0, 60, PoissonSampling(0.05), 1.5), Segment(60, 60, PoissonSampling(0.05), 1.2)))


class TestStoredTrials:
    def test_worst_case_is_that_of_the_trace(self, answer: Answer, trial: Trial) -> None:
        printed = answer(f"epsilon --trial {trial[0]} --delta 1e-5 --accountant pld --group-size 1,2")
        expected = [account(TRACE, 1e-5, "pld", size) for size in (1, 2)]
        assert [p["epsilon"] for p in printed] == [e.epsilon for e in expected]
        assert [p["kind"] for p in printed] == ["guarantee", "guarantee"]
        alone = answer(f"epsilon --trace {trial[0]}/trace.arrow --delta 1e-5 --accountant pld")
        assert (alone["epsilon"], alone["steps"]) == (expected[0].epsilon, 120)

    @pytest.mark.parametrize("method", ["rdp", "pld"])
    def test_single_examples(self, answer: Answer, trial: Trial, method: str) -> None:
        root, contributions = trial
        spread = answer(f"epsilon --trial {root} --delta 1e-5 --individual {method}")[1]
        worst = account(TRACE, 1e-5).epsilon
        exact = np.minimum(individual_epsilons([0, 40, 80], contributions, TRACE, 1e-5, method).upper, worst)
        assert spread["mean"] == pytest.approx(exact.mean(), rel=1e-6)
        assert spread["quantiles"]["1"] == pytest.approx(exact.max(), rel=1e-6)
        assert spread["quantiles"]["0"] == pytest.approx(exact.min(), rel=1e-6)
        assert (spread["kind"], spread["adjacency"], spread["examples"]) == ("estimate", "add_remove", 50)
        assert "private data" in spread["sensitive"]

    def test_algorithm_2_is_an_estimate_for_comparison(self, answer: Answer, dpsweep: Command, trial: Trial) -> None:
        root, contributions = trial
        line = f"epsilon --trial {root} --delta 1e-5 --individual rdp-algorithm-2"
        spread = answer(line)[1]
        exact = algorithm_2([0, 40, 80], contributions, TRACE, 1e-5)
        assert spread["mean"] == pytest.approx(exact.mean(), rel=1e-6)
        assert spread["kind"] == "estimate"
        assert spread["caution"] == "as published: rounds to the nearest, may under-state; for comparison only"
        assert "may under-state" in dpsweep(line)[1]

    def test_records_together(self, answer: Answer, trial: Trial) -> None:
        root, contributions = trial
        worst, pair = answer(f"epsilon --trial {root} --delta 1e-5 --accountant pld --group-size 2 --examples 148,4")
        exact = epsilon_of_examples(TRACE, [0, 40, 80], contributions[[1, 49]], 1e-5).upper
        assert pair["epsilon"] == pytest.approx(exact, rel=1e-5)
        assert pair["epsilon"] < worst["epsilon"]
        assert (pair["unit"], pair["group_size"], pair["kind"]) == ("examples 4, 148", 2, "estimate")
        assert "private data" in pair["sensitive"]

    def test_table_and_plot(self, dpsweep: Command, trial: Trial, tmp_path: Path) -> None:
        line = f"epsilon --trial {trial[0]} --delta 1e-5 --individual rdp --examples 4 --plot {tmp_path / 'p.html'}"
        code, out, _ = dpsweep(line)
        assert code == 0
        assert all(word in out for word in ("examples 4", "median", "largest", "private data", "estimate"))
        assert (tmp_path / "p.html").exists()

    @pytest.mark.parametrize(
        ("line", "complaint"),
        [
            ("--trial {0}/none", "trace.arrow does not exist"),
            ("--trial {0} --examples 2", "trained on no example of this id; the largest is 148"),
            ("--trial {0} --examples 1,x", "--examples has 'x'"),
            ("--trial {0} --noise-multiplier 0", "drop the flags"),
            ("--trial {0} --trace {0}/trace.arrow", "give one of them"),
            ("--trace {0}/trace.arrow --individual rdp", "--individual has no effect without --trial"),
        ],
    )
    def test_bad_requests(self, dpsweep: Command, trial: Trial, line: str, complaint: str) -> None:
        code, out, err = dpsweep(f"epsilon --delta 1e-5 {line.format(trial[0])}")
        assert (code, out) == (2, "")
        assert complaint in err
        assert err.count("\n") == 1

    def test_damaged_shards_are_named(self, dpsweep: Command, trial: Trial) -> None:
        part = next((trial[0] / "private" / "norms").rglob("*.arrow"))
        part.write_bytes(part.read_bytes()[:-1])
        code, out, err = dpsweep(f"epsilon --trial {trial[0]} --delta 1e-5 --individual rdp")
        assert (code, out) == (1, "")
        assert part.name in err
        assert err.count("\n") == 1


class TestRunFlags:
    schedule = make_schedule("constant", 2.0)

    @pytest.mark.parametrize(
        ("flags", "sampling", "steps_per_epoch"),
        [
            (RunFlags(sampling="poisson", sample_rate=0.02), PoissonSampling(0.02), 50),
            (RunFlags(sampling="poisson", sample_rate=0.03), PoissonSampling(0.03), 34),
            (RunFlags(sampling="poisson", dataset_size=105, batch_size=10), PoissonSampling(10 / 105), 11),
            (RunFlags(sampling="fixed", dataset_size=105, batch_size=10), FixedBatchSampling(105, 10), 11),
            (RunFlags(sampling="shuffle"), ShuffledSampling(2), 2),
            (RunFlags(sampling="shuffle", dataset_size=1), ShuffledSampling(1), 1),
            (RunFlags(sampling="shuffle", dataset_size=105, batch_size=10), ShuffledSampling(11), 11),
        ],
    )
    def test_sampling_and_epoch(self, flags: RunFlags, sampling: Sampling, steps_per_epoch: int) -> None:
        assert (flags.mechanism(), flags.mechanism().steps_per_epoch) == (sampling, steps_per_epoch)
        assert replace(flags, epochs=3).trace(self.schedule).steps == 3 * steps_per_epoch

    def test_steps_end_within_an_epoch(self) -> None:
        trace = RunFlags(sample_rate=0.02, steps=60).trace(make_schedule("time", 2.0, decay=1.0))
        assert [(segment.steps, segment.noise_multiplier) for segment in trace.segments] == [(50, 2.0), (10, 1.0)]

    def test_queries_and_releases_enter_the_trace(self) -> None:
        given: dict[str, Any] = {"side_noise_multiplier": [5.0, 4.0], "release": ["gaussian:16", "pure:0.1"]}
        flags = RunFlags(sampling="shuffle", epochs=1, **given)
        trace = flags.trace(self.schedule)
        assert trace.segments[0].side_queries == (SideQuery("side query 1", 5.0), SideQuery("side query 2", 4.0))
        assert trace.releases == (GaussianRelease("gaussian:16", 16.0), PureRelease("pure:0.1", 0.1))
