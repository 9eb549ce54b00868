"""A whole backend: torch on the host, two kernels, a weight packing and a KV layout that nobody else has."""

import torch
import torch.nn.functional as F
from inferplane.plugin import HOST, Presence, When, hookimpl
from inferplane.plugin import Backend, DeviceState, Features, Kernels, KVLayout, LayerKV, Packing, Probe

INFERPLANE_API = (1, 0)
KERNELS = Kernels()
PLAIN = When(needs=(("a plain product", lambda op: op.bias is None and op.act is None and op.out_dtype is None),))


@KERNELS("linear", "toy", rank=90, when=PLAIN, packs={"weight": Packing("toy.t", lambda w: w.t().contiguous())})
def linear(p, x):
    return x @ p.weight


@KERNELS("attention", "toy", rank=90, when=When(kv_layouts=("toy_32",)))
def attention(p, q, batch, kv):
    out = torch.zeros_like(q)
    for start, stop, tokens, table in batch.rows():
        k, v = kv.heads_first(table, tokens).to(q.dtype)
        place = torch.arange(tokens)
        seen = place <= place[start - stop :, None]
        o = F.scaled_dot_product_attention(q[start:stop].transpose(0, 1), k, v, seen, scale=p.scale, enable_gqa=True)
        out[start:stop] = o.transpose(0, 1)
    return out


class ToyKV(LayerKV):
    layout, block_tokens = "toy_32", 32

    def __init__(self, request, blocks, dtype, device):
        self.request = request
        self.data = torch.zeros(2, request.heads, 32 * blocks + 1, request.dim, dtype=dtype)  # the last is slot -1
        self.blocks = self.data[:, :, :-1].unflatten(2, (blocks, 32))

    def heads_first(self, table, tokens):
        return self.blocks[:, :, table].flatten(2, 3)[:, :, :tokens]

    def write(self, slots, k, v):
        self.data[:, :, slots] = torch.stack((k, v)).transpose(1, 2)

    def read(self, table, tokens):
        return tuple(self.heads_first(table, tokens).transpose(1, 2))

    def copy_blocks(self, source, target):
        self.blocks[:, :, target] = self.blocks[:, :, source]

    def export(self, blocks):
        return (self.blocks[:, :, blocks].movedim(2, 0),)

    def load(self, blocks, stored):
        self.blocks[:, :, blocks] = stored[0].movedim(0, 2)


LAYOUT = KVLayout("toy_32", 32, ToyKV, lambda request, dtype: 32 * request.entries * dtype.itemsize)


class Toy(Backend):
    name, torch_device = "toy", HOST

    @classmethod
    def probe(cls):
        return Probe(Presence.AVAILABLE, "needs nothing but torch", devices=1)

    def open(self):
        return DeviceState(HOST, "a toy", "toy1", Features(["bf16"]), self.memory())

    def kernels(self):
        return KERNELS

    def kv_layouts(self, request, dtype):
        return (LAYOUT,) if request.kind == "gqa" and request.dim == request.v_dim else ()


@hookimpl
def inferplane_register_backends(register):
    register("toy", Toy)
