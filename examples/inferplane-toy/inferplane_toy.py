"""A complete backend that computes with torch on the host: two kernels, a weight packing and its own KV layout."""

import torch
import torch.nn.functional as F

from inferplane.plugin import (
    HOST,
    Backend,
    DeviceState,
    Features,
    Kernels,
    KVLayout,
    LayerKV,
    Packing,
    Presence,
    Probe,
    When,
    hookimpl,
)

INFERPLANE_API = (1, 1)
BLOCK_TOKENS = 32

kernels = Kernels()
transposed = Packing("toy.transposed", lambda weight: weight.t().contiguous())


# 4. Kernels


def has_no_window(op):
    return op.kv.window is None


def is_plain_product(op):
    return op.bias is None and op.activation_quant is None and op.out_dtype is None


@kernels(
    "linear",
    "toy",
    rank=90,
    packs={"weight": transposed},
    when=When(needs=(("a plain product", is_plain_product),)),
)
def linear(view, x):
    return x @ view.weight


@kernels(
    "attention",
    "toy",
    rank=90,
    when=When(kv_layouts=("toy_32",), needs=(("no window", has_no_window),)),
)
def attention(view, q, batch, kv):
    q = q.transpose(0, 1)
    out = torch.zeros_like(q)
    for start, stop, tokens, table in batch.rows():
        k, v = kv.blocks[:, :, table].flatten(2, 3)[:, :, :tokens]
        queries = stop - start
        visible = torch.ones(queries, tokens, dtype=torch.bool).tril(tokens - queries)
        rows = q[:, start:stop]
        out[:, start:stop] = F.scaled_dot_product_attention(rows, k, v, visible, scale=view.scale, enable_gqa=True)
    return out.transpose(0, 1)


# 3. KV cache


class ToyKV(LayerKV):
    layout = "toy_32"
    block_tokens = BLOCK_TOKENS

    def __init__(self, request, blocks, dtype, device):
        self.request = request
        slots = blocks * BLOCK_TOKENS
        # K and V, heads before tokens; slot -1 (padding) is one extra slot at the end.
        self.data = torch.zeros(2, request.heads, slots + 1, request.dim, dtype=dtype)
        self.blocks = self.data[:, :, :slots].unflatten(2, (blocks, BLOCK_TOKENS))

    def write(self, slots, k, v):
        self.data[:, :, slots] = torch.stack((k, v)).transpose(1, 2)

    def read(self, table, tokens):
        return tuple(self.blocks[:, :, table].flatten(2, 3)[:, :, :tokens].transpose(1, 2))


def bytes_per_block(request, dtype):
    return BLOCK_TOKENS * request.entries * dtype.itemsize


# 2. The device


class Toy(Backend):
    name = "toy"
    torch_device = HOST

    @classmethod
    def probe(cls):
        return Probe(Presence.AVAILABLE, "needs nothing but torch", devices=1)

    def open(self):
        return DeviceState(HOST, "a toy", "toy1", Features(["bf16"]), self.memory())

    def kernels(self):
        return kernels

    def kv_layouts(self, request, dtype):
        if request.kind == "gqa" and request.dim == request.v_dim:
            return [KVLayout("toy_32", BLOCK_TOKENS, ToyKV, bytes_per_block)]
        return []


# 1. Registration


@hookimpl
def inferplane_register_backends(register):
    register("toy", Toy)
