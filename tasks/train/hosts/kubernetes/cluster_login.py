"""The login to a cluster that the settings give, as a connection of Airflow does."""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from trainwright.tasks.errors import BadInput
from trainwright.tasks.settings import Settings

_API = re.compile(r"https://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+)(:[0-9]{1,5})?/?")


@dataclass(frozen=True)
class ClusterLogin:
    """An API server, and the token of an account that may make Jobs."""

    api: str
    token: str = field(repr=False)
    ca: Path | None
    """a file with the certificates that sign the server's; None: this machine's"""

    @classmethod
    def of(cls, settings: Settings, where: str = "TRAINWRIGHT_KUBERNETES_*") -> ClusterLogin | None:
        """The settings' login; None if they have none. Raises BadInput, beginning with `where`."""
        given = settings.kubernetes_login()
        api, token, ca = (given.get(name, "") for name in ("api", "token", "ca"))
        if not api and not token:
            return None
        if not _API.fullmatch(api):
            shown = re.sub(r"//.*@", "//…@", api)[:80]  # without a password
            raise BadInput(
                f"{where}: API server: got {shown!r}; allowed: https://host:port, without user, "
                "password or path"
            )
        if not re.fullmatch(r"[!-~]+", token):
            raise BadInput(f"{where}: the token is empty or has spaces; allowed: a token")
        return cls(api.rstrip("/"), token, Path(ca) if ca else None)

    def tls(self) -> ssl.SSLContext:
        """The context of connections to the server, which checks its certificate.

        Raises BadInput.
        """
        if self.ca is None:
            return ssl.create_default_context()
        try:
            return ssl.create_default_context(cafile=str(self.ca))
        except (OSError, ssl.SSLError) as error:
            raise BadInput(
                f"kubernetes: CA file: got {self.ca}: {error.strerror or error}; allowed: a PEM "
                "file of certificates"
            ) from None
