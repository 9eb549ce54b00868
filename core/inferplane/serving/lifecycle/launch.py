"""Starts the processes that share a model, by torchrun, where the source system's variables request several.

The command becomes torchrun, which starts the same command once for each device of this machine; on several machines
each runs the command, and the processes find each other at the first machine's address.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence

from inferplane.errors import UsageError
from inferplane.serving.source_names import LaunchRequest

PORT = 29500
"""At which processes on several machines find each other; torchrun's own default."""
NODE_RANK = "PET_NODE_RANK"
"""torchrun's variable for the number of this machine."""
log = logging.getLogger("inferplane.serving")


def launch_ranks(
    request: LaunchRequest | None, device: str, words: Sequence[str], warn: Callable[[str], None] = log.warning
) -> None:
    """Become torchrun if several processes are requested and this one is none of them; else return.

    Args:
        request: the processes; None: as torchrun started them, or this one alone.
        device: the name of the device.
        words: the command behind `python -m`.
        warn: takes what the user should know.

    Raises:
        UsageError: another number of processes was started, this machine is none of those named, or it has too few
            devices.
    """
    if request is None:
        return
    if "WORLD_SIZE" in os.environ:
        if os.environ["WORLD_SIZE"] != str(request.processes):
            what = f"{request.processes} processes are to share the model (MP_NUM), and torchrun started "
            raise UsageError(f"{what}{os.environ['WORLD_SIZE']}.", remedy="unset MP_NUM, or start as many")
        return
    local, notes = count_local(request, count_devices(device) if request.processes > 1 else 1)
    for note in notes:
        warn(note)
    if local * request.nodes == 1:
        return
    command = torchrun_words(request, local, words, os.environ)
    log.info("starting ranks", extra={"facts": {"command": " ".join(command)}})
    sys.stderr.flush()
    environ = {**os.environ, "MP_NUM": str(local * request.nodes)}
    os.execve(sys.executable, [sys.executable, *command], environ)


def count_local(request: LaunchRequest, devices: int) -> tuple[int, list[str]]:
    """The number of processes on this machine, and notes.

    Args:
        request: the processes.
        devices: that this machine has.

    Raises:
        UsageError: one of several machines has too few devices.
    """
    local = request.processes // request.nodes
    if local <= devices:
        return local, []
    if request.nodes > 1:
        what = f"{request.processes} processes (MP_NUM) on {request.nodes} machines need {local} devices on each."
        remedy = f"set MP_NUM={devices * request.nodes}, or as many --gpus, on all machines"
        raise UsageError(what, there_is=f"{devices} on this one", remedy=remedy)
    if devices == 1:
        return 1, [f"{local} devices are requested (MP_NUM), and there is one: the model is whole on it"]
    return devices, [f"{local} devices are requested (MP_NUM), and there are {devices}: the model is divided over them"]


def count_devices(device: str) -> int:
    """The number of devices of a kind on this machine that this process may use.

    Raises:
        InferplaneError: there is no such device.
    """
    from inferplane.plugins import host

    return max(host().choose(device).probe.devices or 1, 1)


def torchrun_words(request: LaunchRequest, local: int, words: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """The command of torchrun, behind Python's name.

    Args:
        request: the processes.
        local: their number on this machine.
        words: the command behind `python -m`.
        environ: may have the number of this machine.
    """
    places = ["--standalone"]
    if request.nodes > 1:
        rank = find_machine(request.addresses, environ)
        places = ["--nnodes", str(request.nodes), "--node-rank", str(rank)]
        places += ["--master-addr", request.addresses[0], "--master-port", str(request.port or PORT)]
    return ["-m", "torch.distributed.run", *places, "--nproc-per-node", str(local), "-m", *words]


def find_machine(addresses: Sequence[str], environ: Mapping[str, str]) -> int:
    """The number of this machine among several, by torchrun's variable, else by its addresses.

    Raises:
        UsageError: none or several of the addresses are this machine's.
    """
    if (given := environ.get(NODE_RANK, "")).isdecimal():
        return int(given)
    own = [number for number, address in enumerate(addresses) if _is_own(address)]
    if len(own) != 1:
        which = ", ".join(addresses[number] for number in own) or "none"
        raise UsageError(
            f"Of the addresses {','.join(addresses)} (POD_IPS) {which} belong{'s' * (len(own) < 2)} to this machine.",
            there_is="one address of each machine",
            remedy=f"correct them, or set {NODE_RANK} to the number of this machine, from 0",
        )
    return own[0]


def _is_own(address: str) -> bool:
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as found:
            found.bind(place)
    except OSError:
        return False
    return True
