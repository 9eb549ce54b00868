"""A plugin written for plugin API 1.0, as its author left it. FROZEN: never edited, whatever becomes of Inferplane.

It uses everything that 1.0 promises. When a change in core breaks it, the change breaks strangers' wheels: either core
keeps the promise, or the major of `API_VERSION` goes up and `test_frozen_plugins.py` says so.
"""

import torch

from inferplane.plugin import (
    CANONICAL,
    HOST,
    RANK_TUNED,
    Backend,
    DeviceState,
    Feature,
    Features,
    Kernel,
    Kernels,
    KVLayout,
    LayerKV,
    Memory,
    Packing,
    Presence,
    Probe,
    UsageError,
    When,
    hookimpl,
    host_memory,
    paged_layout,
)

INFERPLANE_API = (1, 0)

kernels = Kernels()
transposed = Packing("frozen.transposed", lambda weight: weight.t().contiguous())


@kernels("linear", "frozen", rank=RANK_TUNED, packs={"weight": transposed}, when=When(dtypes=(torch.float32,)))
def linear(op, x):
    return x @ op.weight


@kernels(
    "rms_norm",
    "frozen",
    rank=RANK_TUNED,
    packs={"weight": CANONICAL},
    when=When(step_kinds=("decode",), features=("bf16",), needs=(("a small eps", lambda op: op.eps < 1),)),
    prepare=lambda op, ctx: (ctx.dtype, ctx.step_kind),
    capture_safe=True,
    batch_invariant=True,
    note="as of 1.0",
)
def rms_norm(op, x):
    y = x.float()
    return (y * (y.pow(2).mean(-1, keepdim=True) + op.eps).rsqrt()).to(x.dtype) * op.weight


def attention(op, q, cache, batch):
    for row in batch.rows():
        cache.read(row.table, row.tokens)
    return q


class HeadsFirst(LayerKV):
    """`[blocks, heads, block_tokens, dim]`, K and V side by side in the last dimension."""

    layout = "frozen_heads_first"

    def __init__(self, request, blocks, dtype, device):
        self.request, self.block_tokens = request, 8
        shape = (blocks, request.heads, self.block_tokens, request.dim + request.v_dim)
        self.data = torch.zeros(shape, dtype=dtype, device=device)

    def write(self, slots, *values):
        keep = slots >= 0
        slots, value = slots[keep], torch.cat([v[keep] for v in values], -1)
        self.data[slots // self.block_tokens, :, slots % self.block_tokens] = value

    def read(self, table, tokens):
        rows = self.data[table.long()].transpose(1, 2).flatten(0, 1)[:tokens]
        return rows.split([self.request.dim, self.request.v_dim], -1)

    def copy_blocks(self, source, target):
        self.data[target] = self.data[source]

    def export(self, blocks):
        return (self.data[blocks].to(HOST),)

    def load(self, blocks, stored):
        if stored[0].shape[1:] != self.data.shape[1:]:
            raise UsageError("These blocks are of another layout.", there_is="heads first", remedy="export them again")
        self.data[blocks] = stored[0].to(self.data)


def heads_first_bytes(request, dtype):
    return 8 * request.entries * dtype.itemsize


class FrozenBackend(Backend):
    name = "frozen"
    torch_device = HOST
    architectures = {"frozen1": ("bf16",), "frozen0": ()}
    auto_rank = -100

    @classmethod
    def probe(cls):
        return Probe(Presence.AVAILABLE, "frozen in 1.0", versions={"frozen": "1.0"}, devices=1)

    def open(self):
        features = Features({"bf16": Feature(True, "always"), "fp8": Feature(None, "nobody knows")})
        return DeviceState(self.torch_device_indexed, "the frozen device", "frozen1", features, self.memory())

    def kernels(self):
        return [
            *kernels,
            Kernel("attention", "frozen", f"{__name__}:attention", When(kv_layouts=("frozen_heads_first",)), 50),
        ]

    def kv_layouts(self, request, dtype):
        if request.kind == "mla":
            return [paged_layout(8), paged_layout(8, "int8")]
        return [KVLayout("frozen_heads_first", 8, HeadsFirst, heads_first_bytes)]

    def memory(self):
        return Memory(min(2**30, host_memory().total_bytes), 2**20)

    def synchronize(self):
        pass


seen = []


@hookimpl
def inferplane_register_backends(register):
    register("frozen", FrozenBackend)
    register("frozenfam:lazy", f"{__name__}:LazyBackend")


class LazyBackend(FrozenBackend):
    name = "frozenfam:lazy"

    @classmethod
    def probe(cls):
        return Probe(Presence.ABSENT, "there is no such hardware", "wait for it")


def more_kernels():
    return [Kernel("silu_mul", "frozen-more", f"{__name__}:linear")]


@hookimpl
def inferplane_register_kernels(register):
    register("frozen", f"{__name__}:more_kernels")
    register("frozen", [Kernel("rope", "frozen-more", linear)])


@hookimpl
def inferplane_register_quantization(register):
    register("frozen-q4", f"{__name__}:read_q4")


@hookimpl
def inferplane_register_models(register):
    register("FrozenForCausalLM", f"{__name__}:build")


@hookimpl
def inferplane_on_event(event):
    seen.append((event.name, dict(event.facts)))


@hookimpl(optionalhook=True)
def inferplane_register_things_of_later_versions(register):
    raise AssertionError("not of 1.0")
