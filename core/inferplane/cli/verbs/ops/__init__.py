"""List the operations of models: what each one means, and which kernels a device declares for it.

Without an option, prints every op with its meaning. With --device, prints the kernels of that device, highest rank
first; an op without kernels runs as its parts or its reference. With a NAME, prints everything about one op.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from inferplane.cli.arguments import Parser, add_device, add_examples, add_json, suggest
from inferplane.cli.screen import Screen
from inferplane.errors import PluginError, UsageError

if TYPE_CHECKING:
    import torch

    from inferplane.ops import Op
    from inferplane.plugins import PluginHost
    from inferplane.types import Kernel, When

SCHEMA = 1


def add_arguments(parser: Parser) -> None:
    """Options of `ops`."""
    parser.usage = f"{parser.prog} [NAME] [options]"
    parser.add_argument("name", metavar="NAME", nargs="?", help="one op: docstring, tolerance, samples, kernels")
    add_device(parser, default=None)
    add_json(parser)
    add_examples(parser, "", "--device {X}", "rms_norm")


def run(args: argparse.Namespace, screen: Screen) -> int:
    """Show all ops, or one."""
    from inferplane.cli.verbs.ops.tables import show_kernels, show_meanings, show_one
    from inferplane.plugins import host

    names = [args.name] if args.name is not None else None
    data = ops_data(host(), args.device, names)
    if args.json:
        screen.facts(data)
    elif args.name is not None:
        show_one(data["ops"][0], screen)
    elif args.device is not None:
        show_kernels(data, screen)
    else:
        show_meanings(data["ops"], screen)
    return 0


def ops_data(host: PluginHost, device: str | None, names: Sequence[str] | None = None) -> dict[str, Any]:
    """`{schema, device, ops: [{op, hot, meaning, doc, fields, arguments, tolerance, samples, variants, kernels}]}`.

    Args:
        host: the plugin host.
        device: the device whose kernels are listed; None lists all devices' kernels of named ops, and otherwise none.
        names: which ops; None takes all.

    Raises:
        UsageError: there is no such op.
        DeviceError, PluginError: there is no such device.
    """
    from inferplane.cli.evidence import Evidence
    from inferplane.ops import OPS

    for name in names or ():
        if name not in OPS:
            remedy = suggest(name, OPS, "name one of these", "{!r}")
            raise UsageError(f"There is no op {name!r}.", there_is=", ".join(sorted(OPS)), remedy=remedy)
    if device is not None:
        backends = [host.backend_for_explain(device)]
    elif names is not None:
        backends = [host.backend_for_explain(entry.name) for entry in host.devices()]
    else:
        backends = []
    ops = {name: {**_op_data(name, OPS[name]), "kernels": []} for name in sorted(names or OPS)}
    for backend in backends:
        evidence = Evidence.of(backend)
        try:
            kernels = host.kernels(backend)
        except PluginError:
            if device is not None:
                raise
            continue  # its plugin is now in quarantine; list the other devices
        for kernel in sorted(kernels, key=lambda k: (-k.rank, k.name)):
            if kernel.op in ops:
                level = evidence.level(kernel.op, kernel.name)
                ops[kernel.op]["kernels"].append({"device": backend.name, **_kernel_data(kernel), "evidence": level})
    return {"schema": SCHEMA, "device": backends[0].name if device is not None else None, "ops": list(ops.values())}


def _op_data(name: str, op: type[Op]) -> dict[str, Any]:
    doc = inspect.cleandoc(op.__doc__ or "")
    return {
        "op": name,
        "hot": op.hot,
        "meaning": " ".join(doc.split("\n\n")[0].split()),
        "doc": doc,
        "fields": list(op.fields()),
        "arguments": list(inspect.signature(op.__call__).parameters)[1:],
        "tolerance": {_short(dtype): value for dtype, value in op.tolerance.items()},
        "samples": [{"label": sample.label, "step_kind": sample.step_kind} for sample in op.samples()],
        "variants": sorted(op.variants),
        "source": f"{op.__module__}:{op.__qualname__}",
    }


def _kernel_data(kernel: Kernel) -> dict[str, Any]:
    return {
        "kernel": kernel.name,
        "provider": kernel.provider,
        "rank": kernel.rank,
        "dtypes": [_short(dtype) for dtype in kernel.when.dtypes],
        "formats": list(kernel.when.formats),
        "needs": needs(kernel.when),
        "capture_safe": kernel.capture_safe,
        "batch_invariant": kernel.batch_invariant,
        "note": kernel.note,
    }


def needs(when: When) -> list[str]:
    """Describe what a kernel requires beside dtype and weight format."""
    out = []
    if when.kv_layouts:
        out.append("KV layout " + " or ".join(when.kv_layouts))
    if when.step_kinds:
        out.append("steps " + " or ".join(when.step_kinds))
    out += [f"feature {name}" for name in when.features]
    return out + [words for words, _ in when.needs]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
