"""A model's decoder layers as one native call; a step of few tokens, with embedding, last norm and head, as one call.

Streaming the weights evicts everything else from the CPU caches, so every line of Python between native calls is
fetched from memory and takes several times as long as in a loop of its own.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch

from inferplane.plugin import RANK_PORTABLE, Batch, Kernels, KVCache, LayerKV, ModelOutput, When
from inferplane_cpu.kernels import layer, linear
from inferplane_cpu.kernels.attention import native_cache
from inferplane_cpu.kernels.layer_description import native_layer, native_step
from inferplane_cpu.kernels.rowwise import native_norm
from inferplane_cpu.native import BF16, Cache, Matrix, Model, ModelIO, library

KERNELS = Kernels()
MAX_TOKENS = 8
"""Tokens of a step at most; csrc: kMaxDecodeRows."""
DECODE = When(step_kinds=("decode",), features=("native",))
STACK = replace(DECODE, extensions=("decoder_stack.several_tables", "residual_layer", *layer.EXTENSIONS))
LAYERS = tuple(kernel.name for kernel in layer.KERNELS if kernel.when.step_kinds == ("decode",))
PARTS = {
    "embed": ("torch:embedding", "native:embedding_panels"),
    "layers": ("native:decoder_stack",),
    "norm": ("native:add_rms_norm",),
    "head": tuple(kernel.name for kernel in linear.HEAD_KERNELS),
}


def _on_one_rank(op: Any) -> bool:
    return op.gather is None


def _has_bf16_rows(op: Any) -> bool:
    return op.embed.weight.dtype in (None, torch.bfloat16)


class NativeStack:
    """All layers of a model as the library reads them, and their caches as they were at the last call.

    Args:
        view: of a stack whose layers are bound to `LAYERS`.
    """

    def __init__(self, view: Any) -> None:
        self.count = len(view.layers)
        layers = [native_layer(v, False) for v in view.layers]
        self.layers = (ctypes.c_void_p * self.count)(*map(ctypes.addressof, layers))
        self._windows = [layer.window for layer in layers]
        self._described: tuple[LayerKV, ...] | None = None
        self._caches: Any = None
        self._tables: tuple[int, ...] | None = None
        self._runs: list[tuple[int, int, int]] = []

    def find_runs(self, tables: tuple[int, ...]) -> list[tuple[int, int, int]]:
        """First layer, number of layers and block table of each run of layers with the same table and window."""
        if self._tables != tables or not self._runs:
            groups = groupby(range(self.count), key=lambda i: (tables[i] if tables else 0, self._windows[i]))
            self._runs = [(layers[0], len(layers), table) for (table, _), layers in ((k, [*g]) for k, g in groups)]
            self._tables = tables
        return self._runs

    def caches(self, caches: tuple[LayerKV, ...]) -> Any:
        """An array of `Cache`, one a layer."""
        if self._described is not caches:
            self._caches = (Cache * self.count)(*(native_cache(kv) for kv in caches[: self.count]))
            self._described = caches
        return self._caches


def native_stack(view: Any) -> NativeStack:
    """The layers of a stack, described once."""
    found: NativeStack = view.once("inferplane_cpu.stack", NativeStack, view)
    return found


class NativeModel:
    """A model as the library reads it.

    Attributes: `stack`, its layers; `model`; `uniform`, False once the library found layers of two kinds in it, which
    it does not take in one call.

    Args:
        view: of a model whose parts are bound to `PARTS`.
    """

    def __init__(self, view: Any) -> None:
        self.stack, self.uniform = native_stack(view.layers), True
        rows = view.embed.weight
        if isinstance(rows, torch.Tensor):  # of which a step reads a few: no need of huge pages
            embed = Matrix(BF16, 0, *rows.shape, rows.stride(0), rows.data_ptr(), None, None, None)
        else:
            embed = linear.matrix_of(view.embed)
        self._embed, self._head = embed, linear.matrix_of(view.head)
        layers = ctypes.addressof(self.stack.layers)
        self.model = Model(layers, self.stack.count, self._embed, self._head, native_norm(view.norm.norm))
        self.vocab, self.width = self._head.n, self._head.k


@KERNELS("decoder_stack", "native", when=STACK, rank=RANK_PORTABLE, inlines={"*": LAYERS}, batch_invariant=True)
def decoder_stack(
    view: Any, x: torch.Tensor, residual: torch.Tensor | None, batch: Batch, cache: KVCache
) -> tuple[torch.Tensor, torch.Tensor]:
    """All layers in one call, with nothing but barriers between them, for at most 8 tokens; a call for each run of
    layers with the same block table and window.
    """
    stack, x = native_stack(view), x.contiguous()
    caches, other = stack.caches(cache.layers), None if residual is None else residual.contiguous()
    into, rest = x, other
    for first, count, table in stack.find_runs(cache.tables):
        out, summed = torch.empty_like(x), torch.empty_like(x)
        done = library().ip_decoder_layers(
            ctypes.byref(stack.layers, first * ctypes.sizeof(ctypes.c_void_p)),
            ctypes.cast(ctypes.byref(caches, first * ctypes.sizeof(Cache)), ctypes.POINTER(Cache)),
            count,
            ctypes.byref(native_step(batch.for_table(table))),
            into.data_ptr(),
            None if rest is None else rest.data_ptr(),
            out.data_ptr(),
            summed.data_ptr(),
        )
        if not done:
            return view.body(x, residual, batch, cache)
        into, rest = out, summed
    return out, summed


@KERNELS(
    "causal_lm",
    "native",
    when=When(
        (torch.bfloat16,),
        step_kinds=("decode",),
        features=("native",),
        needs=(("logits that stand on one rank", _on_one_rank), ("an embedding of bfloat16 values", _has_bf16_rows)),
    ),
    rank=RANK_PORTABLE,
    inlines=PARTS,
    batch_invariant=True,
)
def causal_lm(view: Any, batch: Batch, cache: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
    """A step of at most 8 tokens in one call, the token with the largest logit of each row found on the way."""
    native: NativeModel = view.once("inferplane_cpu.model", NativeModel, view)
    if batch.tokens > MAX_TOKENS or not native.uniform:
        return view.body(batch, cache)
    rows = batch.logit_rows
    num_rows = batch.tokens if rows is None else rows.shape[0]
    logits = torch.empty(num_rows, native.vocab, dtype=torch.float32)
    hidden = torch.empty(batch.tokens, native.width, dtype=torch.bfloat16)
    argmax = torch.empty(num_rows, dtype=torch.int64)
    pointers = batch.ids.data_ptr(), None if rows is None else rows.data_ptr()
    model_io = ModelIO(*pointers, num_rows, logits.data_ptr(), argmax.data_ptr(), hidden.data_ptr())
    done = library().ip_model_step(native.model, native.stack.caches(cache.layers), native_step(batch), model_io)
    if done == 1:
        return ModelOutput(logits, hidden, argmax)
    native.uniform = done != 0  # otherwise an id or a row is out of range, or rows are wanted again and again
    return view.body(batch, cache)
