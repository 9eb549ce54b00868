"""Run predictor.py or export_model.py once for each device, on one machine or several.

Takes the flags of paddle.distributed.launch: `python -m inferplane.source launch --gpus 0,1 predictor.py ...`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import PurePath

from inferplane.cli.arguments import Parser
from inferplane.cli.screen import Screen
from inferplane.errors import UsageError
from inferplane.serving.lifecycle.launch import launch_ranks
from inferplane.serving.source_names import LaunchRequest
from inferplane.source import export_model, predictor
from inferplane.source.flags import PREDICTOR_FLAGS, parse

VISIBLE = "_VISIBLE_DEVICES"
"""Ends the names of vendors' variables that say which devices a process sees."""
SCRIPTS = ("predictor", "export_model")


def run(words: Sequence[str], screen: Screen) -> int:
    """Become torchrun, or run the script in this process if one process suffices."""
    at = next((n for n, word in enumerate(words) if PurePath(word).suffix == ".py" or word in SCRIPTS), len(words))
    parser = Parser(prog="python -m inferplane.source launch", usage="%(prog)s [flags] SCRIPT [its flags]")
    parser.add_argument("--ips", metavar="IPS", default="", help="addresses of the machines, the first one's first")
    parser.add_argument("--gpus", "--devices", metavar="N,N", default="", dest="devices", help="numbers of the devices")
    args = parser.parse_all(list(words[:at]))
    script = PurePath(words[at]).stem if at < len(words) else ""
    if script not in SCRIPTS:
        raise UsageError(f"{script!r} is no script that is launched.", there_is=", ".join(f"{s}.py" for s in SCRIPTS))
    devices = [part for part in args.devices.split(",") if part]
    check_devices(devices, os.environ)
    addresses = tuple(dict.fromkeys(part.strip() for part in args.ips.split(",") if part.strip()))
    nodes = max(len(addresses), 1)
    processes = nodes * max(len(devices), 1)
    rest = words[at + 1 :]
    if script == "export_model":
        screen.note(f"this process writes the parts of all {processes} devices")
        return export_model.run(rest, screen, ranks=processes)
    request = LaunchRequest(processes, nodes, addresses if nodes > 1 else ())
    device = parse("predictor", PREDICTOR_FLAGS, rest, str(predictor.__doc__)).device
    launch_ranks(request, device, ("inferplane.source", "predictor", *rest), screen.warning)
    return predictor.run(rest, screen)


def check_devices(devices: Sequence[str], environ: Mapping[str, str]) -> None:
    """Refuse devices that the processes would not take: these take the visible ones, the first one first.

    Raises:
        UsageError: the numbers are not those from 0, nor those that a vendor's variable makes visible.
    """
    visible = [value.split(",") for name, value in environ.items() if name.endswith(VISIBLE)]
    if list(devices) != [str(number) for number in range(len(devices))] and list(devices) not in visible:
        raise UsageError(
            f"--gpus {','.join(devices)}: processes take the visible devices, from 0.",
            remedy=f"set the vendor's variable ...{VISIBLE} to these numbers too",
        )
