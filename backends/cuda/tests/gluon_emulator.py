"""Gluon kernels on the host: their own source, run with stand-ins for what Gluon offers.

Programs run one after another; the partitions of a program run as threads that meet at barriers, which count arrivals
and bytes by phases as the hardware does. Copies and products that the hardware makes some time between issue and wait
are made at once (`late=False`) or as late as they may be (`late=True`): a kernel that reads too early, or overwrites
what is still in use, goes wrong in one of the two. What this cannot show: layouts, fences, and speed.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import threading
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

DEADLOCK_S = 60
HERE = threading.local()
STATE = SimpleNamespace(late=False, program=(0, 0, 0), programs=(1, 1, 1))


def number(x: Any) -> torch.Tensor:
    return x if isinstance(x, torch.Tensor) else torch.as_tensor(x)


class Pointer:
    """An address into a tensor, or a block of addresses."""

    def __init__(self, tensor: torch.Tensor, offset: Any = 0) -> None:
        self.tensor, self.offset = tensor, offset

    dtype = property(lambda self: SimpleNamespace(element_ty=self.tensor.dtype))

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.tensor, self.offset + more)

    def flat(self) -> torch.Tensor:
        memory = torch.empty(0, dtype=self.tensor.dtype).set_(self.tensor.untyped_storage())
        return memory[self.tensor.storage_offset() :]


def load(pointer: Pointer, mask: Any = None, other: Any = 0, cache_modifier: str = "") -> torch.Tensor:
    place, memory = number(pointer.offset).long(), pointer.flat()
    if mask is None:
        assert bool((place >= 0).all()) and bool((place < len(memory)).all()), "a load outside of its tensor"
        return memory[place].clone()
    mask, place = torch.broadcast_tensors(mask, place)
    assert bool((place[mask] >= 0).all()) and bool((place[mask] < len(memory)).all()), "a load outside of its tensor"
    out = torch.full(place.shape, other, dtype=memory.dtype)
    out[mask] = memory[place[mask]]
    return out


def store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    place, memory = number(pointer.offset).long(), pointer.flat()
    place, value = torch.broadcast_tensors(place, number(value).to(memory.dtype))
    keep = torch.ones_like(place, dtype=torch.bool) if mask is None else torch.broadcast_to(mask, place.shape)
    assert bool((place[keep] >= 0).all()) and bool((place[keep] < len(memory)).all()), "a store outside of its tensor"
    memory[place[keep]] = value[keep]


def atomic_add(pointer: Pointer, value: Any, sem: str = "") -> torch.Tensor:
    """Programs run one after another, and one thread of them does it."""
    before = load(pointer)
    store(pointer, before + value)
    return before


class Shared:
    """Shared memory: a tensor, and views of it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    dtype = property(lambda self: self.tensor.dtype)
    shape = property(lambda self: self.tensor.shape)

    def index(self, i: Any) -> Shared:
        return Shared(self.tensor[int(i)])

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.tensor.permute(order))

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.tensor.narrow(dim, start, length))

    def reinterpret(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Shared:
        assert list(self.tensor.shape) == shape, "only the type changes here"
        return Shared(self.tensor.view(dtype))

    def load(self, layout: Any = None) -> torch.Tensor:
        return self.tensor.clone()

    def store(self, value: torch.Tensor) -> None:
        assert value.shape == self.tensor.shape, "a store of another shape"
        self.tensor.copy_(value)


class Barrier:
    """Counts arrivals and bytes; a phase ends when all of both have come."""

    def __init__(self) -> None:
        self.count = self.left = self.bytes = self.phase = 0
        self.changed = threading.Condition()
        self.copies: list[Any] = []

    def index(self, i: Any) -> Barrier:
        return self

    def turn(self, arrivals: int, nbytes: int) -> None:
        with self.changed:
            self.left -= arrivals
            self.bytes += nbytes
            assert self.left >= 0, "more arrivals than the barrier was made for"
            if self.left == 0 and self.bytes == 0:
                self.phase, self.left = self.phase + 1, self.count
                self.changed.notify_all()

    def deliver(self) -> None:
        with self.changed:
            copies, self.copies = self.copies, []
        for copy in copies:
            copy()


class Barriers:
    def __init__(self, n: int) -> None:
        self.each = [Barrier() for _ in range(n)]

    def index(self, i: Any) -> Barrier:
        return self.each[int(i)]


def only(barrier: Any) -> Barrier:
    return barrier.each[0] if isinstance(barrier, Barriers) else barrier


def init(barrier: Any, count: int) -> None:
    b = only(barrier)
    b.count = b.left = count


def wait_barrier(barrier: Any, phase: Any) -> None:
    b = only(barrier)
    b.deliver()
    with b.changed:
        while b.phase % 2 == int(phase):
            if not b.changed.wait(0.02):
                if b.copies:
                    b.changed.release()
                    b.deliver()
                    b.changed.acquire()
                HERE.waited = getattr(HERE, "waited", 0) + 1
                if HERE.waited > DEADLOCK_S * 50 or STATE.failed:
                    raise TimeoutError("a barrier that nobody completes")
    HERE.waited = 0


def copy_box(desc: Any, at: list[Any], barrier: Any, target: Shared) -> None:
    b, (row, column) = only(barrier), (int(at[0]), int(at[1]))
    rows, columns = desc.block_shape

    def copy() -> None:
        box = desc.tensor[max(row, 0) : row + rows, column : column + columns]
        target.tensor.zero_()
        target.tensor[: box.shape[0], : box.shape[1]] = box
        b.turn(0, -target.tensor.numel() * target.tensor.element_size())

    if STATE.late:
        target.tensor.view(torch.uint8).fill_(0xFF)
        with b.changed:
            b.copies.append(copy)
            b.changed.notify_all()
    else:
        copy()


class Product:
    """A product that was issued and not waited for."""

    def __init__(self, a: Any, b: Shared, acc: Any, use_acc: bool) -> None:
        self.a, self.b, self.acc, self.use_acc, self.value = a, b, acc, use_acc, None

    def result(self) -> torch.Tensor:
        if self.value is None:
            acc = self.acc.result() if isinstance(self.acc, Product) else self.acc
            a = self.a.tensor if isinstance(self.a, Shared) else self.a
            product = a.float() @ self.b.tensor.float()
            self.value = acc + product if self.use_acc else product
        return self.value


def mma(a: Any, b: Shared, acc: Any, *, use_acc: Any = True, is_async: bool = False, **_: Any) -> Any:
    product = Product(a.clone() if isinstance(a, torch.Tensor) else a, b, acc, bool(use_acc))
    if not is_async:
        return product.result()
    HERE.issued = [*getattr(HERE, "issued", []), product]
    if not STATE.late:
        product.result()
    return product


def mma_wait(outstanding: int = 0, deps: tuple[Any, ...] = ()) -> Any:
    issued = getattr(HERE, "issued", [])
    ready, HERE.issued = issued[: len(issued) - outstanding], issued[len(issued) - outstanding :]
    for product in ready:
        product.result()
    values = tuple(d if d in HERE.issued else d.result() if isinstance(d, Product) else d for d in deps)
    return values[0] if len(values) == 1 else values


def specialize(parts: list[tuple[Any, tuple[Any, ...]]], warps: list[int], registers: list[int]) -> None:
    assert len(parts) == len(warps) + 1 == len(registers) + 1
    errors: list[BaseException] = []

    def run(function: Any, args: tuple[Any, ...]) -> None:
        try:
            function(*(a.clone() if isinstance(a, torch.Tensor) else a for a in args))  # `x += 1` makes a new value
        except BaseException as error:
            STATE.failed = True
            errors.append(error)

    threads = [threading.Thread(target=run, args=part, daemon=True) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLOCK_S * 3)
        assert errors or not thread.is_alive(), "a partition that does not end"
    if errors:
        raise next((e for e in errors if not isinstance(e, TimeoutError)), errors[0])


class Kernel:
    """What `jit` makes of a function: called inside a kernel it is that function, with `[grid]` it is launched."""

    def __init__(self, function: Any) -> None:
        self.function, self.__name__ = function, function.__name__

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.function(*args, **named)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **named: Any) -> None:
            parameters = inspect.signature(self.function).parameters
            given = [self._given(a) for a in args]
            named = {name: value for name, value in named.items() if name in parameters}
            STATE.programs, STATE.failed = (*grid, 1, 1)[:3], False
            x, y, z = STATE.programs
            for i in range(x * y * z):
                STATE.program = (i % x, i // x % y, i // (x * y))
                self.function(*given, **named)

        return launch

    @staticmethod
    def _given(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return Pointer(value)
        return torch.tensor(value) if isinstance(value, (int, float)) else value


class Descriptor:
    def __init__(self, tensor: torch.Tensor, block_shape: list[int]) -> None:
        assert tensor.stride(-1) == 1 and tensor.stride(0) * tensor.element_size() % 16 == 0, "TMA cannot read it"
        self.tensor, self.block_shape, self.dtype = tensor, block_shape, tensor.dtype

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor, block_shape: list[int], layout: Any) -> Descriptor:
        return cls(tensor, block_shape)


def shared_memory(dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
    if layout == "barrier":
        return Barriers(shape[0])
    memory = torch.empty(*shape, dtype=dtype)
    memory.view(torch.uint8).fill_(0xFF)
    return Shared(memory)


def scan(x: torch.Tensor, axis: int, function: Any) -> torch.Tensor:
    values = list(x.unbind(axis))
    for i in range(1, len(values)):
        values[i] = function(values[i - 1], values[i])
    return torch.stack(values, axis)


def either(condition: Any, a: Any, b: Any) -> torch.Tensor:
    return torch.where(number(condition), number(a), number(b))


def language() -> ModuleType:
    """What stands for `triton.language` and Gluon's."""
    made = ModuleType("language")
    made.__dict__.update(
        load=load, store=store, where=either, atomic_add=atomic_add, zeros_like=torch.zeros_like,
        allocate_shared_memory=shared_memory, warp_specialize=specialize,
        associative_scan=scan, constexpr=lambda x: x, static_range=range, barrier=lambda: None,
        inline_asm_elementwise=lambda asm, constraints, args, **_: args[0],
        convert_layout=lambda x, layout: x, program_id=lambda axis: torch.tensor(STATE.program[axis]),
        num_programs=lambda axis: torch.tensor(STATE.programs[axis]),
        arange=lambda a, b, layout=None: torch.arange(a, b),
        full=lambda shape, value, dtype, layout=None: torch.full(shape, value, dtype=dtype),
        zeros=lambda shape, dtype, layout=None: torch.zeros(shape, dtype=dtype),
        maximum=lambda a, b: torch.maximum(*torch.broadcast_tensors(number(a), number(b))),
        minimum=lambda a, b: torch.minimum(*torch.broadcast_tensors(number(a), number(b))),
        max=lambda x, axis: x.amax(axis), sum=lambda x, axis: x.sum(axis),
        exp2=lambda x: torch.exp2(number(x)), log2=lambda x: torch.log2(number(x)),
        cdiv=lambda a, b: torch.div(number(a) + b - 1, b, rounding_mode="trunc"),
        NVMMASharedLayout=lambda **_: None, SwizzledSharedLayout=lambda *_: None,
        SliceLayout=lambda *_: None, BlockedLayout=lambda *_: None,
        NVMMADistributedLayout=lambda *_: None, DotOperandLayout=lambda *_: None,
        shared_memory_descriptor=Shared,
        bfloat16=torch.bfloat16, float16=torch.float16, float32=torch.float32, int16=torch.int16, int32=torch.int32,
        int64=torch.int64, uint8=torch.uint8, float8e4nv=torch.float8_e4m3fn,
    )  # fmt: skip
    return made


def stand_ins() -> dict[str, ModuleType]:
    """Modules by name, as kernels import them."""
    names = ("triton", "triton.experimental", "triton.experimental.gluon", "triton.experimental.gluon.nvidia",
             "triton.experimental.gluon.nvidia.hopper", "triton.experimental.gluon.language.nvidia",
             "triton.experimental.gluon.language.nvidia.hopper")  # fmt: skip
    made = {name: ModuleType(name) for name in names}
    made["triton.language"] = made["triton.experimental.gluon.language"] = language()
    made["triton"].__dict__.update(
        jit=Kernel, language=made["triton.language"], cdiv=lambda a, b: -(-a // b),
        next_power_of_2=lambda n: 1 << (n - 1).bit_length(),
    )  # fmt: skip
    gluon = made["triton.experimental.gluon"]
    gluon.__dict__.update(jit=Kernel, language=made["triton.experimental.gluon.language"])
    made["triton.experimental"].gluon = gluon
    made["triton.experimental.gluon.nvidia.hopper"].TensorDescriptor = Descriptor
    barriers = SimpleNamespace(
        init=init, wait=wait_barrier, MBarrierLayout=lambda: "barrier",
        expect=lambda b, nbytes: only(b).turn(1, nbytes), arrive=lambda b, count=1: only(b).turn(count, 0),
    )  # fmt: skip
    made["triton.experimental.gluon.language.nvidia.hopper"].__dict__.update(
        mbarrier=barriers, tma=SimpleNamespace(async_load=copy_box), fence_async_shared=lambda: None,
        warpgroup_mma=mma, warpgroup_mma_wait=mma_wait,
    )  # fmt: skip
    return made


@contextmanager
def emulated(package: str, *modules: str) -> Any:
    """Modules of `package`, imported anew over the stand-ins; nothing of that stays behind."""
    mine = stand_ins()

    def compiled(name: str) -> bool:
        return name.split(".")[0] == "triton" or name.startswith((package, "inferplane.kernels.triton."))

    before = {name: module for name, module in sys.modules.items() if compiled(name)}
    for name in before:
        del sys.modules[name]
    sys.modules.update(mine)
    try:
        yield [importlib.import_module(f"{package}.{name}") for name in modules]
    finally:
        for name in filter(compiled, list(sys.modules)):
            del sys.modules[name]
        sys.modules.update(before)
