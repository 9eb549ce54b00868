"""Run the tests of clients, each in an environment of its own, against one server with a scripted model.

    .venv-serving/bin/python tests/clients/run.py [NAME ...] [pytest's arguments]

`.venv-client-NAME` has the packages of `tests/clients/NAME/requirements.txt`: `make test-clients` installs them. The
server must end at rest: a client that leaves a sequence behind fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from tests.clients.scripted.folder import ARGUMENTS, write_folder  # noqa: E402
from tests.serving.live import Live  # noqa: E402

FOLDER = REPOSITORY / "tests" / "clients"
BUILD = REPOSITORY / "build" / "clients"
PAGE = FOLDER / "test_page.py"
PLUGIN = {"INFERPLANE_PLUGINS": "tests.clients.scripted.model"}
PYTEST_ARGUMENTS = {"langchain": ("-o", "asyncio_mode=auto", "-o", "asyncio_default_test_loop_scope=session")}
"""What the published suites of a client ask of pytest; LangChain's client keeps its connections from test to test."""


def list_clients() -> list[str]:
    """Names of all clients that have tests."""
    return sorted(path.parent.name for path in FOLDER.glob("*/requirements.txt"))


def run_client(name: str, live: Live, arguments: list[str]) -> int:
    """Run the tests of one client in its environment; the exit code of pytest."""
    # Without this folder on the path: `pip install -e .` leaves metadata in it that names a plugin of pytest, and the
    # client's environment lacks Inferplane.
    pytest = REPOSITORY / f".venv-client-{name}" / "bin" / "pytest"
    own = ("-o", "pythonpath=", "-p", "no:cacheprovider", "--confcutdir", str(FOLDER), *PYTEST_ARGUMENTS.get(name, ()))
    command = [str(pytest), *own, str(FOLDER / name), str(PAGE), *arguments]
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("OPENAI_", "PYTEST_"))}
    variables |= {"CLIENTS_SERVER": live.url, "CLIENTS_GRPC": live.event("listening")["grpc"]}
    variables |= {"CLIENTS_NAME": name, "HF_HUB_OFFLINE": "1", "HF_HOME": str(BUILD / "hub")}
    print(f"== {name}", flush=True)
    return subprocess.run(command, cwd=REPOSITORY, env=variables).returncode


def main(words: list[str]) -> int:
    """Run the tests of the named clients, or of all."""
    names = [word for word in words if word in list_clients()] or list_clients()
    arguments = [word for word in words if word not in names]
    folder = write_folder(BUILD / "scripted")
    with Live(str(folder), *ARGUMENTS, "--grpc-port", "0", environment=PLUGIN) as live:
        failed = [name for name in names if run_client(name, live, arguments)]
        live.at_rest()
        assert live.stop() == 0, live.text[-3000:]
    if failed:
        print(f"failed: {', '.join(failed)}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
