"""Generates the secrets of a whole stack: `python infra/stack_secrets.py FOLDER`.

Writes one file of environment variables for each group of parts (`infra/stack` says which part
reads which), readable only by the user. Keeps a folder that exists. Needs only the standard
library, so that it runs on a machine that has no more than a container runtime.
"""

from __future__ import annotations

import base64
import secrets
import sys
from pathlib import Path

_DATABASES = "postgresql+psycopg://trainwright:{password}@postgres:5432/{name}"


def stack_secrets() -> dict[str, dict[str, str]]:
    """Fresh secrets: the name of the group, and its variables."""
    postgres, redis = _word(), _word()
    access, secret = secrets.token_hex(10), _word()
    airflow = _DATABASES.format(password=postgres, name="airflow")
    return {
        "postgres": {"POSTGRES_PASSWORD": postgres},
        "redis": {"REDIS_PASSWORD": redis},
        "s3": {"AWS_ACCESS_KEY_ID": access, "AWS_SECRET_ACCESS_KEY": secret},
        "store": {
            "TRAINWRIGHT_S3_ACCESS_KEY": access,
            "TRAINWRIGHT_S3_SECRET_KEY": secret,
            "TRAINWRIGHT_LEDGER": _DATABASES.format(password=postgres, name="ledger"),
        },
        "airflow": {
            "AIRFLOW_ADMIN_PASSWORD": _word(),
            "AIRFLOW__API__SECRET_KEY": _word(),
            "AIRFLOW__API_AUTH__JWT_SECRET": _word(64),
            "AIRFLOW__CORE__FERNET_KEY": base64.urlsafe_b64encode(secrets.token_bytes(32)).decode(),
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": airflow,
            # without it, another driver (asyncpg) is necessary
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN_ASYNC": airflow,
            "AIRFLOW__CELERY__BROKER_URL": f"redis://:{redis}@redis:6379/0",
            "AIRFLOW__CELERY__RESULT_BACKEND": f"db+{airflow}",
        },
        "service": {
            "TRAINWRIGHT_SERVICE_TOKEN": _word(),
            "TRAINWRIGHT_SERVICE_READ_TOKEN": _word(),
        },
    }


def _word(size_bytes: int = 32) -> str:
    """A random word of letters, digits, - and _, which URLs and JSON need not escape."""
    return secrets.token_urlsafe(size_bytes)


def write_secrets(folder: Path) -> None:
    """Write fresh secrets in `folder`, one file NAME.env a group. Raises OSError if it exists."""
    folder.mkdir(mode=0o700, parents=True)
    for name, variables in stack_secrets().items():
        path = folder / f"{name}.env"
        path.touch(mode=0o600)
        path.write_text("".join(f"{key}={value}\n" for key, value in variables.items()))


def main() -> int:
    """Write secrets in the folder that the argument names."""
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        return _fail("usage: python infra/stack_secrets.py FOLDER")
    folder = Path(sys.argv[1])
    try:
        write_secrets(folder)
    except FileExistsError:
        return _fail(f"{folder}: exists, and is kept; remove it for other secrets")
    except OSError as error:
        return _fail(f"{folder}: can't be written ({error.strerror})")
    return 0


def _fail(line: str) -> int:
    sys.stderr.write(f"{line}\n")
    return 2


if __name__ == "__main__":
    raise SystemExit(main())
