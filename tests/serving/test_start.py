"""A server that cannot start reports why before anything listens, in the format of its log."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import inferplane
from inferplane.plugins import host
from tests.serving.live import Live

DEMO = Path(inferplane.__file__).parent / "models" / "demo"


def run_serve(*args: str, timeout_s: float = 90) -> subprocess.CompletedProcess:
    device = () if "--device" in args else ("--device", "cpu")
    command = [sys.executable, "-m", "inferplane", "serve", *device, *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


def absent() -> str:
    """A device that has a plugin and is not on this machine."""
    return next(d.name for d in host().devices() if not d.probe.available)


def test_a_port_in_use_is_told_before_anything_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = run_serve("--port", str(taken.getsockname()[1]))
    assert done.returncode == 2
    assert "cannot be had" in done.stderr and "--port" in done.stderr
    assert "listening" not in done.stderr


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (("/no/such/model",), 2, "is no folder"),
        (("--max-model-len", "5000"), 2, "1 to 2048"),
        (("--max-bach", "5"), 2, "perhaps --max-batch was meant"),
        (("--host", "no.such.host.invalid"), 2, "is no address"),
        (("--host", "1.2.3.4"), 2, "choose another --host"),
        (("--tls-cert", __file__), 2, "--tls-cert without --tls-key"),
        (("--api-key-file", "/no/such/file"), 2, "one key a line"),
        (("--otlp-endpoint", "localhost"), 2, "OTLP over HTTP"),
        (("--tls-cert", "/no/such", "--tls-key", "/no/such"), 2, "certificate"),
        (("--tls-cert", __file__, "--tls-key", __file__), 2, "certificate"),
        (("--quantization", "int3"), 2, "weight_only_int8"),
        (("--chat-template", "/no/such.jinja"), 2, "name of a file with a Jinja template"),
        (("--reasoning-parser", "qwen4"), 2, "write 'qwen3'"),
        (("--tool-call-parser", "nothing"), 2, "no form of tool calls named 'nothing'"),
        (("--grpc-port", "7001", "--metrics-port", "7001"), 2, "one port (7001, 7001)"),
        (("--op", "nothing=torch"), 1, "nothing"),
        (("--device", absent()), 1, "is absent"),
    ],
)
def test_a_server_that_cannot_start_says_why(args, code, said):
    done = run_serve("--port", "0", *args)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("error") == 1
    assert "listening" not in done.stderr


def test_the_log_is_json_to_its_last_line(tmp_path):
    (tmp_path / "config.json").write_text((DEMO / "config.json").read_text())
    for args, code in ((("--host", "1.2.3.4"), 2), ((str(tmp_path),), 1)):
        done = run_serve("--port", "0", *args)
        assert done.returncode == code, done.stderr
        lines = [json.loads(line) for line in done.stderr.splitlines()]
        assert (lines[-1]["event"], lines[-1]["level"]) == ("failed", "error")
        assert lines[-1]["what"] and lines[-1]["to_do"]
    done = run_serve("--port", "0", "--host", "1.2.3.4", "--log-format", "text")
    assert done.stderr.startswith("error: ")


@pytest.mark.parametrize("filters", ["", "ignore"])
def test_warnings_are_in_the_log(filters):
    """Also while libraries that are imported meanwhile silence Python's warnings, as some do."""
    with Live("--kv-cache-bytes", "200000", environment={"PYTHONWARNINGS": filters}) as server:
        assert server.stop() == 0
        events = [json.loads(line) for line in server.text.splitlines()]
        assert any(e["level"] == "warning" and "kv_cache_bytes" in e["event"] for e in events), server.text


def test_a_plugin_that_is_left_out_is_reported_in_the_log():
    with Live(environment={"INFERPLANE_PLUGINS": "no_such_module"}) as server:
        assert server.stop() == 0
        events = [json.loads(line) for line in server.text.splitlines()]
        assert any(e["level"] == "warning" and "no_such_module" in e["event"] for e in events), server.text


def test_a_folder_too_long_for_a_socket_is_reported_at_once(tmp_path, monkeypatch):
    deep = tmp_path / ("x" * 130)
    deep.mkdir()
    monkeypatch.setenv("TMPDIR", str(deep))
    done = run_serve("--port", "0")
    assert done.returncode == 2 and "set TMPDIR to a shorter path" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and "listening" not in done.stderr
    assert not list(deep.glob("inferplane-*"))


def test_a_model_without_weights_is_reported_before_the_server_listens(tmp_path):
    (tmp_path / "config.json").write_text((DEMO / "config.json").read_text())
    done = run_serve("--port", "0", str(tmp_path))
    assert done.returncode == 1 and "weights" in done.stderr
    assert "listening" not in done.stderr


def test_a_model_without_tokenizer_is_reported():
    done = run_serve("--port", "0", "demo-draft")
    assert done.returncode == 1, done.stderr
    assert "has no tokenizer" in done.stderr and "holds none of its files" in done.stderr
    assert done.stderr.count("error") == 1 and "Traceback" not in done.stderr


@pytest.mark.parametrize("flag", ["--grpc-port", "--metrics-port", "--health-port"])
def test_every_port_is_tried_before_anything_is_loaded(flag):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = run_serve("--port", "0", flag, str(taken.getsockname()[1]))
    assert done.returncode == 2
    assert "cannot be had" in done.stderr and f"another {flag}" in done.stderr
    assert "listening" not in done.stderr
