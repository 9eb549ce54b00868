"""The status page: what it says, what it may load, and how it looks in a browser."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import inferplane
from inferplane.serving.page import FILES, summarize_plan
from tests.house.rules import REPOSITORY
from tests.serving.browser import look
from tests.serving.live import Live

MARK = (0x24, 0x57, 0xC5)
"""Colour of the plots' lines, in light."""


def test_nothing_comes_from_outside(server):
    with server.client() as client:
        for path, (_, kind) in FILES.items():
            answer = client.get(path).raise_for_status()
            assert answer.headers["content-type"].startswith(kind)
            assert "default-src 'none'" in answer.headers["content-security-policy"]
            assert not re.search(r"(?:src|href)=\"(?!/)|https?://(?!www\.w3\.org/2000/svg)|@import", answer.text)
        data = client.get("/status/data").json()
        assert data["server"]["ready"] and data["info"]["device"] == "cpu" and "folder" not in data["info"]
        kernels = client.get("/status/kernels").json()
        assert kernels["device"] == "cpu" and {k["op"] for k in kernels["kernels"]} >= {"lm_head", "sample"}


def test_in_a_browser(server, tmp_path):
    with server.client() as client:
        body = {"model": "default", "prompt": "def main():", "max_tokens": 24}
        client.post("/v1/completions", json=body).raise_for_status()
    document, colours = look(f"{server.url}/status", tmp_path)
    assert '<p id="state" role="status" class="state ready">serving</p>' in document
    assert "demo on cpu" in document and "tokens generated" in document and ">lm_head<" in document
    assert colours[MARK] > 20 and len(colours) > 50
    narrow, _ = look(f"{server.url}/status", tmp_path, width=500, height=2000)
    assert ">lm_head<" in narrow


def test_a_browser_sends_the_key_as_its_password(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("right\n")
    with Live("--api-key-file", str(keys)) as live, live.client() as client:
        refused = client.get("/status")
        assert refused.status_code == 401
        assert any(v.startswith("Basic") for v in refused.headers.get_list("www-authenticate"))
        assert client.get("/status", auth=("anybody", "right")).status_code == 200
        assert client.get("/status/data", auth=("anybody", "wrong")).status_code == 401
        assert client.get("/status/data", headers={"authorization": "Basic %%%"}).status_code == 401
        basic = "Basic " + base64.b64encode(b"anybody:right").decode()
        for path in ("/v1/models", "/version", "/status/", "/status/../v1/models"):
            assert client.get(path, headers={"authorization": basic}).status_code == 401
        url = live.url.replace("//", "//anybody:right@")
        document, _ = look(f"{url}/status", tmp_path)
        assert "state ready" in document


def test_kernels_are_counted_over_layers():
    def site(name: str, op: str, kernel: str, kind: str = "decode") -> dict[str, object]:
        return {"site": name, "op": op, "step_kind": kind, "chosen": {"kernel": kernel, "why": "rank 10"}}

    sites = [
        site("layers.0-2.mlp.down", "linear", "torch:linear"),
        site("layers.3.mlp.down", "linear", "torch:linear"),
        site("layers.0-2.mlp", "mlp", "decomposition"),
        site("lm_head", "lm_head", "torch:lm_head"),
        site("lm_head", "lm_head", "torch:lm_head", "mixed"),
    ]
    found = summarize_plan({"device": "cpu", "sites": sites})["kernels"]
    assert [(k["op"], k["sites"]) for k in found] == [("linear", 4), ("lm_head", 1)]


def test_the_dashboard_queries_existing_metrics(server):
    with server.client() as client:
        body = {"model": "default", "prompt": "x", "max_tokens": 2}
        client.post("/v1/completions", json=body).raise_for_status()
        text = client.get("/metrics").text
    board = (REPOSITORY / "deploy" / "grafana" / "inferplane.json").read_text(encoding="utf-8")
    asked = {name for name in re.findall(r"inferplane:(\w+)", board) if not name.startswith("spec_decode")}
    there = set(re.findall(r"^(?:# TYPE )?inferplane:(\w+)", text, re.MULTILINE))
    there |= {f"{name}_total" for name in there}  # counters without a sample yet have their type alone
    assert sorted(asked - there) == []


def test_no_route_tells_where_the_model_lies():
    """Kind of advisory: disclosure of paths."""
    folder = Path(inferplane.__file__).parent / "models" / "demo"
    with Live(str(folder)) as live, live.client() as client:
        for path in ("/status/data", "/status/kernels", "/v1/models", "/metrics", "/openapi.json", "/health"):
            assert str(folder.parent) not in client.get(path).text, path
        found = client.get("/status/data").json()["info"]
        assert found["name"] == "demo" and not {"folder", "tokenizer"} & set(found)
        assert live.stop() == 0
