"""Bugs in the accounting of single examples and in the records of accounting, by file."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Bug as B
from tests.mutants.mutant import Mutant, bugs_in

CERTIFICATES: Final = "tests/accounting/pld/test_certificates.py"
COMPOSITION: Final = (CERTIFICATES, "tests/accounting/pld/test_composition.py")
INDIVIDUAL: Final = ("tests/accounting/individual/test_inversion.py", "tests/accounting/individual/test_epsilons.py")
SHARDS: Final = ("tests/accounting/records/test_shards.py",)
BLOCKS: Final = ("tests/accounting/individual/test_blocks.py",)
OBJECTS: Final = ("tests/accounting/records/test_snapshot_objects.py",)
ENCRYPTED: Final = ("tests/accounting/records/test_encryption.py",)

NUMERICS: Final[tuple[Mutant, ...]] = (
    *bugs_in(
        "accounting/individual/contributions.py",
        INDIVIDUAL,
        B(
            "moved = self.offset + np.minimum(",
            "moved = np.minimum(",
            "a displaced record costs nothing",
            True,
        ),
        B(
            "side = sum(((1 + sampling.displaced) / query",
            "side = sum((1 / query",
            "side queries on fixed batches are not doubled",
            True,
            COMPOSITION,
        ),
        B(
            "found |= part.offset + self.values[:, part.column] > 0.0",
            "found |= False",
            "steps without noise protect everybody",
            True,
        ),
        B(
            "worst = np.maximum(worst, precisions)",
            "worst = precisions",
            "an epoch costs what its last step costs",
            True,
        ),
        B(
            "yield precisions, last - first - 1",
            "yield precisions, last - first - 2",
            "an epoch is dropped",
            True,
            ("tests/accounting/individual/test_epsilons.py::test_every_shuffled_epoch_between_two_snapshots_costs",),
        ),
        B(
            "places.append(np.where(alone, 0.0, block",
            "places.append(np.where(alone, 0.0, 0.9 * block",
            "blocks are cheaper",
            True,
            BLOCKS,
        ),
        B(
            "precision += np.where(alone, blocks * worst, 0.0)",
            "pass",
            "blocks of hardly any noise are free",
            True,
            BLOCKS,
        ),
        B("float(sum(releases)))", "0.0)", "Gaussian releases cost examples nothing", True),
        B(
            "max(first, segment.start_step), min(last",
            "max(first + 1, segment.start_step), min(last",
            "each snapshot loses its first step",
            True,
        ),
    ),
    *bugs_in(
        "accounting/individual/blocks.py",
        BLOCKS,
        B("masses * (1.0 - shares), points)", "masses, points)", "mass is counted at both dots"),
        B("on_ring + 1) % points", "on_ring) % points", "losses are rounded down", True),
        B("errors += beside_nodes(", "errors += 0.0 * beside_nodes(", "chords have no error", True),
        B("if lost > LARGEST_LOSS * law.tail:", "if False:", "spectra forget the lost mass of laws"),
        B("np.where(lost <= LARGEST_LOSS * law.tail, ", "np.where(lost < np.inf, ", "moments forget lost mass", True),
    ),
    *bugs_in(
        "accounting/individual/spreading.py",
        INDIVIDUAL,
        B(
            "_BESIDE = 2",
            "_BESIDE = 0",
            "bounds at a node lack its neighbours where rows are few",
            True,
            ("tests/accounting/individual/test_extreme_rows.py",),
        ),
    ),
    *bugs_in(
        "accounting/individual/kernels.py",
        INDIVIDUAL,
        B("* slope\n", "* 0.9 * slope\n", "steps have more noise than they had", True),
        B("root = np.sqrt(root * root + side)", "root = abs(root)", "side queries cost nothing", True),
        B("for i in range(whole, len(weights)):", "for i in range(whole, whole):", "the last nodes are left out", True),
        B(
            "total[j] = fixed[j] + precision * gaussian[j]",
            "total[j] = fixed[j]",
            "full batches and Gaussian releases cost examples nothing",
            True,
        ),
    ),
    *bugs_in(
        "accounting/individual/exact_composition.py",
        INDIVIDUAL,
        B(
            "min(upper[row], alone[place].upper)",
            "min(upper[row], alone[place].lower)",
            "the lower bound of an example that is seldom drawn is shown as the upper",
            True,
            ("tests/accounting/individual/test_extreme_rows.py",),
        ),
        B(
            "above[bucket.rows], below[bucket.rows] = bounds[:, bucket.rows]",
            "above[bucket.rows], below[bucket.rows] = bounds[[1, 1]][:, bucket.rows]",
            "the lower bound is shown as the upper",
            True,
        ),
    ),
    *bugs_in(
        "accounting/individual/tail_bounds.py",
        ("tests/accounting/individual/test_tail_bounds.py",),
        B("<= np.log(delta) - _MARGIN", "<= np.log(delta) + 5.0", "a direction of far larger delta is left out", True),
        B("- _MARGIN - log_peaks", "- _MARGIN - 3.0 * log_peaks", "a bound on delta is taken to be lower", True),
    ),
    *bugs_in(
        "accounting/individual/spectrum_kernels.py",
        INDIVIDUAL,
        B("- oy * s + error)", "- oy * s)", "errors are not added to delta", True),
        B("aliases = np.log1p(", "aliases = 0.0 * np.log1p(", "a lower bound forgets aliases"),
        B("= max(upper, found)", "= found", "the epsilon of the last direction", True),
        B(
            "spent += total * (",
            "spent += 0.5 * total * (",
            "errors of the exponent count half",
            True,
            ("tests/accounting/individual/test_kernels.py",),
        ),
        B("wanted = side * height <= 0.0", "wanted = True", "any epsilon is certified", True),
        B(
            "tilt, spacing, upper) <= 0.0:",
            "tilt, spacing, upper) < np.inf:",
            "the direction that comes first counts alone",
            True,
        ),
    ),
    *bugs_in(
        "accounting/individual/rdp.py",
        INDIVIDUAL,
        B(
            "        plain[0] += pure_rdp(epsilon, ORDERS)\n",
            "        pass\n",
            "pure releases cost examples nothing",
            True,
        ),
        B("precision**-0.5)\n    return always", "precision**-0.25)\n    return always", "noise of a node", True),
    ),
    *bugs_in(
        "accounting/jobs/user_accounting.py",
        ("tests/accounting/jobs/test_user_accounting.py",),
        B("counts == 1", "counts >= 1", "users of several records pay for one", True),
    ),
    *bugs_in(
        "accounting/records/shards.py",
        SHARDS,
        B("if self.steps[0] != 0:", "if False:", "the first steps go uncounted", True),
        B(
            "if self.examples != examples:",
            "if self.examples > examples:",
            "missing examples are not noticed",
            True,
            ("tests/accounting/jobs/test_parallel.py::test_examples_without_shards_are_an_error",),
        ),
        B(
            "cancel_futures=True",
            "cancel_futures=False",
            "a second writer stands beside the first",
            tests=("tests/accounting/records/test_background.py",),
        ),
    ),
    *bugs_in(
        "accounting/records/snapshots.py",
        OBJECTS,
        B("(each.number, each.previous) != (number, previous)", "False", "a lost snapshot is not noticed", True),
        B(
            'if parsed_json(content) != {"snapshots": len(found), "last": previous}:',
            "if False:",
            "the loss of the last snapshot is not noticed",
            True,
        ),
        B(
            "elif committed_snapshot(self.directory, step) != snapshot:",
            "elif False:",
            "another run's rows are a replay",
            True,
        ),
        B(
            "write_in_private_folder(uri, *pieces)",
            '(write := __import__("dpsweep").accounting.records.files.write_bytes_atomically)(uri, b"".join(pieces))',
            "norms are public",
            True,
        ),
        B(
            '    if content is None:\n        raise DataCorruption(f"{directory} holds no {COMPLETE}',
            '    if False:\n        raise DataCorruption(f"{directory} holds no {COMPLETE}',
            "an interrupted run is read",
            True,
        ),
    ),
    *bugs_in(
        "accounting/records/snapshot_objects.py",
        OBJECTS,
        B("if hashlib.sha256(data).digest() != place.digest:", "if False:", "flipped bytes are read", True),
        B('encrypted(f"{uri}#{number}", piece)', "piece", "norms are not encrypted", True, ENCRYPTED),
    ),
    *bugs_in(
        "workers/trials/trial_setup.py",
        ("tests/workers/training/test_background_norms.py",),
        B(
            "        for store in trainer.stores:\n            store.wait()\n",
            "",
            "a checkpoint is ahead of the norms",
            True,
        ),
    ),
    *bugs_in(
        "workers/trials/trial.py",
        ("tests/workers/training/test_background_norms.py",),
        B(
            "with closed_afterwards(trainer.stores):\n        if group",
            "if True:\n        if group",
            "two writers",
        ),
    ),
    *bugs_in(
        "accounting/records/arrow_parts.py",
        ("tests/accounting/records/test_shards.py",),
        B("if hashlib.sha256(data).hexdigest() != record.sha256:", "if False:", "flipped bytes are read"),
    ),
    *bugs_in(
        "accounting/jobs/examples.py",
        ("tests/accounting/jobs/test_parallel.py",),
        B(
            "if result.part != part:",
            "if False:",
            "one part is taken for another",
            False,
            ("tests/accounting/jobs/test_parallel.py::test_a_part_that_is_not_returned_is_an_error",),
        ),
        B(
            "upper=result.upper,",
            "upper=result.lower,",
            "the lower bounds are stored as the upper",
            True,
            (
                "tests/accounting/jobs/test_parallel.py::test_a_trial_equals_individual_accounting_of_the_whole_data_set",
            ),
        ),
        B(
            "shards.require_complete(",
            "shards.examples or (",
            "incomplete shards are accounted",
            True,
            ("tests/accounting/jobs/test_parallel.py::test_examples_without_shards_are_an_error",),
        ),
    ),
    *bugs_in(
        "accounting/jobs/summaries.py",
        ("tests/accounting/jobs/test_summaries.py",),
        B("np.minimum(epsilons, self.bound)", "epsilons", "epsilons above the bound are not clipped", True),
        B(
            "values = counting.capped(epsilons.upper)",
            "values = counting.capped(epsilons.lower)",
            "lower bounds count",
            True,
        ),
        B("np.outer(gap, gap) * (", "0.0 * (", "parts of other means merge as if they shared one"),
        B("return np.asarray(ranks - before[places])", "return ranks", "a further pass seeks values of other ranks"),
        B("if wanted.shift == 0:", "if True:", "a bin's lower end is taken for the value"),
    ),
    *bugs_in(
        "accounting/records/epsilon_files.py",
        SHARDS,
        B('if note.get("inputs") != inputs:', "if not note:", "a part of another trace or delta is taken up", True),
    ),
    *bugs_in(
        "accounting/records/keystream.py",
        ("tests/accounting/jobs/test_release.py", "tests/workers/noise/test_gaussian_sources.py"),
        B("self._counter += 1", "self._counter += 0", "every call gives the same bits", True),
        B(
            "return KeyedStream(fresh_key())",
            "return KeyedStream(bytes(KEY_BYTES))",
            "the key is known",
            True,
        ),
    ),
    *bugs_in(
        "accounting/numerics/rounding.py",
        ("tests/accounting/jobs/test_release.py", "tests/workers/noise/test_gaussian_sources.py"),
        B("_SHARE = 2.0**-12", "_SHARE = 2.0**-40", "low-order bits give values away", True),
    ),
)
