"""A whole backend: torch on the host, two kernels, a weight packing and a KV layout that nobody else has."""

import torch
import torch.nn.functional as F

from inferplane import plugin

INFERPLANE_API, KERNELS = (1, 0), plugin.Kernels()
WHOLE = plugin.When(kv_layouts=("toy_32",), needs=(("no window", lambda op: op.kv.window is None),))
PLAIN = plugin.When(needs=(("a plain product", lambda op: not (op.bias or op.act or op.out_dtype)),))


@KERNELS("linear", "toy", rank=90, when=PLAIN, packs={"weight": plugin.Packing("toy.t", lambda w: w.t().contiguous())})
def linear(p, x):
    return x @ p.weight


@KERNELS("attention", "toy", rank=90, when=WHOLE)
def attention(p, q, batch, kv):
    q, out = q.transpose(0, 1), torch.zeros_like(q.transpose(0, 1))
    for a, b, n, table in batch.rows():
        k, v = kv.blocks[:, :, table].flatten(2, 3)[:, :, :n]
        seen = torch.ones(b - a, n, dtype=torch.bool).tril(n - (b - a))
        out[:, a:b] = F.scaled_dot_product_attention(q[:, a:b], k, v, seen, scale=p.scale, enable_gqa=True)
    return out.transpose(0, 1)


class ToyKV(plugin.LayerKV):
    layout, block_tokens = "toy_32", 32

    def __init__(self, request, blocks, dtype, device):
        self.request = request
        self.data = torch.zeros(2, request.heads, 32 * blocks + 1, request.dim, dtype=dtype)  # the last is slot -1
        self.blocks = self.data[:, :, :-1].unflatten(2, (blocks, 32))

    def write(self, slots, k, v):
        self.data[:, :, slots] = torch.stack((k, v)).transpose(1, 2)

    def read(self, table, tokens):
        return tuple(self.blocks[:, :, table].flatten(2, 3)[:, :, :tokens].transpose(1, 2))

    def copy_blocks(self, source, target):
        self.blocks[:, :, target] = self.blocks[:, :, source]

    def export(self, blocks):
        return (self.blocks[:, :, blocks].movedim(2, 0),)

    def load(self, blocks, stored):
        self.blocks[:, :, blocks] = stored[0].movedim(0, 2)


LAYOUT = plugin.KVLayout("toy_32", 32, ToyKV, lambda request, dtype: 32 * request.entries * dtype.itemsize)


class Toy(plugin.Backend):
    name, torch_device = "toy", plugin.HOST

    @classmethod
    def probe(cls):
        return plugin.Probe(plugin.Presence.AVAILABLE, "needs nothing but torch", devices=1)

    def open(self):
        return plugin.DeviceState(plugin.HOST, "a toy", "toy1", plugin.Features(["bf16"]), self.memory())

    def kernels(self):
        return KERNELS

    def kv_layouts(self, request, dtype):
        return (LAYOUT,) if request.kind == "gqa" and request.dim == request.v_dim else ()


@plugin.hookimpl
def inferplane_register_backends(register):
    register("toy", Toy)
