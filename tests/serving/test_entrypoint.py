"""The entry point of containers serves the demo model, without Docker: its ports, its health check, its end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx

from tests.house.rules import REPOSITORY
from tests.serving.live import START_S

SCRIPT = REPOSITORY / "deploy" / "entrypoint.sh"


def free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in held]
    for sock in held:
        sock.close()
    return ports


def test_the_demo_model_is_served_through_it(tmp_path):
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "python3").symlink_to(sys.executable)
    command = programs / "inferplane"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m inferplane "$@"\n')
    command.chmod(0o755)
    port, health, metrics = free_ports(3)
    cleared = {name: value for name, value in os.environ.items() if not name.startswith("INFERPLANE_")}
    chosen = {"PORT": port, "HEALTH_PORT": health, "METRICS_PORT": metrics, "DEVICE": "cpu", "LOG_FORMAT": "json"}
    variables = {**cleared, **{f"INFERPLANE_{name}": str(value) for name, value in chosen.items()}}
    variables["PATH"] = f"{programs}{os.pathsep}{os.environ['PATH']}"

    def is_healthy() -> bool:
        return subprocess.run(["sh", str(SCRIPT), "health"], env=variables, capture_output=True).returncode == 0

    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(["sh", str(SCRIPT)], env=variables, stderr=log)
    try:
        limit = time.monotonic() + START_S
        while not is_healthy():
            assert process.poll() is None and time.monotonic() < limit, read_log(tmp_path)
            time.sleep(0.2)
        body = {"prompt": "import os", "max_tokens": 4, "temperature": 0}
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200 and answer.json()["choices"][0]["text"]
        assert "inferplane:generation_tokens_total 4.0" in httpx.get(f"http://127.0.0.1:{metrics}/metrics").text
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, read_log(tmp_path)  # the script is replaced by the server, which gets the signal
        assert not is_healthy()
        listening = next(line for line in read_log(tmp_path) if line.get("event") == "listening")
        assert listening["http"] == f"0.0.0.0:{port}"
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def read_log(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "log").read_text().splitlines() if line.startswith("{")]
