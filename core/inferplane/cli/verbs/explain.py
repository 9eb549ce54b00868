"""Show which kernel runs each part of a model on a device, and why; needs neither weights nor the device.

The first lines say whether the device is here and what is missing. The plan is for the architecture of --arch, or the
first one that the backend knows, with the features that the backend assumes for it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inferplane.cli.arguments import (
    Parser,
    add_binding,
    add_examples,
    add_json,
    add_model,
    add_speculation,
    binding_options,
    suggest,
)
from inferplane.cli.screen import Screen
from inferplane.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from inferplane.engine import ModelFiles, Runner
    from inferplane.plugins import DeviceEntry, PluginHost


def add_arguments(parser: Parser) -> None:
    """Options of `explain`."""
    parser.usage = f"{parser.prog} [MODEL] [options]"
    add_model(parser, config=True)
    add_json(parser)
    parser.add_argument("-v", "--verbose", action="store_true", help="also every kernel that lost, with the reason")
    parser.add_argument("--step", choices=("decode", "mixed"), help="one step kind; left out: both, if they differ")
    add_binding(parser)
    parser.add_argument("--arch", metavar="A", help="the architecture to assume; else the first that the backend knows")
    add_speculation(parser)
    add_examples(
        parser, "--device {X}", "path/to/config.json --device {X} --step decode --verbose", "--op linear=reference"
    )


def run(args: argparse.Namespace, screen: Screen) -> int:
    """Plan and print."""
    from inferplane.binding import explain
    from inferplane.engine import Runner, describe_captured_steps
    from inferplane.plugins import host

    options = binding_options(args, arch=args.arch)
    files = model_files(args.model)
    check_arch(host(), args.device, args.arch)
    runner = Runner.plan_only(files, host(), args.device, options)
    steps = describe_captured_steps(runner)
    if args.step is not None:
        runner.plan.choices = {args.step: runner.plan.choices[args.step]}
    entry = entry_of(host(), runner)
    data = {**explain(runner.plan, files.name), **runner.describe_caches(), "decode_steps": steps}
    if runner.expanded:
        data["expanded"] = runner.expanded
    if runner.requantized:
        data["requantized"] = [
            {"stored": old, "format": new, "weights": n} for (old, new), n in sorted(runner.requantized.items())
        ]
    if args.json:
        from inferplane.cli.verbs.devices import probe_data

        screen.facts({**data, "probe": probe_data(entry.probe)})
    else:
        _show(data, entry, sorted(runner.backend.architectures), screen, verbose=args.verbose)
    return 0


def model_files(model: str) -> ModelFiles:
    """Find a model's files; a `config.json` names its folder, and a file of another name is a config by itself. Of a
    name on a hub, only the config is downloaded.

    Raises:
        UsageError: there is no such folder or file.
        CheckpointError: it has no config.
    """
    from inferplane.engine import ModelFiles
    from inferplane.models import Config

    path = Path(model).expanduser()
    if not path.is_file() or path.suffix in (".gguf", ".safetensors"):
        return ModelFiles(model, configs=True)
    if path.name == "config.json":
        return ModelFiles(path.parent)
    try:
        entries = json.loads(path.read_text())
    except ValueError as error:  # also bytes that are no text
        raise CheckpointError(f"{path} is not valid JSON: {error}.", remedy="pass a config.json") from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path} holds no JSON object.", remedy="pass a config.json")
    return ModelFiles(Config(entries, str(path)))


def check_arch(host: PluginHost, device: str, arch: str | None) -> None:
    """Refuse an architecture that the backend does not know: after a typo every feature would be missing.

    Raises:
        UsageError: the backend does not know it.
        DeviceError, PluginError: there is no such device.
    """
    if arch is None:
        return
    backend = host.backend_for_explain(device)
    known = list(backend.architectures)
    if arch in known or len(backend.features(arch)) or not known:
        return
    raise UsageError(
        f"Device {backend.name!r} knows nothing of architecture {arch!r}.",
        there_is=", ".join(known),
        remedy=suggest(arch, known, "name one of these", "{!r}"),
    )


def entry_of(host: PluginHost, runner: Runner) -> DeviceEntry:
    """The plugin host's entry of the runner's device."""
    return next(entry for entry in host.devices() if entry.name == runner.backend.name)


def _show(data: dict[str, Any], entry: DeviceEntry, architectures: list[str], screen: Screen, *, verbose: bool) -> None:
    """Print the device and the plan that `binding.explain` returned; `verbose` adds the kernels that lost."""
    from rich.text import Text

    from inferplane.binding import plan_lines

    probe = entry.probe
    style = "bold green" if probe.available else "bold yellow"
    screen.show(Text.assemble((entry.name, "bold"), " is ", (probe.presence.value, style), f" here: {probe.reason}"))
    if probe.remedy:
        screen.show(Text.assemble(("to do: ", "bold"), probe.remedy))
    if types := data.get("expanded"):
        words = ", ".join(f"{count} in {kind}" for kind, count in sorted(types.items()))
        screen.show(f"packed matrices that are expanded while they are read: {words}")
    if pairs := data.get("requantized"):
        words = ", ".join(f"{pair['weights']} from {pair['stored']} to {pair['format']}" for pair in pairs)
        screen.show(f"quantized weights that are put into another format while they are read: {words}")
    lines = plan_lines(data, screen.out.width, verbose=verbose, architectures=architectures)
    screen.show("", *(Text.assemble(*line) for line in lines))
