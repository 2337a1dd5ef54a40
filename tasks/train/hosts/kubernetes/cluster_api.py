"""The few requests to a cluster's API that hosts need: create, read and delete, by REST.

Through `kubectl proxy`, which knows every way to log in; else with the login of the settings; else
with the service account of this pod.
"""

from __future__ import annotations

import http.client
import json
import os
import ssl
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from trainwright.tasks.errors import BadInput, ServiceUnreachable
from trainwright.tasks.train.hosts.kubernetes.cluster_login import ClusterLogin

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TIMEOUT_S = 15.0
_WRONG_REQUEST = (400, 404, 409, 422)
ApiObject = dict[str, Any]


class ClusterApi:
    """A namespace of a cluster."""

    def __init__(
        self,
        namespace: str,
        proxy: str | None = None,
        login: ClusterLogin | None = None,
        account: Path = SERVICE_ACCOUNT,
    ) -> None:
        """By the proxy, the login or the account of this pod. Raises ServiceUnreachable."""
        self.namespace, self.in_pod = namespace, proxy is None and login is None
        self._account, self._login, context = account, login, None
        if proxy is not None:
            self.url, self._login = proxy, None
        elif login is not None:
            self.url, context = login.api, login.tls()
        else:
            host, port = (
                os.environ.get(f"KUBERNETES_SERVICE_{one}", "") for one in ("HOST", "PORT")
            )
            if not host or not (account / "token").is_file():
                raise ServiceUnreachable(
                    "kubernetes: this process runs in no pod with a service account; start "
                    "`kubectl proxy` and set `kubernetes.api: http://127.0.0.1:8001` in the pool, "
                    "or set TRAINWRIGHT_KUBERNETES_API and _TOKEN",
                    service="kubernetes",
                )
            self.url = f"https://{f'[{host}]' if ':' in host else host}:{port}"
            context = ssl.create_default_context(cafile=str(account / "ca.crt"))
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )

    @property
    def host(self) -> tuple[str, int]:
        """Where the API is, for the route to it."""
        parts = urllib.parse.urlsplit(self.url)
        return str(parts.hostname), int(parts.port or 443)

    def create(self, kind: str, document: ApiObject) -> ApiObject:
        """Create a Job or a Secret (`kind`: jobs, secrets); as the cluster has it now."""
        return self._ask("POST", self._path(kind), document)

    def pods_of(self, job: str) -> list[ApiObject]:
        """The pods of a Job."""
        query = urllib.parse.urlencode({"labelSelector": f"job-name={job}"})
        found = self._ask("GET", f"{self._path('pods')}?{query}")
        return list(found["items"])

    def read(self, kind: str, name: str) -> ApiObject | None:
        """An object; None if it is not there."""
        try:
            return self._ask("GET", f"{self._path(kind)}/{name}")
        except BadInput:
            return None

    def delete_job(self, name: str) -> bool:
        """Delete a Job and what belongs to it: its pod, its Secret. Whether it was there."""
        options = {"propagationPolicy": "Background"}
        try:
            self._ask("DELETE", f"{self._path('jobs')}/{name}", options)
        except BadInput as error:
            if error.details.get("status") != 404:
                raise
            return False
        return True

    def _path(self, kind: str) -> str:
        group = "apis/batch/v1" if kind == "jobs" else "api/v1"
        return f"/{group}/namespaces/{self.namespace}/{kind}"

    def _ask(self, method: str, path: str, document: ApiObject | None = None) -> ApiObject:
        """Raises BadInput for a wrong request, ServiceUnreachable for what a user can't mend."""
        request = urllib.request.Request(self.url + path, method=method)
        request.add_header("Accept", "application/json")
        token = None if self._login is None else self._login.token
        if self.in_pod:  # read each time: the cluster replaces it
            token = (self._account / "token").read_text().strip()
        if token is not None:
            request.add_header("Authorization", f"Bearer {token}")
        if document is not None:
            request.data = json.dumps(document).encode()
            request.add_header("Content-Type", "application/json")
        try:
            with self._opener.open(request, timeout=_TIMEOUT_S) as answer:
                return dict(json.load(answer))
        except urllib.error.HTTPError as error:
            raise self._refused(error) from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            why = getattr(error, "reason", None) or error
            raise ServiceUnreachable(
                f"kubernetes: its API at {self.url} can't be reached: {why}",
                service="kubernetes",
                address=self.url,
            ) from None

    def _refused(self, error: urllib.error.HTTPError) -> BadInput | ServiceUnreachable:
        try:
            said = str(json.load(error)["message"])
        except (OSError, ValueError, KeyError, TypeError):
            said = str(error.reason)
        said = " ".join(said.split())
        if error.code in _WRONG_REQUEST:
            return BadInput(f"kubernetes: {said}", status=error.code)
        return ServiceUnreachable(
            f"kubernetes: its API at {self.url} answers {error.code}: {said}",
            service="kubernetes",
            address=self.url,
            status=error.code,
        )
