"""The source system's container lines as they stand, without Docker: its entry, start_server, stop_server, /models.

A stand-in for the hub has a small model under the documents' names. Where a line names two
machines, both are this one.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from inferplane.serving.grpc import schema
from tests.e2e.small_r1 import write
from tests.house.rules import REPOSITORY, SOURCE_PATHS
from tests.serving.test_entrypoint import free_ports
from tests.unit.hub.hub_server import HubServer, Model, serving
from tests.unit.support.documents import commands_of, parameters, read_docker_run

ENTRY = REPOSITORY / "deploy" / "entrypoint.sh"
PROGRAMS = REPOSITORY / "deploy" / "source"
LINES = [read_docker_run(command) for command in commands_of("docker run")]
ONE_MACHINE = [line for line in LINES if "start_server" in line.words[-1] and "MP_NNODE" not in str(line)]
TWO_MACHINES = [line for line in LINES if "MP_NNODE" in str(line)]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    with serving() as server:
        files = write(tmp_path_factory.mktemp("small") / "model")
        for repository in ("deepseek-ai/DeepSeek-R1", "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"):
            server.add(repository, Model(files))
        yield server


START_S = 300.0
"""Generous: several processes start, one after the other, on machines that are shared."""


class Machine:
    """A container without Docker: its variables, its folder of models and its programs."""

    def __init__(self, folder: Path, hub: HubServer, **variables: str) -> None:
        self.folder, self.models = folder, folder / "models"
        self.models.mkdir(parents=True)
        python = folder / "bin" / "python3"
        python.parent.mkdir()
        python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)
        self.http, self.health = free_ports(2)
        cleared = {n: v for n, v in os.environ.items() if not n.startswith(("INFERPLANE_", "HF_", "TRANSFORMERS_"))}
        self.variables = {
            **cleared,
            "PATH": os.pathsep.join((str(python.parent), str(PROGRAMS), os.environ["PATH"])),
            "PYTHONPATH": os.pathsep.join(SOURCE_PATHS),
            "INFERPLANE_DEVICE": "cpu",
            "INFERPLANE_HOST": "127.0.0.1",
            "INFERPLANE_SERVER_DIR": str(folder / "server"),
            "HF_ENDPOINT": hub.endpoint,
            "HF_HOME": str(folder / "hf"),
            "OMP_NUM_THREADS": "1",
            "MODEL_DIR": str(self.models),
            "SERVICE_HTTP_PORT": str(self.http),
            **variables,
        }
        self.said = folder / "said"
        self.process: subprocess.Popen[bytes] | None = None

    def enter(self, *words: str) -> None:
        """Run what a container runs, in the background."""
        with self.said.open("ab") as out:
            self.process = subprocess.Popen(
                ["sh", str(ENTRY), *words], env=self.variables, stdout=out, stderr=out, start_new_session=True
            )

    def run(self, *words: str, timeout_s: float = START_S) -> tuple[int, str]:
        """Run a program to its end; its exit code and what it wrote."""
        with (self.folder / "run").open("w+b") as out:
            done = subprocess.run(words, env=self.variables, stdout=out, stderr=out, timeout=timeout_s, check=False)
        return done.returncode, (self.folder / "run").read_text()

    def wait(self, words: str) -> str:
        """What was written, once `words` are part of it."""
        limit = time.monotonic() + START_S
        while words not in (text := self.said.read_text() if self.said.exists() else ""):
            assert self.process is not None and self.process.poll() is None and time.monotonic() < limit, text[-3000:]
            time.sleep(0.1)
        return text

    def post(self, body: dict[str, Any], path: str = "/v1/chat/completions") -> dict[str, Any]:
        return httpx.post(f"http://127.0.0.1:{self.http}{path}", json=body, timeout=60).raise_for_status().json()

    def end(self) -> None:
        self.run("stop_server", "20")
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@pytest.fixture
def machine(tmp_path: Path, hub: HubServer) -> Iterator[Machine]:
    found = Machine(tmp_path, hub)
    yield found
    found.end()


def test_there_are_lines_of_each_kind():
    assert (len(ONE_MACHINE), len(TWO_MACHINES), len(LINES)) == (2, 3, 6)
    (shell,) = (line for line in LINES if line not in (*ONE_MACHINE, *TWO_MACHINES))
    assert shell.words == ["bash"] and shell.mounts == {"/home/workspace/models_dir": "/models/"}


@pytest.mark.parametrize("line", ONE_MACHINE, ids=lambda line: line.variables["model_name"].rpartition("/")[0])
def test_a_line_for_one_machine_runs_as_it_stands(machine, line, hub):
    """The first one has MP_NUM=8: there is one device, so the model is whole on it, and a note says so."""
    machine.variables.update(line.variables)
    assert list(line.mounts.values()) == ["/models"]
    machine.enter(*line.words)
    machine.wait("the server is ready")
    said = machine.wait('"event": "ready"')  # the log is copied to the console after it is written
    name = line.variables["model_name"]
    assert f"the model {name} is {name.rpartition('/')[0]} with quantization {name.rpartition('/')[2]}" in said
    assert ("8 devices are requested (MP_NUM), and there is one" in said) == ("MP_NUM" in line.variables)
    assert (machine.models / name / "config.json").is_file()  # the mount is written to, and read
    log = (machine.folder / "server" / "server.log").read_text()
    assert '"event": "ready"' in log and '"event": "ready"' in said  # in the file, and on the console
    for command in commands_of("curl"):
        path, body = re.search(r":9965(\S+) .*-d '(.*)'", command.text).groups()
        answer = machine.post({**json.loads(body), "max_dec_len": 4}, path)
        assert answer["error_code"] == 0 and answer["tokens_all"]
    check_every_parameter(machine)
    code, said = machine.run("start_server")
    assert code == 2 and "A server runs already" in said and "stop_server" in said
    assert subprocess.run(["sh", str(ENTRY), "health"], env=machine.variables, capture_output=True).returncode == 0
    assert machine.process.poll() is None  # tail -f /dev/null
    code, said = machine.run("stop_server")
    assert (code, said) == (0, "note: the server has ended\n")
    with pytest.raises(httpx.ConnectError):
        machine.post({"text": "x"})
    asked = len(hub.requests)
    if "MP_NUM" in line.variables:  # the other line is started again without HTTP: a server takes seconds to start
        code, said = machine.run("start_server", name)  # again, from what is there
        assert code == 0, said
    else:
        check_grpc_alone(machine, name)
    assert len(hub.requests) == asked
    assert machine.run("stop_server")[0] == 0


def check_every_parameter(machine: Machine) -> None:
    """Each parameter of a request that the documents name is taken."""
    values = {"messages": None, "req_id": "one", "text": "import os", "max_dec_len": 8, "timeout": 60, "stream": False}
    given = {"min_dec_len": 1, "topp": 0.7, "temperature": 0.95, "return_usage": True, "penalty_score": 1}
    values |= {**given, "frequency_score": 0, "presence_score": 0}
    assert set(values) == {row[0] for row in parameters("req_id")}
    answer = machine.post({name: value for name, value in values.items() if value is not None})
    assert answer["tokens_all"] and answer["usage"]["completion_tokens"] and answer["req_id"] == "one"


def check_grpc_alone(machine: Machine, name: str) -> None:
    """SERVICE_HTTP_PORT=-1 with a gRPC port serves gRPC, and nothing listens at the former HTTP port."""
    (port,) = free_ports(1)
    machine.variables |= {"SERVICE_HTTP_PORT": "-1", "SERVICE_GRPC_PORT": str(port)}
    code, text = machine.run("start_server", name)
    assert code == 0 and f"the server is ready (gRPC at {port})" in text
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        request, response = schema.method_types("ServerReady")
        call = channel.unary_unary(
            f"/{schema.SERVICE}/ServerReady",
            request_serializer=request.SerializeToString,
            response_deserializer=response.FromString,
        )
        assert call(request(), timeout=30).ready
    with pytest.raises(httpx.ConnectError):
        machine.post({"text": "x"})
    listening = next(json.loads(line) for line in text.splitlines() if '"listening"' in line)
    assert "http" not in listening


@pytest.mark.parametrize(
    ("words", "variables", "said"),
    [
        (["deepseek-ai/DeepSeek-R1-3nodes/weight_only_int4"], {}, "is no model of the source system"),
        ([], {"BATCH_SIZE": "many"}, "max_num_seqs = 'many' (variable BATCH_SIZE)"),
        ([], {"MODEL_DIR": "/nowhere"}, "/nowhere"),
        ([], {"SERVICE_HTTP_PORT": "-1"}, "turns HTTP off, and there is no other service"),
        (["org/absent"], {}, "org/absent"),
    ],
)
def test_a_start_that_fails_ends_with_its_reason(machine, words, variables, said):
    machine.variables.update(variables)
    code, text = machine.run("bash", "-c", "-ex", f"start_server {' '.join(words)} && echo started")
    assert code and said in text and "started" not in text.splitlines()
    assert machine.run("stop_server") == (0, "note: no server runs that start_server has started\n")


def test_what_fails_in_the_server_is_the_reason_too(machine):
    folder = machine.folder / "broken"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["NothingForCausalLM"], "model_type": "nothing"}')
    machine.variables["MODEL_DIR"] = str(folder)
    code, text = machine.run("start_server")
    error = text[text.rindex("error: ") :]
    assert code == 1 and "NothingForCausalLM" in error


def exported(line: Any) -> dict[str, str]:
    """The variables of a line that names two machines: of -e, and those that its shell exports."""
    return {**line.variables, **dict(re.findall(r'export (\w+)="?([^" ]+)"?', line.words[-1]))}


@pytest.mark.parametrize("line", TWO_MACHINES, ids=lambda line: line.variables["model_name"].split("/")[1])
def test_a_line_for_two_machines_ends_with_its_reason_on_one(machine, line):
    """Its 16 devices are not here: 8 on each machine."""
    machine.variables.update(line.variables)
    machine.enter(*line.words)
    assert machine.process.wait(START_S) != 0
    said = machine.said.read_text()
    assert "16 processes (MP_NUM) on 2 machines need 8 devices on each" in said and "there is: 1 on this one" in said


def test_two_machines_serve_one_model(tmp_path, hub):
    """The line with MTP, with one device a machine, and this machine in place of both."""
    (line,) = {exported(line)["MP_NUM"]: line for line in TWO_MACHINES if "SPECULATE_METHOD" in exported(line)}.values()
    (port,) = free_ports(1)
    two = {"MP_NUM": "2", "POD_0_IP": "127.0.0.1", "POD_IPS": "127.0.0.1,127.0.0.2", "INTER_PROC_PORT": str(port)}
    variables = {**exported(line), **two, "SPECULATE_MODEL_PATH": str(tmp_path / "models-mtp")}
    assert variables["SPECULATE_METHOD"] == "mtp" and variables["MP_NNODE"] == "2"
    variables.pop("CUDA_VISIBLE_DEVICES")
    machines = [Machine(tmp_path / str(n), hub, **variables, PET_NODE_RANK=str(n)) for n in range(2)]
    try:
        for machine in machines:
            machine.enter("/bin/bash", "-c", "-ex", "start_server $model_name && tail -f /dev/null")
        for machine in machines:
            machine.wait("the server is ready")
        said = machines[0].wait('"event": "ready"')
        machines[1].wait('"event": "following"')
        assert "has no model: the prediction layers of the model's own files draft" in said
        answer = machines[0].post({"text": "import os", "max_dec_len": 8})
        assert answer["error_code"] == 0 and answer["tokens_all"]
        assert machines[0].run("stop_server")[0] == 0
        limit = time.monotonic() + 30
        while "server has ended" not in (text := machines[1].run("stop_server")[1]) and "no server runs" not in text:
            assert time.monotonic() < limit, text
    finally:
        for machine in machines:
            machine.end()
