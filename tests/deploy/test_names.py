"""What is shipped for deploying names options, ports, probes and metrics that exist, and drops rights."""

from __future__ import annotations

import json
import re

import yaml

from inferplane.cli.main import verb_parser
from inferplane.engine.loop.metrics import Metrics
from inferplane.serving.configure import resolve
from tests.deploy.tools import DEPLOY

OPTIONS = {word for action in verb_parser("serve")[0]._actions for word in action.option_strings}
HEALTH = {"/health", "/v2/health/live", "/v2/health/ready"}
SERVERS_OWN = {"ready", "requests_rejected_total", "requests_aborted_total"}
ENGINES = {
    *("generation_tokens_total", "prompt_tokens_total", "spec_decode_num_accepted_tokens_total"),
    *("spec_decode_num_draft_tokens_total", "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
    *("num_preemptions_total", "prefix_cache_queries_total", "prefix_cache_hits_total", "request_success_total"),
}


def options_in(words: list[str]) -> set[str]:
    return {word for word in words if word.startswith("--")}


def test_compose():
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    servers = [services["server-cpu"], services["server-gpu"]]
    for server in servers:
        assert options_in(server["command"]) <= OPTIONS
        assert server["read_only"] and server["cap_drop"] == ["ALL"]
        assert server["networks"]["default"]["aliases"] == ["inferplane"]
        assert (DEPLOY / server["build"]["context"] / server["build"]["dockerfile"]).is_file()
        settings = {name: "8" for name in server["environment"] if name.startswith("INFERPLANE_")}
        assert resolve({}, settings).notes == ()
    arguments = servers[1]["build"]["args"]
    assert all(f"ARG {name}" in (DEPLOY / "Dockerfile").read_text() for name in arguments)
    assert all(port.startswith("127.0.0.1:") for s in services.values() for port in s.get("ports", ()))
    mounted = [v.split(":")[0] for s in services.values() for v in s.get("volumes", ()) if v.startswith("./")]
    assert mounted and all((DEPLOY / path).exists() for path in mounted)
    scraped = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"][0]
    assert scraped["static_configs"] == [{"targets": ["inferplane:8002"]}]


def test_kserve():
    runtime = yaml.safe_load((DEPLOY / "kserve" / "serving-runtime.yaml").read_text())
    service = yaml.safe_load((DEPLOY / "kserve" / "inference-service.yaml").read_text())
    assert (runtime["kind"], service["kind"]) == ("ServingRuntime", "InferenceService")
    model = service["spec"]["predictor"]["model"]
    assert model["runtime"] == runtime["metadata"]["name"]
    assert model["modelFormat"]["name"] in [f["name"] for f in runtime["spec"]["supportedModelFormats"]]
    container = runtime["spec"]["containers"][0]
    assert container["name"] == "kserve-container"  # the name that KServe fills in
    assert options_in(container["args"]) <= OPTIONS
    ports = {p["containerPort"] for p in container["ports"]}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        get = container[probe]["httpGet"]
        assert get["path"] in HEALTH and get["port"] in ports
    drain = int(container["args"][container["args"].index("--drain-s") + 1])
    assert service["spec"]["predictor"]["terminationGracePeriodSeconds"] > drain
    assert container["securityContext"]["runAsNonRoot"]


def test_dashboard():
    board = json.loads((DEPLOY / "grafana" / "inferplane.json").read_text())
    shown = {name for p in board["panels"] for t in p["targets"] for name in re.findall(r"inferplane:(\w+)", t["expr"])}
    histograms = {f"{name}_bucket" for name in Metrics().histograms}
    assert shown <= SERVERS_OWN | ENGINES | histograms, shown - SERVERS_OWN - ENGINES - histograms
    assert len({p["id"] for p in board["panels"]}) == len(board["panels"])
    cells = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in board["panels"]]
    assert len(set(cells)) == len(cells)
    assert all(p["gridPos"]["x"] + p["gridPos"]["w"] <= 24 for p in board["panels"])
