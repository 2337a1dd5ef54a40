"""Connects to other hosts by ssh, without prompts (BatchMode) and only to known host keys."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from trainwright.tasks.errors import BadInput, ServiceUnreachable
from trainwright.tasks.settings import Settings
from trainwright.tasks.spec.documents import validated
from trainwright.tasks.spec.host_spec import Ssh

ADDRESS = re.compile(r"[A-Za-z0-9][A-Za-z0-9.:_-]{0,252}")
"""Addresses that ssh reads as a host. A leading - would make it an option."""
CONNECT_TIMEOUT_S = 10
_SILENCE_S, _SILENCES = 5, 3
"""ssh ends a connection after this many keep-alive intervals without an answer."""
_OPTIONS = {
    "BatchMode": "yes",
    "StrictHostKeyChecking": "yes",
    "UpdateHostKeys": "no",
    "ConnectTimeout": str(CONNECT_TIMEOUT_S),
    "ServerAliveInterval": str(_SILENCE_S),
    "ServerAliveCountMax": str(_SILENCES),
    "ClearAllForwardings": "yes",
    "ForwardAgent": "no",
    # No shared connection: it would outlive this process, or end with another one.
    "ControlMaster": "no",
    "ControlPath": "none",
    "LogLevel": "ERROR",
}


def ssh_command(address: str, settings: Settings, login: Ssh | None = None) -> list[str]:
    """The command that connects to a host; append the remote command to it.

    Values that `login` lacks come from the settings, else from the user's ssh configuration. Raises
    BadInput if those are wrong.
    """
    options = _OPTIONS | _login_options(settings, login)
    return [
        "ssh",
        "-T",
        *(word for name, value in options.items() for word in ("-o", f"{name}={value}")),
        "--",
        address,
    ]


def _login_options(settings: Settings, login: Ssh | None) -> dict[str, str]:
    given = login.model_dump(exclude_none=True) if login is not None else {}
    for field, value in settings.ssh_login().items():
        if field not in given:
            validated(Ssh, {field: value}, f"TRAINWRIGHT_SSH_{field.upper()}")
            given[field] = value
    login, options = Ssh.model_validate(given), {}
    if login.known_hosts is not None:
        _require_file("known_hosts", login.known_hosts)
        options["UserKnownHostsFile"] = f'"{login.known_hosts}"'
    if login.identity is not None:
        _require_file("identity", login.identity)
        options.update({"IdentityFile": f'"{login.identity}"', "IdentitiesOnly": "yes"})
    if login.user is not None:
        options["User"] = login.user
    if login.port is not None:
        options["Port"] = str(login.port)
    return options


def _require_file(field: str, path: str) -> None:
    """Raises BadInput if the file is missing. Paths that ssh itself expands are not checked."""
    there = Path(path).expanduser()
    if not re.search(r"%|\$", path) and (there.is_dir() or not there.exists()):
        raise BadInput(f"ssh {field}: got {path}; there is no such file")


def why_ended(stderr: str, code: int | None) -> str:
    """Why ssh ended, in one line."""
    if "IDENTIFICATION HAS CHANGED" in stderr:
        shown = re.search(r"SHA256:[A-Za-z0-9+/]+", stderr)
        return (
            "its host key is not the one in known_hosts"
            f"{f' (it shows {shown[0]})' if shown else ''}: it may be another machine"
        )
    if re.search(r"No \S+ host key is known for", stderr):
        return (
            "its host key is not in known_hosts: "
            "compare it with the host's own, then add it (ssh-keyscan shows it)"
        )
    lines = [line for line in stderr.strip().splitlines() if line.strip()]
    return lines[-1].strip() if lines else f"ssh exited with {code}"


def unreachable(
    address: str,
    why: str,
    settings: Settings,
    name: str | None = None,
    login: Ssh | None = None,
    python: str = "python3",
) -> ServiceUnreachable:
    """The error for an unusable host, with the command that must succeed."""
    host = f"host {name} ({address})" if name else f"host {address}"
    options = {"BatchMode": "yes", "StrictHostKeyChecking": "yes"} | _login_options(settings, login)
    words = [word for option, value in options.items() for word in ("-o", f"{option}={value}")]
    return ServiceUnreachable(
        f"{host}: {why}; `{shlex.join(['ssh', *words, address, python, '-V'])}` must work",
        service="ssh",
        address=address,
    )
