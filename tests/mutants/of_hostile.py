"""Bugs in what guards against others: forged results, damaged files, strangers on the machine, and strong attacks."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Bug as B
from tests.mutants.mutant import Mutant, bugs_in

ENCRYPTION: Final = ("tests/accounting/records/test_encryption.py",)
CLAIMS: Final = ("tests/orchestration/comparison/test_claims.py",)
FOUND: Final = ("tests/test_hostile.py::test_what_was_found_is_refused_in_one_line",)
MEMBERSHIP: Final = ("tests/workers/trials/test_membership.py",)
STRANGERS: Final = ("tests/orchestration/test_second_user.py",)

HOSTILE: Final[tuple[Mutant, ...]] = (
    *bugs_in(
        "accounting/mechanism/reasons.py",
        ("tests/orchestration/test_reasons.py::test_each_reason_has_its_cause_and_no_other_comes_with_it",),
        B('kind="estimate", reasons=found', "reasons=found", "a claim with reasons stays a guarantee", True),
    ),
    *bugs_in(
        "workers/data/table.py",
        ("tests/orchestration/test_errors.py::test_an_error_of_the_plan_shows_type_and_place",),
        B("if name in self.known else A_COLUMN", "if name else A_COLUMN", "errors show a first row as names", True),
    ),
    *bugs_in(
        "orchestration/comparison/claims.py",
        CLAIMS,
        B("    yield from _stronger(claims)\n", "", "a result may hide why it is no guarantee", True),
        B("        yield from _of_account(again, trace)\n", "        ()\n", "forged accountings are shown", True),
        B("    require_founded(files, record)\n    return record", "    return record", "the gate lets all out", True),
        B(
            "yield from _smaller_risk(risk, trace, {1,",
            "{} and (risk, trace, {1,",
            "forged bounds on attacks are shown",
            True,
        ),
        B(
            "if not claimed.upper >= least * (1.0 - _ROUNDING):",
            "if claimed.upper < least * (1.0 - _ROUNDING):",
            "a bound on attacks that is no number is shown",
            True,
        ),
        B(
            "found = risk_of(trace, claim.group_size)",
            "found = risk_of(trace, 1)",
            "bounds for groups are compared with those for one record",
            True,
        ),
    ),
    *bugs_in(
        "accounting/records/arrow_parts.py",
        FOUND,
        B(
            " or any(column.null_count for column in table.columns)",
            "",
            "rows without values are accounted for",
            True,
        ),
    ),
    *bugs_in(
        "accounting/records/files.py",
        STRANGERS,
        B("os.umask(before | 0o022)", "os.umask(before)", "strangers write into what libraries make", True),
    ),
    *bugs_in(
        "accounting/records/local_files.py",
        ("tests/accounting/records/test_local_files.py",),
        B("if _place(handle) == path:", "if True:", "folders are reached through links"),
        B("os.O_CREAT | os.O_EXCL | _FILE", "os.O_CREAT | _FILE", "a temporary file of somebody else's is written"),
        B("if most is not None and found.st_size > most:", "if False:", "a record of any size is read"),
        B(
            "    _require_owner(path, found)\n    if found.st_nlink > 1:",
            "    if False:",
            "files of others are changed",
        ),
    ),
    *bugs_in(
        "accounting/records/sealed.py",
        ENCRYPTION,
        B(
            "    write_in_private_folder(uri, stored)",
            "    from dpsweep.accounting.records.files import write_bytes_atomically\n"
            "    write_bytes_atomically(uri, stored)",
            "private files are public",
            True,
        ),
        B(
            "encrypted(uri, content) if is_encrypting() else content",
            "content",
            "private files are not encrypted",
            True,
        ),
    ),
    *bugs_in(
        "accounting/records/encryption.py",
        ENCRYPTION,
        B("salting.update(content)", "salting.update(b'')", "a file's key and nonces repeat", True),
        B('>Q", len(uri.encode())) + uri.encode()', '>Q", 0)', "equal contents of two files look equal", True),
        B('>3xQ?", number,', '>3xQ?", 0,', "nonces repeat within a file", True),
        B("number == last), view", "False), view", "a file that is cut off between segments is read", True),
        B("raise InvalidInput(_not_encrypted(uri))", "return stored", "a file that is not encrypted is read", True),
        B("raise InvalidInput(_not_encrypted(where))", "pass", "a sweep goes on with a key that began without", True),
        B("raise InvalidInput(_encrypted(where))", "pass", "a sweep goes on without the key that it began with", True),
        B("has {len(text)} characters that are", "is {text},", "an error tells the key", True),
    ),
    *bugs_in(
        "workers/trials/membership.py",
        MEMBERSHIP,
        B("np.asarray(-own - logsumexp", "np.asarray(-own + logsumexp", "hard examples score as members"),
        B(
            "yield np.sort(order[examples // 2 :])",
            "yield np.sort(order[: examples // 2])",
            "no model without an example",
        ),
    ),
    *bugs_in(
        "workers/evaluation/attack_results.py",
        MEMBERSHIP,
        B("per_side - found + 1.0, _TAIL)", "per_side - found + 1.0, 2.0 * _TAIL)", "intervals are too narrow"),
    ),
)
