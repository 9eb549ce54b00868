"""A plugin of API 1.0 that runs all layers in one call, and a model's step in one call. FROZEN, as `plugin_v1_0.py`.

Its layers are the meaning of the op over the kernel's own view, so that results can be compared to the last bit.
"""

import types

import torch

from inferplane.plugin import HOST, Backend, DeviceState, Features, Kernels, KVCache, Presence, Probe, When, hookimpl

INFERPLANE_API = (1, 0)

kernels = Kernels()
calls = []
FORMATS = ("plain", "fp8_block", "int8_group")


def callable_layer(op, view):
    """The op's meaning, given what the view holds."""
    self = types.SimpleNamespace()
    for name in op.fields():
        child, seen = getattr(op, name), getattr(view, name)
        setattr(self, name, callable_layer(child, seen) if hasattr(child, "fields") else seen)
    return types.MethodType(type(op).__call__, self)


def keep_op(op, ctx):
    return op


def run_layer(op, x, residual, batch, kv):
    if not hasattr(op, "layer"):
        op.layer = callable_layer(op.prepared, op)
    return op.layer(x, residual, batch, kv)


def chain(views, x, residual, batch, caches):
    calls.append("chain")
    for view, kv in zip(views, caches):
        x, residual = run_layer(view, x, residual, batch, kv)
    return x, residual


def whole(model, batch, cache):
    if batch.tokens > 2:
        return None
    calls.append("whole")
    x, residual = model.layers.chain(model.embed(batch.ids), None, batch, cache.layers)
    assert len(model.layers) == len(model.layers.chain.__self__)
    hidden, _ = model.norm(x, residual)
    return model.head(hidden, batch), hidden


def one_layer(op, x, residual, batch, kv):
    calls.append("layer")
    return run_layer(op, x, residual, batch, kv)


@kernels(
    "decoder_layer",
    "old",
    rank=90,
    when=When(formats=FORMATS, step_kinds=("decode",)),
    prepare=keep_op,
    chain=chain,
    whole=whole,
)
def few(op, x, residual, batch, kv):
    return one_layer(op, x, residual, batch, kv)


@kernels("decoder_layer", "old", rank=90, when=When(formats=FORMATS, step_kinds=("mixed",)), prepare=keep_op)
def many(op, x, residual, batch, kv):
    return one_layer(op, x, residual, batch, kv)


class ChainBackend(Backend):
    name = "chained"
    torch_device = HOST

    @classmethod
    def probe(cls):
        return Probe(Presence.AVAILABLE, "as of 1.0", devices=1)

    def open(self):
        return DeviceState(self.torch_device, "chained", "chained1", Features(), self.memory())

    def kernels(self):
        return kernels

    def build_kv_cache(self, requests, layouts, blocks, dtype):
        made = super().build_kv_cache(requests, layouts, blocks, dtype)
        return KVCache(made.layers, made.blocks, made.block_tokens, {"scratch": torch.zeros(1)})


@hookimpl
def inferplane_register_backends(register):
    register("chained", ChainBackend)
