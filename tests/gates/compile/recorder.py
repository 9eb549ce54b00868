"""What would be launched: kernels are called as ever, and the compiler's input is taken down instead of run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from triton.runtime.jit import JITFunction

NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float8_e4m3fn: "fp8e4nv",
}
OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "launch_pdl")


@dataclass
class Launch:
    """One kernel with the types, constants and options of a call."""

    function: JITFunction
    signature: dict[str, str] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    attributes: dict[tuple[int, ...], list[list[Any]]] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


def describe(function: JITFunction, args: tuple[Any, ...], named: dict[str, Any]) -> Launch:
    """The specialization that Triton's launcher would make of a call: 1 is a constant, multiples of 16 are told."""
    launch = Launch(function)
    given = dict(zip(function.arg_names, args), **named)
    for i, parameter in enumerate(function.params):
        name = parameter.name
        value = given.pop(name) if name in given else parameter.default
        if parameter.is_constexpr or value is None:
            launch.signature[name], launch.constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            launch.signature[name] = f"*{NAMES[value.dtype]}"
            launch.attributes[(i,)] = [["tt.divisibility", 16]]
        elif hasattr(value, "block_shape"):
            inner = f"{NAMES[value.base.dtype]}{list(value.block_shape)}"
            layout = f",{value.layout!r}" if getattr(value, "layout", None) is not None else ""
            launch.signature[name] = f"tensordesc<{inner}{layout}>"
        elif isinstance(value, int) and value == 1:
            launch.signature[name], launch.constants[name] = "constexpr", 1
        elif isinstance(value, int):
            launch.signature[name] = "i32"
            if value % 16 == 0:
                launch.attributes[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            launch.signature[name] = "fp32"
        else:
            raise TypeError(f"{function.__name__}: argument {name} is {type(value).__name__}")
    launch.options = {name: named[name] for name in OPTIONS if name in named}
    given = {name: value for name, value in given.items() if name not in OPTIONS}
    assert not given, f"{function.__name__}: unknown arguments {sorted(given)}"
    return launch


class Recorder:
    """A context in which no kernel runs; `launches` holds what was called."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []

    def __enter__(self) -> Recorder:
        self._run = JITFunction.run

        def run(function: JITFunction, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
            self.launches.append(describe(function, args, named))

        JITFunction.run = run
        return self

    def __exit__(self, *_: object) -> None:
        JITFunction.run = self._run
