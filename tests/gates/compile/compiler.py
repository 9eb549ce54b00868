"""Compile every specimen for one target and tell what came out: `python -m tests.gates.compile.compiler TARGET FILE`.

Each compile is a process of its own with a time limit: a compiler that hangs or crashes costs that specimen alone.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.cache import triton_key

from tests.gates.compile import arrival_order, ptx
from tests.gates.compile import sparse as sparse  # adds its own to CALLS
from tests.gates.compile.matrices import PRODUCTS
from tests.gates.compile.recorder import Launch, Recorder
from tests.gates.compile.specimens import CALLS
from tests.gates.compile.targets import TARGETS, Target

LIMIT_S = 60
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
GRID_CONTROL = ("ACQBULK", "PREEXIT")
"""What `griddepcontrol.wait` and `griddepcontrol.launch_dependents` become."""
CUDA_MIX = ("HGMMA", "QGMMA", "HMMA", "QMMA", "IGMMA", "IMMA", "UTCHMMA", "UTCQMMA", "UTCIMMA",
            "UTMALDG", "UTMASTG", "LDGSTS", "USETMAXREG", *GRID_CONTROL)  # fmt: skip


def source(launch: Launch) -> ASTSource:
    kind = ASTSource
    if launch.function.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as kind
    return kind(launch.function, launch.signature, launch.constants, launch.attributes)


def compiled(launch: Launch, target: Target) -> dict[str, Any]:
    made = triton.compile(source(launch), target=GPUTarget(*target.triton), options=launch.options)
    found = _cuda(made.asm["cubin"]) if "cubin" in made.asm else _amd(made.asm["amdgcn"])
    return {**found, "shared": made.metadata.shared, **(_order(made.asm["ptx"]) if "ptx" in made.asm else {})}


def _order(text: str) -> dict[str, Any]:
    """How often programs are counted in, and what is wrong with memory's order; nothing where there is nothing."""
    told = {"arrivals": ptx.arrivals(text), "order": [*ptx.ahead(text), *ptx.uncounted(text), *_explored(text)]}
    return {name: value for name, value in told.items() if value}


def _cuda(binary: bytes) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        used = _tool("cuobjdump", "-res-usage", file.name)
        code = _tool("nvdisasm", "-c", file.name)
    resources = re.search(r"REG:(\d+) STACK:(\d+)", used)
    assert resources is not None, used
    opcodes = Counter(re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_]*)([.0-9A-Zx_]*)", code, re.M))
    mix: Counter[str] = Counter()
    for (name, rest), count in opcodes.items():
        if name in CUDA_MIX:
            shape = re.search(r"\.(\d+x\d+x\d+)", rest)
            mix[f"{name} {shape[1]}" if shape else name] += count
    names = Counter({name: 0 for name, _ in opcodes})
    for (name, _), count in opcodes.items():
        names[name] += count
    return {
        "registers": int(resources[1]),
        "stack": int(resources[2]),
        "spills": names["LDL"] + names["STL"],
        "instructions": sum(names.values()),
        "mix": dict(sorted(mix.items())),
    }


def _explored(text: str) -> list[str]:
    """What can go wrong between two programs that are counted; more of them in `test_compile.py`."""
    return sorted(arrival_order.faults(arrival_order.steps(text), programs=2)) if ptx.arrivals(text) else []


def _tool(name: str, *arguments: str) -> str:
    return subprocess.run([str(TOOLS / name), *arguments], capture_output=True, text=True, check=True).stdout


def _amd(assembly: str) -> dict[str, Any]:
    def field(name: str) -> int:
        return max(int(n) for n in re.findall(rf"\.{name}:\s+(\d+)", assembly))

    code = re.findall(r"^\s+([vsdgb][a-z]*_[a-z0-9_]+)", assembly, re.M)
    mix = Counter(name for name in code if "mfma" in name or "wmma" in name)
    return {
        "registers": field("vgpr_count"),
        "stack": field("private_segment_fixed_size"),
        "spills": field("vgpr_spill_count"),  # scalars spill into lanes of a vector register, not into memory
        "instructions": len(code),
        "mix": dict(sorted(mix.items())),
    }


def _child(pipe: Any, launch: Launch, target: Target) -> None:
    os.environ["TRITON_ALWAYS_COMPILE"] = "1"  # what an earlier run left on the disk says nothing of this one
    with open(os.devnull, "w") as quiet:
        os.dup2(quiet.fileno(), 2)  # a failing pass dumps megabytes of its input
    try:
        pipe.send(compiled(launch, target))
    except BaseException as error:
        pipe.send({"error": f"{type(error).__name__}: {str(error)[-600:]}"})


def limited(launch: Launch, target: Target) -> dict[str, Any]:
    """What `compiled` finds, or the reason why there is nothing, within `LIMIT_S`."""
    triton_key()  # a sum over the whole compiler, which is a part of every cache's key: once, and not in every child
    context = get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_child, args=(theirs, launch, target))
    process.start()
    theirs.close()
    try:
        if not ours.poll(LIMIT_S):
            return {"error": f"no end within {LIMIT_S} s"}
        return ours.recv()
    except EOFError:
        return {"error": "the compiler crashed"}
    finally:
        process.kill()
        process.join()


def launches(target: Target) -> dict[str, Launch]:
    """Every kernel that the specimens of a target launch, by specimen and function."""
    found = {}
    given = {**dict.fromkeys(CALLS, target.tiles), **dict.fromkeys(PRODUCTS, target.products)}
    for name, call in {**CALLS, **PRODUCTS}.items():
        if not target.takes(name):
            continue
        with Recorder() as recorder:
            call(given[name])
        for launch in recorder.launches:
            found[f"{name}/{launch.function.__name__.lstrip('_')}"] = launch
    return found


def main(name: str, path: str) -> None:
    target = TARGETS[name]
    results = {key: limited(launch, target) for key, launch in launches(target).items()}
    Path(path).write_text(json.dumps({"triton": triton.__version__, "target": name, "kernels": results}, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
