"""A torch device that exists in no machine: tensors that the host may not read, and that mix with no other.

Its tensors stand for the device's memory: every operator on them runs, and gives such a tensor. What a real accelerator
would make slow (`.item()`, `bool()`, `.tolist()`: a wait for the device) or wrong (a host's tensor among the device's)
raises here. The one way out is the one that core is allowed: `tensor.to(HOST)`. Fresh memory is full of NaN.

torch has one place for devices of others, PrivateUse1, and lets Python fill it. `torch.tensor` and `torch.as_tensor`
are the factories that torch does not hand on to Python (2.13 stops in an internal assertion); they are replaced by
functions that copy a host's tensor.

Source: torch.utils.backend_registration._setup_privateuseone_for_python_backend and its test in PyTorch.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = "privateuseone"
_WHERE = torch.device(DEVICE, 0)
_HOST = torch.device("cpu")
_ASKS = (
    "is_contiguous",
    "is_floating_point",
    "is_complex",
    "is_inference",
    "is_same_size",
    "size",
    "stride",
    "dim",
    "numel",
)
_COPIES = ("_to_copy", "to", "copy_", "_copy_from")


def supported() -> bool:
    """Whether this torch lets Python fill the place (from 2.9 on)."""
    return hasattr(torch._C, "_acc")


class ReadByHost(RuntimeError):
    """Core read a device tensor without copying it to the host first, or mixed it with a host's tensor."""


class Timeline:
    """When work is over that the device was given to do: each piece behind those before it, while the host goes on.
    `launch` adds seconds of it; the host's reads wait. Without any, the device is as fast as the host.
    """

    ready_at = 0.0

    def launch(self, seconds: float) -> None:
        self.ready_at = max(self.ready_at, time.perf_counter()) + seconds

    def wait(self, until: float | None = None) -> None:
        """Until all launched work is over, or what was launched when `ready_at` was `until`."""
        left = (self.ready_at if until is None else until) - time.perf_counter()
        if left > 0:
            time.sleep(left)


TIMELINE = Timeline()


class DeviceTensor(torch.Tensor):
    """A tensor of the device; `raw` is what lies in its memory, for the device's own kernels."""

    raw: torch.Tensor

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> DeviceTensor:
        with torch.inference_mode(False):  # so that torch lets operators make views of it in either mode
            made = torch.Tensor._make_wrapper_subclass(
                cls,
                raw.shape,
                strides=raw.stride(),
                storage_offset=raw.storage_offset(),
                dtype=raw.dtype,
                device=_WHERE,
            )
        made.raw = raw
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def _forbidden(self, *args: Any, **kwargs: Any) -> Any:
        raise ReadByHost("core reads a device tensor in place; copy it with tensor.to(HOST) first")

    tolist = numpy = __array__ = __dlpack__ = _forbidden

    def untyped_storage(self) -> Any:
        """Where and how large, which a host may know; not what is in it."""
        return self.raw.untyped_storage()

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def __repr__(self) -> str:
        return f"DeviceTensor({list(self.shape)}, {self.dtype})"


@functools.cache
def start() -> None:
    """Make the device known to this process, once."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend()
    start.library = torch.library.Library("_", "IMPL")  # type: ignore[attr-defined]  # lives as long as the process
    start.library.fallback(lambda op, *args, **kwargs: _run(op, args, kwargs), "PrivateUse1")  # type: ignore[attr-defined]
    start.factories = torch.library.Library("aten", "IMPL")  # type: ignore[attr-defined]
    for overload in ("arange", "arange.start", "arange.start_step"):
        # The usual way would resize the result, and a wrapper cannot follow.
        start.factories.impl(overload, _arange, "PrivateUse1")  # type: ignore[attr-defined]
    for name in ("tensor", "as_tensor"):
        setattr(torch, name, _copied(getattr(torch, name)))


def _copied(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def made(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        if device is None or torch.device(device).type != DEVICE:
            return factory(*args, device=device, **kwargs)
        return factory(*args, **kwargs).to(device)

    return made


def _arange(*args: Any, device: Any = None, pin_memory: Any = None, **kwargs: Any) -> DeviceTensor:
    return DeviceTensor(torch.arange(*args, **kwargs))


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """An operator on the device's memory."""
    name = func._schema.name.removeprefix("aten::")
    given = tree_leaves((args, kwargs))
    if name not in _COPIES:
        for t in given:
            if isinstance(t, torch.Tensor) and not isinstance(t, DeviceTensor) and t.dim():
                raise ReadByHost(f"{func} mixes a host tensor {list(t.shape)} with the device's")
    to_host = name in _COPIES and any(d.type == "cpu" for d in given if isinstance(d, torch.device))
    wrappers = {id(t.raw): t for t in given if isinstance(t, DeviceTensor)}
    lower = functools.partial(tree_map, _lower)
    out = func(*lower(args), **lower(kwargs))
    if to_host or (name == "copy_" and not isinstance(args[0], DeviceTensor)):
        TIMELINE.wait()
    if name.startswith(("empty", "new_empty")) and out.is_floating_point():
        out.fill_(float("nan"))
    if name == "copy_" and not isinstance(args[0], DeviceTensor):
        return args[0]
    if to_host:
        return out.clone() if id(out) in wrappers else out
    if isinstance(out, (bool, int, float, complex)) and name not in _ASKS:
        raise ReadByHost(f"{func} reads a device tensor; copy it with tensor.to(HOST) first")
    return tree_map(lambda t: wrappers[id(t)] if id(t) in wrappers else lifted(t), out)


def _lower(value: Any) -> Any:
    if isinstance(value, DeviceTensor):
        return value.raw
    return _HOST if isinstance(value, torch.device) and value.type == DEVICE else value


def lowered(value: Any) -> Any:
    """What lies in the device's memory, for its kernels."""
    return tree_map(_lower, value)


def lifted(value: Any) -> Any:
    """The other way round: a kernel's results as tensors of the device."""
    return tree_map(lambda t: DeviceTensor(t) if isinstance(t, torch.Tensor) else t, value)
