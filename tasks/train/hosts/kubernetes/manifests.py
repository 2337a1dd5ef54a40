"""The Job and the Secret of one host, as values. Pure."""

from __future__ import annotations

import base64
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from trainwright.tasks.spec.kubernetes_spec import Kubernetes
from trainwright.tasks.train.hosts.host_engine import HostRequest
from trainwright.tasks.train.hosts.kubernetes.dial_back import (
    ADDRESS_FILE,
    CERTIFICATE_FILE,
    TOKEN_FILE,
)
from trainwright.tasks.train.hosts.versions import IMAGE

SECRET_FOLDER = "/run/trainwright"
_USER = 10001
_KEEP_S = 60
"""A Job that has ended, and whose launcher was killed, is removed after so long."""
_GPUS = {"nvidia": "nvidia.com/gpu", "amd": "amd.com/gpu"}
ApiObject = dict[str, Any]


def job(name: str, asked: HostRequest, cluster: Kubernetes, words: Sequence[str]) -> ApiObject:
    """The batch/v1 Job of a host: one pod, which is not tried again."""
    labels = {"app.kubernetes.io/name": "trainwright-host", "trainwright/host": asked.host.name}
    metadata = {"name": name, "namespace": cluster.namespace, "labels": labels}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {
            "backoffLimit": 0,
            "ttlSecondsAfterFinished": _KEEP_S,
            "template": {
                "metadata": {"labels": labels},
                "spec": _pod(name, asked, cluster, words),
            },
        },
    }


def _pod(name: str, asked: HostRequest, cluster: Kubernetes, words: Sequence[str]) -> ApiObject:
    given: ApiObject = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": math.ceil(cluster.grace),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        # then the first process is one that reaps what ranks leave behind
        "shareProcessNamespace": True,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [
            {
                "name": "host",
                "image": cluster.image,
                "command": [*words],
                "resources": resources(asked),
                # its last words tell the launcher why it ended
                "terminationMessagePolicy": "FallbackToLogsOnError",
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "capabilities": {"drop": ["ALL"]},
                },
                "volumeMounts": [
                    {"name": "launcher", "mountPath": SECRET_FOLDER, "readOnly": True},
                    # processes of one pod share memory here (NCCL); the default is 64 MiB
                    {"name": "memory", "mountPath": "/dev/shm"},
                ],
            }
        ],
        "volumes": [
            # A pod whose launcher died before it made the Secret starts without, and ends.
            {
                "name": "launcher",
                "secret": {"secretName": name, "defaultMode": 0o440, "optional": True},
            },
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    if "@sha256:" in cluster.image:  # then all hosts run the same files
        given["containers"][0]["env"] = [{"name": IMAGE, "value": cluster.image}]
    if selected := {**cluster.node_selector, **asked.host.node_selector}:
        given["nodeSelector"] = selected
    if cluster.service_account is not None:
        given["serviceAccountName"] = cluster.service_account
    if cluster.image_pull_secret is not None:
        given["imagePullSecrets"] = [{"name": cluster.image_pull_secret}]
    if cluster.priority_class is not None:
        given["priorityClassName"] = cluster.priority_class
    return given


def resources(asked: HostRequest) -> ApiObject:
    """CPUs, memory and GPUs of the devices that the launch uses; a limit equals its request.

    A GPU's process gets a CPU too. Memory is the host's `memory`; without it the pod has no limit.
    """
    gpus = Counter(
        resource
        for device in asked.devices
        for prefix, resource in _GPUS.items()
        if device.type.startswith(prefix)
    )
    cores = math.fsum(device.cores or 1.0 for device in asked.devices)
    found = {"cpu": f"{math.ceil(cores * 1000)}m"}
    if asked.host.memory is not None:
        found["memory"] = str(int(asked.host.memory))
    found |= {resource: str(count) for resource, count in gpus.items()}
    return {"requests": found, "limits": found}


def secret(job: ApiObject, cluster: Kubernetes, files: Mapping[str, bytes]) -> ApiObject:
    """The Secret that the Job's pod reads; the cluster removes it with the Job."""
    name = job["metadata"]["name"]
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "immutable": True,
        "metadata": {
            "name": name,
            "namespace": cluster.namespace,
            "ownerReferences": [reference("batch/v1", "Job", job)],
        },
        "data": {one: base64.b64encode(data).decode() for one, data in files.items()},
    }


def secret_files(address: str, port: int, token: str, certificate: bytes) -> dict[str, bytes]:
    """What `dial_back` reads."""
    return {
        ADDRESS_FILE: json.dumps({"address": address, "port": port}).encode(),
        TOKEN_FILE: token.encode(),
        CERTIFICATE_FILE: certificate,
    }


def reference(version: str, kind: str, owner: ApiObject) -> ApiObject:
    """The reference to an owner, with which the cluster removes what it owns."""
    return {
        "apiVersion": version,
        "kind": kind,
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
    }
