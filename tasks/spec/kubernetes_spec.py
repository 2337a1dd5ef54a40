"""`kubernetes` in a pool file: the cluster that gives the pool's hosts, one Job for each."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from trainwright.tasks.spec.documents import Document, Duration, matching


def _name(description: str, default: str | None = None) -> Any:
    return matching(
        r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$",
        "1 to 63 lower-case letters, digits and -, not beginning or ending with -",
        default=default,
        description=description,
    )


class Kubernetes(Document):
    """How hosts are asked for in a cluster. A host is a pod whose agent connects to the launcher.

    Ranks in pods and the launcher connect to each other on any port.
    """

    namespace: str = _name("namespace of the Jobs and their Secrets", "trainwright")
    image: str = matching(
        r"^[A-Za-z0-9][A-Za-z0-9._/:@-]{0,511}$",
        "an image that the nodes can pull, such as registry.example/trainwright-train:1",
        description="image with trainwright, which nodes can pull",
    )
    service_account: str | None = _name(
        "service account of the pods, which get none of its tokens; default: the namespace's own"
    )
    image_pull_secret: str | None = _name("Secret with which nodes pull the image")
    priority_class: str | None = _name("priority class of the pods")
    grace: Duration = Field(
        default=30.0,
        le=86400,
        description="time for a last checkpoint when a pod is evicted or preempted",
    )
    node_selector: dict[str, str] = Field(
        default_factory=dict,
        description="labels of the nodes: {kubernetes.io/arch: amd64}; a host may add its own",
    )
    api: str | None = matching(
        r"^http://(127\.0\.0\.1|localhost):[0-9]{1,5}$",
        "the address of a `kubectl proxy` on this machine, such as http://127.0.0.1:8001",
        default=None,
        description="`kubectl proxy` on this machine; default: the cluster in which this pod runs",
    )
    address: str | None = matching(
        r"^[A-Za-z0-9.:_][A-Za-z0-9.:_-]{0,252}$",
        "a host name or IP address of 1 to 253 letters, digits and . : _ -, without user@ "
        "and not beginning with -",
        default=None,
        description="address at which pods reach this machine; default: that of the route to the "
        "cluster's API; needed with `api`",
    )

    @model_validator(mode="after")
    def _reachable(self) -> Kubernetes:
        if self.api is not None and self.address is None:
            raise ValueError(
                "address with `api`, at which pods reach this machine: the route to the proxy is "
                "one inside this machine"
            )
        return self
