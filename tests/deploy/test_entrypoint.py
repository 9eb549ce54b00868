"""The entry point of containers, run without Docker: verbs, ports, and what it says of its health."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from inferplane.cli.main import VERBS
from inferplane.serving.configure import resolve
from tests.deploy.tools import DEPLOY

SCRIPT = DEPLOY / "entrypoint.sh"
FIXED = {"INFERPLANE_HOST": "0.0.0.0", "INFERPLANE_PORT": "8000"}


def start(tmp_path: Path, *words: str, **variables: str) -> tuple[list[str], dict[str, str]]:
    """What `inferplane` is called with, and the variables of Inferplane and the source system that it gets."""
    program = tmp_path / "inferplane"
    program.write_text('#!/bin/sh\nfor word in "$@"; do echo "word $word"; done\nenv\n')
    program.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", **variables}
    done = subprocess.run(["sh", str(SCRIPT), *words], env=environment, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    got = dict(line.split("=", 1) for line in lines if re.match(r"INFERPLANE_\w+=|\w+_PORT=", line))
    return [line[5:] for line in lines if line.startswith("word ")], got


def test_it_serves_unless_a_verb_is_named(tmp_path):
    assert start(tmp_path)[0] == ["serve"]
    assert start(tmp_path, "qwen3:0.6b", "--offline")[0] == ["serve", "qwen3:0.6b", "--offline"]
    assert start(tmp_path, "--max-num-seqs", "8")[0] == ["serve", "--max-num-seqs", "8"]
    assert start(tmp_path, "/models/a folder")[0] == ["serve", "/models/a folder"]
    assert start(tmp_path, "doctor", "--json")[0] == ["doctor", "--json"]
    branch = next(line for line in SCRIPT.read_text().splitlines() if line.strip().startswith("generate |"))
    named = branch.strip().rstrip(")").split(" | ")
    assert len(set(named)) == len(named) and {*named} - {"quantize"} == {*VERBS} - {"quantize"}
    for verb in ("export", "quantize"):
        assert start(tmp_path, verb, "--help")[0] == [verb, "--help"]


@pytest.mark.parametrize("words", [("/bin/bash", "-c", "-ex", "inferplane x"), ("bash", "-c", "inferplane x")])
def test_a_shell_runs_as_it_is(tmp_path, words):
    """The source system's lines run one; its server has the source system's port, not the container's."""
    run, variables = start(tmp_path, *words)
    assert run == ["x"] and variables == {}


def test_the_source_system_s_programs_run_its_commands(tmp_path):
    python = tmp_path / "python3"
    python.write_text('#!/bin/sh\nfor word in "$@"; do echo "word $word"; done\n')
    python.chmod(0o755)
    path = f"{DEPLOY / 'source'}:{tmp_path}:/usr/bin:/bin"
    for name, words in (("start_server", ["a/b", "--port", "1"]), ("stop_server", ["60"])):
        done = subprocess.run(["sh", str(SCRIPT), name, *words], env={"PATH": path}, capture_output=True, text=True)
        said = [line.removeprefix("word ") for line in done.stdout.splitlines()]
        assert said == ["-m", "inferplane.source", name, *words], done.stderr


def test_ports_are_the_container_s_unless_a_variable_names_them(tmp_path):
    variables = start(tmp_path)[1]
    settings = resolve({}, variables).settings
    assert (settings.host, settings.port, settings.health_port, settings.metrics_port) == ("0.0.0.0", 8000, 8001, 8002)
    variables = start(tmp_path, INFERPLANE_PORT="9", HEALTH_HTTP_PORT="10", METRICS_HTTP_PORT="11")[1]
    settings = resolve({}, variables).settings
    assert (settings.port, settings.health_port, settings.metrics_port) == (9, 10, 11)
    assert resolve({"port": 12}, variables).settings.port == 12  # a flag decides
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    assert re.search(r"^EXPOSE (.*)$", dockerfile, re.MULTILINE)[1].split() == ["8000", "8001", "8002"]


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1), (None, 1)])
def test_health(tmp_path, status, code):
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/v2/health/ready" else 404)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            """Say nothing."""

    server = HTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    port = server.server_port
    if status is None:
        server.shutdown()
        server.server_close()
    (tmp_path / "python3").symlink_to(sys.executable)
    environment = {**os.environ, "PATH": f"{tmp_path}:/usr/bin:/bin", "INFERPLANE_HEALTH_PORT": str(port)}
    done = subprocess.run(["sh", str(SCRIPT), "health"], env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    if status is not None:
        server.shutdown()
        server.server_close()
