"""Start a server in the background, and return once it is ready; without success the reason and exit code 1.

`start_server [MODEL] [options of serve]`: MODEL is a name of the source system, one of a hub, or a folder; left out,
the model in MODEL_DIR. The source system's variables are settings, and its defaults hold: port 9965, models in
/models/, as many processes as this machine has devices. `stop_server` ends it.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from inferplane.cli.arguments import pins
from inferplane.cli.main import verb_parser
from inferplane.cli.screen import Screen
from inferplane.cli.verbs import serve
from inferplane.errors import InferplaneError, UsageError
from inferplane.hub import parse_name
from inferplane.serving.configure import ResolvedSettings
from inferplane.serving.lifecycle.launch import count_devices, count_local, find_machine
from inferplane.serving.lifecycle.notify import FOLLOWS, NOTIFY_SOCKET, READY
from inferplane.serving.settings import ServerSettings
from inferplane.serving.source_models import SourceModel, find_source_model
from inferplane.serving.source_names import DEFAULT_FOLDER, DEFAULT_PORT, LaunchRequest
from inferplane.source.download_model import can_write, describe_access, download
from inferplane.source.running import HEALTH, LOG, RunningServer, server_folder

DEFAULTS = {
    "INFERPLANE_HOST": ("0.0.0.0", ()),
    "SERVICE_HTTP_PORT": (str(DEFAULT_PORT), ("INFERPLANE_PORT", "PUSH_MODE_HTTP_PORT")),
    "MODEL_DIR": (DEFAULT_FOLDER, ("INFERPLANE_MODEL",)),
}
"""Variable -> the value that it gets, unless it or another name of the setting is there."""
POLL_S = 0.2
FLUSH_S = 3.0
"""Seconds that the console has for the last lines of a log."""


def run(words: Sequence[str], screen: Screen) -> int:
    """Start, wait, report."""
    if words and words[0] in ("-h", "--help"):
        sys.stdout.write(f"{__doc__}")
        return 0
    folder = server_folder()
    if (running := RunningServer.find(folder)) is not None:
        raise UsageError(f"A server runs already (process {running.pid}).", remedy="end it with `stop_server`")
    named = bool(words) and not words[0].startswith("-")
    rest = list(words[1:] if named else words)
    environ = dict(os.environ)
    if named:
        environ["model_name"] = words[0]
    set_defaults(environ)
    resolved = read_settings(rest, environ)  # raises what is wrong, before anything is downloaded
    follows, processes = share_devices(resolved.launch, resolved.settings.device, environ)
    fetch_named_model(environ, screen, resolved.settings, processes)
    folder.mkdir(parents=True, exist_ok=True)
    port = resolved.settings.health_port or resolved.settings.port
    if port > 0:
        (folder / HEALTH).write_text(str(port), encoding="utf-8")
    else:  # gRPC alone: no port answers over HTTP
        (folder / HEALTH).unlink(missing_ok=True)
    screen.note(f"starting a server; its log is {folder / LOG}")
    _start(rest, environ, folder, follows=follows)
    where = (
        f"port {resolved.settings.port}" if resolved.settings.port >= 0 else f"gRPC at {resolved.settings.grpc_port}"
    )
    screen.note(f"the server is ready ({where}); `stop_server` ends it")
    return 0


def read_settings(words: Sequence[str], environ: Mapping[str, str]) -> ResolvedSettings:
    """The settings that `serve` will have with these options and variables.

    Raises:
        UsageError: as `serve`.
    """
    return serve.resolve(verb_parser("serve")[0].parse_all(list(words)), environ)


def set_defaults(environ: MutableMapping[str, str]) -> None:
    """Set the source system's defaults where no variable says otherwise."""
    for name, (value, others) in DEFAULTS.items():
        if not any(environ.get(other) for other in (name, *others)):
            environ[name] = value


def share_devices(launch: LaunchRequest | None, device: str, environ: MutableMapping[str, str]) -> tuple[bool, int]:
    """Set MP_NUM to the number of devices unless it is set. Returns whether this machine follows another one, and the
    number of processes that will share the model.

    Raises:
        UsageError: this machine is none of those named, or it has too few devices.
    """
    nodes = 1 if launch is None else launch.nodes
    devices = count_devices(device)
    if launch is None or not environ.get("MP_NUM"):
        environ["MP_NUM"] = str(devices * nodes)
        processes = devices * nodes
    else:
        processes = count_local(launch, devices)[0] * nodes
    return launch is not None and nodes > 1 and find_machine(launch.addresses, environ) > 0, processes


def fetch_named_model(environ: Mapping[str, str], screen: Screen, settings: ServerSettings, processes: int) -> None:
    """Download the model that `model_name` names into MODEL_DIR, unless it is there, or is none of a hub.

    Args:
        environ: has both variables.
        screen: shows the progress.
        settings: of the server, by which the model is judged before its weights are downloaded.
        processes: that will share it.

    Raises:
        UsageError: the folder cannot be written.
        InferplaneError: the model cannot run, is too large for the devices, or cannot be downloaded.
    """
    name, place = environ.get("model_name", "").strip(), Path(environ.get("MODEL_DIR", DEFAULT_FOLDER)).expanduser()
    if not name or Path(name).expanduser().exists() or (place / name / "config.json").is_file():
        return
    model = find_source_model(name) or SourceModel(name, name)
    if parse_name(model.repository) is None:
        return
    if not can_write(place):
        raise UsageError(
            f"{place} (MODEL_DIR) cannot be written by user {os.getuid()}, so {name} cannot be downloaded into it.",
            there_is=describe_access(place),
            remedy=f"make the folder that is mounted there writable for user {os.getuid()}, put the model in it, or "
            "set MODEL_DIR to another folder",
        )
    from inferplane.engine.clients.process.download_check import check_in_process
    from inferplane.serving.lifecycle.start import engine_options

    options = engine_options(replace(settings, speculative_method=None), pins(settings.op))
    download(model, place, screen, partial(check_in_process, model=name, options=options, ranks=processes))


def _start(words: Sequence[str], environ: MutableMapping[str, str], folder: Path, *, follows: bool) -> None:
    """Start the server, and wait until it is ready; InferplaneError if it ends before."""
    log = folder / LOG
    with _notifications() as (listener, address), log.open("wb") as out:
        command = [sys.executable, "-m", "inferplane", "serve", *words]
        process = subprocess.Popen(
            command,
            env={**environ, NOTIFY_SOCKET: address},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        server = RunningServer.of(process.pid)
        console = _show_log(log, process.pid)
        try:
            server.record(folder)
            while not _is_ready(listener, follows=follows):
                if process.poll() is not None:
                    break
        except BaseException:
            server.kill()
            raise
    if process.poll() is None:
        return
    try:
        console.wait(FLUSH_S)
    except subprocess.TimeoutExpired:
        console.kill()
    raise explain_end(log, process.returncode)


def explain_end(log: Path, code: int) -> InferplaneError:
    """The error for a server that ended while it started: the last reason in its log."""
    for line in reversed(log.read_text(encoding="utf-8", errors="replace").splitlines()):
        try:
            data = json.loads(line)
        except ValueError:
            continue
        if isinstance(data, dict) and "what" in data:
            return InferplaneError(
                str(data["what"]), there_is=str(data.get("there_is", "")), remedy=str(data.get("to_do", ""))
            )
    return InferplaneError(f"The server ended with exit code {code} before it was ready.", remedy=f"see {log}")


@contextmanager
def _notifications() -> Iterator[tuple[socket.socket, str]]:
    """A socket for the server's notifications, and its address: an abstract one, since paths may be too long."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(f"\0inferplane-{secrets.token_hex(16)}")
        listener.settimeout(POLL_S)
        yield listener, f"@{listener.getsockname()[1:].decode()}"


def _is_ready(listener: socket.socket, *, follows: bool) -> bool:
    """Wait a moment for the notification that the server is ready, or that its ranks follow another machine's."""
    try:
        return listener.recv(4096).decode(errors="replace") == (FOLLOWS if follows else READY)
    except TimeoutError:
        return False


def _show_log(log: Path, pid: int) -> subprocess.Popen[bytes]:
    """Copy a log to the console as long as a process lives. A console that goes away ends the copy, not the server."""
    command = ["tail", "-n", "+1", "-f", f"--pid={pid}", str(log)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.__stderr__, start_new_session=True)
