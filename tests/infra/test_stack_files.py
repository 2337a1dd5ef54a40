"""The whole stack's files: compose and Kubernetes, against the official schemas and each other."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jsonschema
import kubernetes_validate
import pytest
import yaml
from cryptography.fernet import Fernet

from trainwright.infra.stack_secrets import stack_secrets
from trainwright.tasks.service.auth import checked
from trainwright.tasks.spec.documents import parse_text, validated
from trainwright.tasks.spec.kubernetes_spec import Kubernetes
from trainwright.tasks.spec.pool import Host, Pool
from trainwright.tasks.train.hosts.host_engine import HostRequest
from trainwright.tasks.train.hosts.kubernetes import manifests

ROOT = Path(__file__).parents[2]
STACK = ROOT / "infra" / "stack"
KUBERNETES = ("1.32", "1.37")
KUBEFLOW = Path(__file__).parent / "kubeflow_trainer_schema.json"
COMPOSE = yaml.safe_load((STACK / "compose.yaml").read_text())
KUSTOMIZATION = yaml.safe_load((STACK / "kustomization.yaml").read_text())
COMPOSE_INIT = {name: one.get("init") for name, one in COMPOSE["services"].items()}
SETTINGS = dict(
    line.split("=", 1)
    for line in (STACK / "settings.env").read_text().splitlines()
    if not line.startswith("#")
)
DOCUMENTS = [
    document
    for name in KUSTOMIZATION["resources"]
    for document in yaml.safe_load_all((STACK / name).read_text())
]


def _containers() -> Iterator[tuple[str, dict[str, Any]]]:
    """Each container that keeps running, with the name of its workload."""
    for one in DOCUMENTS:
        for container in _pod(one).get("containers", ()):
            yield one["metadata"]["name"], container


def _pod(document: dict[str, Any]) -> dict[str, Any]:
    return dict(document.get("spec", {}).get("template", {}).get("spec", {}))


def _compose_errors(path: Path) -> subprocess.CompletedProcess[str]:
    words = ["--builtin-schema", "vendor.compose-spec", str(path)]
    return subprocess.run(
        [sys.executable, "-m", "check_jsonschema", *words],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"NO_COLOR": "1"},
    )


def test_the_compose_file_meets_the_compose_specification(tmp_path: Path) -> None:
    found = _compose_errors(STACK / "compose.yaml")
    assert found.returncode == 0, found.stdout
    wrong = {**COMPOSE, "services": {**COMPOSE["services"], "s3": {"imagee": "x"}}}
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump(wrong))
    assert _compose_errors(tmp_path / "wrong.yaml").returncode == 1


@pytest.mark.parametrize("version", KUBERNETES)
def test_the_manifests_meet_the_schemas_of_kubernetes_strictly(version: str) -> None:
    for document in DOCUMENTS:
        kubernetes_validate.validate(document, version, strict=True)
    wrong = {**DOCUMENTS[0], "speck": {}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, version, strict=True)


def test_the_kustomization_names_every_manifest_and_generates_what_they_refer_to() -> None:
    files = {path.relative_to(STACK).as_posix() for path in STACK.glob("kubernetes/*.yaml")}
    assert set(KUSTOMIZATION["resources"]) == files
    generated = {
        kind: {one["name"] for one in KUSTOMIZATION[f"{kind}Generator"]}
        for kind in ("configMap", "secret")
    }
    used: dict[str, set[str]] = {"configMap": set(), "secret": set()}
    for document in DOCUMENTS:
        pod = _pod(document)
        for container in [*pod.get("containers", ()), *pod.get("initContainers", ())]:
            for one in container.get("envFrom", ()):
                ((kind, reference),) = one.items()
                used[kind.removesuffix("Ref")].add(reference["name"])
        for volume in pod.get("volumes", ()):
            used["configMap"].add(volume["configMap"]["name"])
    assert used == generated
    named = {f"secrets/{name}.env" for name in stack_secrets()}
    for one in KUSTOMIZATION["configMapGenerator"]:
        assert all(
            (STACK / name).exists() for name in [*one.get("envs", ()), *one.get("files", ())]
        )
    assert {name for one in KUSTOMIZATION["secretGenerator"] for name in one["envs"]} == named


def test_compose_and_kubernetes_run_the_same_commands_in_the_same_images() -> None:
    services = {name: one for name, one in COMPOSE["services"].items() if name != "airflow-migrate"}
    running = dict(_containers())
    assert set(running) == set(services)
    for name, one in services.items():
        words = [word.replace("$$", "$") for word in one.get("command", ())]
        assert running[name].get("command", []) == words, name
        image = re.sub(r"^\$\{STACK_IMAGE:-(.+)\}$", r"\1", one["image"])
        assert running[name]["image"] == image
        files = [Path(file).stem for file in one["env_file"]]
        references = [next(iter(each.values()))["name"] for each in running[name]["envFrom"]]
        assert references == files, name


def _examples(*names: str) -> dict[str, dict[str, Any]]:
    """Documents of examples, by kind."""
    texts = [(STACK / name).read_text() for name in names]
    return {one["kind"]: one for text in texts for one in yaml.safe_load_all(text)}


@pytest.mark.parametrize("version", KUBERNETES)
def test_the_example_of_a_training_refers_to_what_the_stack_has(version: str) -> None:
    example = yaml.safe_load((STACK / "examples" / "training.yaml").read_text())
    kubernetes_validate.validate(example, version, strict=True)
    assert example["metadata"]["namespace"] == KUSTOMIZATION["namespace"]
    assert KUSTOMIZATION["generatorOptions"] == {"disableNameSuffixHash": True}
    (container,) = _pod(example)["containers"]
    worker = dict(_containers())["airflow-worker"]
    assert all(one in worker["envFrom"] for one in container["envFrom"])
    command, step, job = container["command"]
    assert (command, step) == ("trainwright", "train")
    shipped = job.removeprefix(SETTINGS["AIRFLOW__CORE__DAGS_FOLDER"])
    assert (ROOT / "dags" / shipped.removeprefix("/")).is_file()


@pytest.mark.parametrize("version", KUBERNETES)
def test_the_example_of_a_training_on_several_pods_has_what_its_launcher_needs(
    version: str,
) -> None:
    found = _examples("launcher/launcher.yaml", "examples/training-hosts.yaml")
    for document in found.values():
        kubernetes_validate.validate(document, version, strict=True)
        assert document["metadata"]["namespace"] == KUSTOMIZATION["namespace"]
    name = found["ServiceAccount"]["metadata"]["name"]
    assert found["RoleBinding"]["roleRef"]["name"] == found["Role"]["metadata"]["name"]
    assert found["RoleBinding"]["subjects"][0]["name"] == name
    assert _pod(found["Job"])["serviceAccountName"] == name
    (admitted,) = found["NetworkPolicy"]["spec"]["podSelector"]["matchExpressions"]
    asked = Host.model_validate({"name": "h", "address": "h", "devices": [{"type": "cpu"}]})
    request = HostRequest(asked, (), "python")
    host = manifests.job("h", request, Kubernetes(image="a"), [])
    workloads = [
        found["Job"],
        host,
        *(one for one in DOCUMENTS if "worker" in str(one["metadata"])),
    ]
    names = {one["metadata"]["labels"]["app.kubernetes.io/name"] for one in workloads}
    assert names == set(admitted["values"])
    (written,) = found["ConfigMap"]["data"].values()
    pool = validated(Pool, parse_text(written, ""), "pool")
    assert pool.kubernetes is not None
    assert pool.kubernetes.namespace == KUSTOMIZATION["namespace"]


def test_the_component_gives_the_worker_the_rights_of_a_launcher() -> None:
    component = yaml.safe_load((STACK / "launcher" / "kustomization.yaml").read_text())
    assert component["kind"] == "Component"
    assert component["resources"] == ["launcher.yaml"]
    (patch,) = [_examples(f"launcher/{one['path']}") for one in component["patches"]]
    ((kind, found),) = patch.items()
    (worker,) = [
        one
        for one in DOCUMENTS
        if (one["kind"], one["metadata"]["name"]) == (kind, found["metadata"]["name"])
    ]
    launcher, pod = _pod(_examples("examples/training-hosts.yaml")["Job"]), _pod(found)
    assert pod["serviceAccountName"] == launcher["serviceAccountName"]
    assert pod["automountServiceAccountToken"]
    (container,) = pod["containers"]
    assert container["name"] in [one["name"] for one in _pod(worker)["containers"]]
    assert container["volumeMounts"][0] in launcher["containers"][0]["volumeMounts"]
    assert pod["volumes"][0] in launcher["volumes"]


def test_the_example_for_kubeflow_has_the_launcher_of_the_one_without_it() -> None:
    found, schemas = _examples("examples/training-kubeflow.yaml"), json.loads(KUBEFLOW.read_text())
    runtime, job = found["TrainingRuntime"], found["TrainJob"]
    for document in (runtime, job):
        jsonschema.validate(document, schemas[document["kind"]])
        wrong = {**document, "spec": {**document["spec"], "nodes": 1}}
        with pytest.raises(jsonschema.ValidationError, match="nodes"):
            jsonschema.validate(wrong, schemas[document["kind"]])
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    of_node = {"apiVersion": "batch/v1", "kind": "Job", **node["template"]}
    kubernetes_validate.validate(of_node, KUBERNETES[-1], strict=True)
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    plain = _pod(_examples("examples/training-hosts.yaml")["Job"])
    (container,) = plain["containers"]
    assert container.pop("command") == job["spec"]["trainer"]["command"]
    assert _pod(node["template"]) == plain | {"containers": [container | {"name": node["name"]}]}


def test_images_are_built_by_make_images_or_are_official_ones_with_a_version() -> None:
    roles = {path.stem for path in (ROOT / "infra" / "images").glob("*.Containerfile")}
    for _, container in _containers():
        image = container["image"]
        if not re.fullmatch(r"docker\.io/library/(postgres|redis):\d+", image):
            assert image.removeprefix("trainwright-") in roles
            assert image in [one["name"] for one in KUSTOMIZATION["images"]]


def test_every_pod_runs_without_root_rights_and_without_a_token_of_the_cluster() -> None:
    for document in filter(_pod, DOCUMENTS):
        pod = _pod(document)
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["automountServiceAccountToken"] is False
        for container in [*pod["containers"], *pod.get("initContainers", ())]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["limits"]["memory"]


def test_parts_that_hang_are_started_again_and_orphaned_processes_are_reaped() -> None:
    for document in filter(_pod, DOCUMENTS):
        name, pod = document["metadata"]["name"], _pod(document)
        (container,) = pod["containers"]
        assert ("livenessProbe" in container) == (name != "airflow-worker")
        ports = [one["containerPort"] for one in container.get("ports", ())]
        if name == "airflow-scheduler":
            assert SETTINGS["AIRFLOW__SCHEDULER__ENABLE_HEALTH_CHECK"] == "True"
            ports = [8974]
        for kind in ("readinessProbe", "startupProbe", "livenessProbe"):
            asked = container.get(kind, {}).get("httpGet")
            assert asked is None or asked["port"] in ports
        own = container["image"].startswith("trainwright")
        assert own == pod.get("shareProcessNamespace", False) == bool(COMPOSE_INIT.get(name))


def test_services_select_a_workload_and_settings_name_services() -> None:
    workloads = {one["metadata"]["name"]: one for one in filter(_pod, DOCUMENTS)}
    services = [one for one in DOCUMENTS if one["kind"] == "Service"]
    ports = {name: container["ports"] for name, container in _containers() if "ports" in container}
    for one in services:
        name = one["spec"]["selector"]["app.kubernetes.io/name"]
        labels = workloads[name]["spec"]["template"]["metadata"]["labels"]
        assert labels == one["spec"]["selector"]
        assert [each["targetPort"] for each in one["spec"]["ports"]] == [
            each["containerPort"] for each in ports[name]
        ]
    addresses = {
        (urlsplit(value).hostname, urlsplit(value).port)
        for variables in [SETTINGS, *stack_secrets().values()]
        for value in variables.values()
        if "://" in value and not value.startswith("s3:")
    }
    known = {
        (one["metadata"]["name"], port["port"]) for one in services for port in one["spec"]["ports"]
    }
    assert addresses <= known
    assert {host for host, _ in addresses} == {"postgres", "redis", "s3", "airflow-api"}


def test_no_secret_is_in_the_files() -> None:
    secret = {name for variables in stack_secrets().values() for name in variables}
    assert not secret & set(SETTINGS)
    for one in COMPOSE["services"].values():
        assert not secret & set(one.get("environment", {}))
    for _, container in _containers():
        assert not secret & {each["name"] for each in container.get("env", ())}


def _write(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", str(ROOT / "infra" / "stack_secrets.py"), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_secrets_are_usable_and_only_the_user_reads_them(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    assert _write(folder).returncode == 0
    assert folder.stat().st_mode & 0o777 == 0o700
    found: dict[str, dict[str, str]] = {}
    for path in folder.iterdir():
        assert path.stat().st_mode & 0o777 == 0o600
        lines = path.read_text().splitlines()
        found[path.stem] = dict(line.split("=", 1) for line in lines)
    assert {name: set(one) for name, one in found.items()} == {
        name: set(one) for name, one in stack_secrets().items()
    }
    Fernet(found["airflow"]["AIRFLOW__CORE__FERNET_KEY"])
    for name, token in found["service"].items():
        checked(token, name)
    assert found["s3"]["AWS_SECRET_ACCESS_KEY"] == found["store"]["TRAINWRIGHT_S3_SECRET_KEY"]
    for url in (
        found["store"]["TRAINWRIGHT_LEDGER"],
        found["airflow"]["AIRFLOW__DATABASE__SQL_ALCHEMY_CONN"],
    ):
        assert urlsplit(url).password == found["postgres"]["POSTGRES_PASSWORD"]
    assert (
        urlsplit(found["airflow"]["AIRFLOW__CELERY__BROKER_URL"]).password
        == (found["redis"]["REDIS_PASSWORD"])
    )
    assert json.loads(f'"{found["airflow"]["AIRFLOW_ADMIN_PASSWORD"]}"')


def test_secrets_that_exist_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    _write(folder)
    before = (folder / "redis.env").read_text()
    again = _write(folder)
    assert again.returncode == 2
    assert again.stderr == f"{folder}: exists, and is kept; remove it for other secrets\n"
    assert (folder / "redis.env").read_text() == before
    (tmp_path / "file").write_text("")
    assert _write(tmp_path / "file" / "secrets").returncode == 2
    assert _write(Path("--help")).returncode == 2
