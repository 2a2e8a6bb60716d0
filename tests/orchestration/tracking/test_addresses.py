"""Secrets in addresses."""

from __future__ import annotations

import pytest

from dpsweep.orchestration.tracking.addresses import masked, masked_in


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("postgresql://me:hunter2@host/db", "postgresql://me:***@host/db"),
        ("postgresql://host/db?user=me&password=hunter2", "postgresql://host/db?user=me&password=***"),
        ("postgresql://host/db?sslpassword=a%2Fb&x=1", "postgresql://host/db?sslpassword=***&x=1"),
        ("https://sometoken@host/path", "https://***@host/path"),
        ("sqlite:////runs/x/mlflow.db", "sqlite:////runs/x/mlflow.db"),
        ("http://[broken", "***"),
    ],
)
def test_secrets_are_masked(uri: str, shown: str) -> None:
    assert masked(uri) == shown


def test_secrets_are_masked_in_what_a_library_says() -> None:
    uri = "mysql://me:p%40ss@host/db"
    assert (
        masked_in("access denied for 'p@ss' at mysql://me:p%40ss@host", uri)
        == "access denied for '***' at mysql://me:***@host"
    )
