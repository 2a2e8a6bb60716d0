"""How a submitted sweep's driver records in MLflow: address and login of the client that submits, sealed for the job.

Ray keeps and shows the environment and the description of a job, and workers inherit it. The login therefore travels
sealed with the cluster's token in the package of the job, and only the driver opens it, in its own process. A person
who has the token can open it too: the token lets them run code on the cluster as the same user.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from dpsweep.accounting.errors import InvalidInput

VARIABLES: Final = (
    "MLFLOW_TRACKING_URI",
    "MLFLOW_EXPERIMENT_NAME",
    "MLFLOW_TRACKING_USERNAME",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
)
"""Variables of MLflow's client that name where and as whom it records."""
SECRET: Final = frozenset(VARIABLES[2:])
_SALT, _NONCE = 16, 12


def own_access() -> dict[str, str]:
    """Return the variables of this process, with the login of `~/.mlflow/credentials` as MLflow takes it."""
    found = {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}
    if not SECRET & found.keys() and (Path.home() / ".mlflow" / "credentials").is_file():
        from mlflow.utils.credentials import read_mlflow_creds

        login = read_mlflow_creds()
        if login.username and login.password:
            found |= {"MLFLOW_TRACKING_USERNAME": login.username, "MLFLOW_TRACKING_PASSWORD": login.password}
    return found


def sealed(access: Mapping[str, str], token: str) -> str:
    """Return the variables, encrypted by AES-256-GCM with a key that scrypt derives from the cluster's token; "" for
    none.
    """
    if not access:
        return ""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    salt, nonce = os.urandom(_SALT), os.urandom(_NONCE)
    secret = AESGCM(_key(token, salt)).encrypt(nonce, json.dumps(dict(access)).encode(), None)
    return base64.b64encode(salt + nonce + secret).decode()


def unsealed(text: str, token: str | None) -> dict[str, str]:
    """Return the variables that `sealed` was given. Raises: InvalidInput for another token, or none."""
    if not text:
        return {}
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    try:
        stored = base64.b64decode(text)
        salt, nonce, secret = stored[:_SALT], stored[_SALT : _SALT + _NONCE], stored[_SALT + _NONCE :]
        return dict(json.loads(AESGCM(_key(token or "", salt)).decrypt(nonce, secret, None)))
    except (InvalidTag, ValueError) as error:  # another token, or no text that `sealed` has made
        raise InvalidInput(
            "the job's login of MLflow cannot be opened: the head has another token than the client that submitted; "
            "submit again with the token of this cluster"
        ) from error


def cluster_token() -> str | None:
    """Return the token of the cluster, as Ray looks for it; None without one."""
    if given := os.environ.get("RAY_AUTH_TOKEN"):
        return given.strip()
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    return file.read_text(encoding="utf-8").strip() if file.is_file() else None


def _key(token: str, salt: bytes) -> bytes:
    return hashlib.scrypt(token.encode(), salt=salt, n=2**14, r=8, p=1, dklen=32)
