"""Manifests: Kubernetes' own schemas for its kinds, published fields for the others, and the rendering of overlays."""

from __future__ import annotations

import copy
import json
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from inferplane.serving.configure import resolve
from tests.deploy.schemas import COMPOSE, KINDS
from tests.deploy.tools import DEPLOY, find_program, need_module

KUBERNETES = DEPLOY / "kubernetes"
VERSIONS = ("1.31", "1.37")
"""The oldest and the newest version that manifests are held against."""
OVERLAYS = sorted(path.name for path in KUBERNETES.glob("overlays/*"))
FILES = sorted(path for folder in (KUBERNETES, DEPLOY / "kserve") for path in folder.rglob("*.yaml"))
Manifest = dict[str, Any]


def read(path: Path) -> Manifest:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def validate(manifest: Manifest) -> None:
    """Hold a manifest against its schema; raises what is wrong."""
    if manifest["kind"] in KINDS:
        jsonschema.validate(manifest, KINDS[manifest["kind"]])
        return
    need_module("kubernetes_validate")
    import kubernetes_validate

    for version in VERSIONS:
        kubernetes_validate.validate(manifest, version, strict=True)


def changed(manifest: Manifest, path: str, value: Any) -> Manifest:
    """A copy with another value at a path (a/b/0/c)."""
    new = copy.deepcopy(manifest)
    apply(new, {"op": "add", "path": f"/{path}", "value": value})
    return new


def apply(manifest: Any, step: Manifest) -> None:
    """One step of a JSON patch (RFC 6902), in place."""
    *parts, last = [part.replace("~1", "/") for part in step["path"].split("/")[1:]]
    for part in parts:
        manifest = manifest[int(part) if isinstance(manifest, list) else part]
    if step["op"] == "remove":
        del manifest[last]
    else:
        assert step["op"] == "add" or last in manifest, f"nothing to replace at {step['path']}"
        manifest[last] = step["value"]


def collect(folder: Path) -> list[Manifest]:
    """The resources of a kustomization and of what it names, patched."""
    described = read(folder / "kustomization.yaml")
    found: list[Manifest] = []
    for name in described.get("resources", []):
        found += collect(folder / name) if (folder / name).is_dir() else [read(folder / name)]
    for step in described.get("patches", []):
        target = step["target"]
        hit = [m for m in found if (m["kind"], m["metadata"]["name"]) == (target["kind"], target["name"])]
        assert len(hit) == 1, f"{folder.name}: {target} is {len(hit)} resources"
        for part in yaml.safe_load(step["patch"]):
            apply(hit[0], part)
    deployed = [manifest for manifest in found if manifest["kind"] == "Deployment"]
    containers = [one for manifest in deployed for one in manifest["spec"]["template"]["spec"]["containers"]]
    for image in described.get("images", []):
        for container in containers:
            if container["image"] == image["name"]:
                container["image"] = f"{image['name']}:{image['newTag']}"
    return found


@cache
def base() -> dict[str, Manifest]:
    return {manifest["kind"]: manifest for manifest in collect(KUBERNETES / "base")}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(DEPLOY)))
def test_each_file_has_the_form_of_its_kind(path):
    validate(read(path))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_each_overlay_has_the_form_of_its_kinds(overlay):
    found = collect(KUBERNETES / "overlays" / overlay)
    own = [manifest for manifest in found if manifest != base()[manifest["kind"]]]
    assert [manifest["kind"] for manifest in own] == ["Deployment"]
    validate(own[0])


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kustomize_renders_the_same(overlay):
    folder = KUBERNETES / "overlays" / overlay
    command = [find_program("kubectl", in_lint=False), "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rendered = list(yaml.safe_load_all(done.stdout))
    for manifest in rendered:
        manifest["metadata"].pop("labels")
    by_kind = sorted(collect(folder), key=lambda manifest: manifest["kind"])
    assert sorted(rendered, key=lambda manifest: manifest["kind"]) == by_kind


def test_kustomize_renders_the_components(tmp_path):
    folder = KUBERNETES / "overlays" / "cpu"
    components = ["../components/monitoring", "../components/autoscaling"]
    described = {**read(folder / "kustomization.yaml"), "components": components, "resources": ["../base"]}
    (tmp_path / "overlay").mkdir()
    (tmp_path / "overlay" / "kustomization.yaml").write_text(yaml.safe_dump(described))
    for name in ("base", "components"):
        (tmp_path / name).symlink_to(KUBERNETES / name)
    command = [find_program("kubectl", in_lint=False), "kustomize", str(tmp_path / "overlay")]
    done = subprocess.run([*command, "--load-restrictor", "LoadRestrictionsNone"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = {manifest["kind"]: manifest for manifest in yaml.safe_load_all(done.stdout)}
    assert {"ServiceMonitor", "HorizontalPodAutoscaler"} <= set(found)
    assert "replicas" not in found["Deployment"]["spec"]
    assert found["PersistentVolumeClaim"]["spec"]["accessModes"] == ["ReadWriteMany"]
    for manifest in found.values():
        validate(manifest)


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("Deployment", "spec/template/spec/containers/0/readinesProbe", {}),
        ("Deployment", "spec/template/spec/containers/0/ports/0/containerPort", "8000x"),
        ("Deployment", "spec/template/spec/securityContext/runAsNonRoot", "yes"),
        ("NetworkPolicy", "spec/policyType", ["Ingress"]),
        ("PodDisruptionBudget", "spec/selectors", {}),
    ],
)
def test_faults_in_core_kinds_are_found(kind, path, value):
    need_module("kubernetes_validate")
    import kubernetes_validate

    with pytest.raises(kubernetes_validate.ValidationError):
        validate(changed(base()[kind], path, value))


@pytest.mark.parametrize(
    ("file", "path", "value"),
    [
        ("kserve/serving-runtime.yaml", "spec/multimodel", True),
        ("kserve/serving-runtime.yaml", "spec/supportedModelFormats/0/prio", 1),
        ("kserve/serving-runtime.yaml", "spec/containers", []),
        ("kserve/inference-service.yaml", "spec/predictor/model/runtime", 7),
        ("kserve/inference-service.yaml", "apiVersion", "serving.kserve.io/v1"),
        ("kubernetes/components/monitoring/service-monitor.yaml", "spec/endpoints/0/interval", "15"),
        ("kubernetes/components/monitoring/service-monitor.yaml", "spec/endpoints/0/ports", "metrics"),
        ("kubernetes/overlays/npu/kustomization.yaml", "patches/0/target/kinds", "Deployment"),
    ],
)
def test_faults_in_other_kinds_are_found(file, path, value):
    manifest = read(DEPLOY / file)
    validate(manifest)
    with pytest.raises(jsonschema.ValidationError):
        validate(changed(manifest, path, value))


def test_containers_of_kserve_are_those_of_kubernetes():
    spec = read(DEPLOY / "kserve" / "serving-runtime.yaml")["spec"]
    pod = {"containers": spec["containers"], "volumes": spec["volumes"]}
    validate({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "runtime"}, "spec": pod})


def test_compose_has_the_form_of_its_schema():
    compose = read(DEPLOY / "compose.yaml")
    jsonschema.validate(compose, COMPOSE)
    for path, value in (("services/server-cpu/port", []), ("services/server-gpu/restart", "sometimes")):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(changed(compose, path, value), COMPOSE)


def test_names_of_the_manifests_meet():
    kinds = base()
    pod = kinds["Deployment"]["spec"]["template"]
    container = pod["spec"]["containers"][0]
    selected = kinds["Deployment"]["spec"]["selector"]["matchLabels"]
    assert selected.items() <= pod["metadata"]["labels"].items()
    assert kinds["Service"]["spec"]["selector"] == selected
    assert kinds["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == selected
    assert kinds["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == selected
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert {port["targetPort"] for port in kinds["Service"]["spec"]["ports"]} <= set(ports)
    opened = {port["port"] for rule in kinds["NetworkPolicy"]["spec"]["ingress"] for port in rule["ports"]}
    assert opened <= set(ports)
    monitor = read(KUBERNETES / "components" / "monitoring" / "service-monitor.yaml")["spec"]
    assert monitor["selector"]["matchLabels"] == selected
    assert monitor["endpoints"][0]["port"] in {port["name"] for port in kinds["Service"]["spec"]["ports"]}
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
    claim = volumes["cache"]["persistentVolumeClaim"]["claimName"]
    assert claim == kinds["PersistentVolumeClaim"]["metadata"]["name"]
    assert volumes["config"]["configMap"]["name"] == kinds["ConfigMap"]["metadata"]["name"]
    secret = read(KUBERNETES / "secret.example.yaml")
    refs = [entry["valueFrom"]["secretKeyRef"] for entry in container["env"] if "valueFrom" in entry]
    refs.append(monitor["endpoints"][0]["authorization"]["credentials"])
    assert all(ref["name"] == secret["metadata"]["name"] and ref["key"] in secret["stringData"] for ref in refs)
    scaler = read(KUBERNETES / "components" / "autoscaling" / "autoscaler.yaml")["spec"]
    assert scaler["scaleTargetRef"]["name"] == kinds["Deployment"]["metadata"]["name"]
    metric = scaler["metrics"][0]["pods"]["metric"]["name"]
    board = (DEPLOY / "grafana" / "inferplane.json").read_text()
    assert metric.replace("inferplane_", "inferplane:", 1) in json.dumps(board)


def test_the_server_s_settings_are_settings(tmp_path):
    deployment = base()["Deployment"]["spec"]["template"]["spec"]
    container = deployment["containers"][0]
    path = tmp_path / "inferplane.yaml"
    path.write_text(base()["ConfigMap"]["data"]["inferplane.yaml"])
    settings = resolve({}, {}, str(path)).settings
    assert deployment["terminationGracePeriodSeconds"] > settings.drain_s + 5
    variables = {entry["name"]: entry.get("value", "x") for entry in container["env"]}
    assert variables.pop("INFERPLANE_CONFIG").rpartition("/") == ("/etc/inferplane", "/", path.name)
    variables.pop("HF_TOKEN")
    assert resolve({}, variables).notes == ()
    assert deployment["enableServiceLinks"] is False and deployment["automountServiceAccountToken"] is False


def test_a_pod_drops_its_rights():
    deployment = base()["Deployment"]["spec"]["template"]["spec"]
    container = deployment["containers"][0]
    assert deployment["securityContext"]["runAsNonRoot"] and deployment["securityContext"]["runAsUser"] == 10001
    assert deployment["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    rights = container["securityContext"]
    assert not rights["allowPrivilegeEscalation"] and rights["readOnlyRootFilesystem"]
    assert rights["capabilities"] == {"drop": ["ALL"]}
    written = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
    assert written == {"/cache", "/tmp"}


def test_overlays_are_those_of_the_dockerfile():
    from tests.deploy.test_dockerfile import BASES

    assert set(OVERLAYS) == BASES
    for overlay in OVERLAYS:
        container = next(m for m in collect(KUBERNETES / "overlays" / overlay) if m["kind"] == "Deployment")
        container = container["spec"]["template"]["spec"]["containers"][0]
        assert container["image"] == f"inferplane:{overlay}"
        vendors = [name for name in container["resources"]["limits"] if "/" in name]
        assert len(vendors) == (overlay != "cpu")
