"""Hosts that a Kubernetes cluster gives: one batch/v1 Job each, whose pod connects back.

`kubernetes_engine` is the launcher's side; for each host it starts `relay`, a process that makes
the Job (`manifests`, `cluster_api`), accepts the pod that knows its token, and relays. `dial_back`
runs in the pod. `frames` carries the bytes of both. Untested on a cluster.
"""
