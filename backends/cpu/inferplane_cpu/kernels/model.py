"""A model's decoder layers as one native call; a step of few tokens, with embedding, last norm and head, as one call.

Streaming the weights evicts everything else from the CPU caches, so every line of Python between native calls is
fetched from memory and takes several times as long as in a loop of its own.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import torch

from inferplane.plugin import RANK_PORTABLE, Batch, Kernels, KVCache, ModelOutput, When
from inferplane_cpu.kernels import layer, linear
from inferplane_cpu.kernels.attention import native_cache
from inferplane_cpu.kernels.layer_description import native_layer, native_step
from inferplane_cpu.kernels.rowwise import native_norm
from inferplane_cpu.native import BF16, library
from inferplane_cpu.structs import Cache, LayerSteps, LogitScale, Matrix, Model, ModelIO

KERNELS = Kernels()
MAX_TOKENS = 8
"""Tokens of a step at most; csrc: kMaxDecodeRows."""
DECODE = When(step_kinds=("decode",), features=("native",))
STACK = replace(DECODE, extensions=("decoder_stack.several_tables", "residual_layer", *layer.EXTENSIONS))
LAYERS = tuple(kernel.name for kernel in layer.KERNELS if kernel.when.step_kinds == ("decode",))
EMBEDDINGS = ("torch:embedding", "native:embedding_panels")
HEADS = tuple(kernel.name for kernel in linear.HEAD_KERNELS)
SCALED = ("scaled_embedding", "scaled_head")
"""Ops around an embedding and a head that kernels here compute with them."""
PARTS = {
    "embed": (*EMBEDDINGS, "native:scaled_embedding"),
    "layers": ("native:decoder_stack",),
    "norm": ("native:add_rms_norm",),
    "head": (*HEADS, "native:scaled_head"),
}


def _on_one_rank(op: Any) -> bool:
    return op.gather is None


def _has_bf16_rows(op: Any) -> bool:
    return op.embed.weight.dtype in (None, torch.bfloat16)


class NativeStack:
    """All layers of a model as the library reads them, and their caches as they were at the last call.

    Attributes: `fits`, False once the library found layers in it that it does not take in one call.

    Args:
        view: of a stack whose layers are bound to `LAYERS`.
    """

    def __init__(self, view: Any) -> None:
        self.count, self.fits = len(view.layers), True
        layers = [native_layer(v, False) for v in view.layers]
        self.layers = (ctypes.c_void_p * self.count)(*map(ctypes.addressof, layers))
        self._described: tuple[Any, Any, Any] = None, None, None
        self._caches: Any = None
        self._num_tables = 1
        self._number: Any = None

    def caches(self, cache: KVCache) -> Any:
        """An array of `Cache`, one a layer."""
        if any(one is not other for one, other in zip(self._described, _places_of(cache), strict=True)):
            self._described = layers, tables, by_layer = _places_of(cache)
            if by_layer:
                layers, tables = zip(*by_layer)  # what each layer is called with, in place of caches of tokens alone
            self._caches = (Cache * self.count)(*map(native_cache, layers[: self.count]))
            self._num_tables = max(tables[: self.count], default=0) + 1
            self._number = (ctypes.c_int32 * self.count)(*tables[: self.count]) if self._num_tables > 1 else None
        return self._caches

    def steps(self, batch: Batch) -> LayerSteps:
        """A batch as its block tables' layers see it, for the tables of the last `caches`; not to outlive both."""
        steps = batch.once(("inferplane_cpu.steps", self._num_tables), _describe_steps, batch, self._num_tables)
        return LayerSteps(ctypes.addressof(steps), None if self._number is None else ctypes.addressof(self._number))


def _places_of(cache: KVCache) -> tuple[Any, Any, Any]:
    return cache.layers, cache.tables, cache.by_layer


def _describe_steps(batch: Batch, tables: int) -> Any:
    """Addresses of the steps, which the batch holds."""
    return (ctypes.c_void_p * tables)(*(ctypes.addressof(native_step(batch.for_table(i))) for i in range(tables)))


def native_stack(view: Any) -> NativeStack:
    """The layers of a stack, described once."""
    found: NativeStack = view.once("inferplane_cpu.stack", NativeStack, view)
    return found


class NativeModel:
    """A model as the library reads it.

    Attributes: `stack`, its layers; `model`.

    Args:
        view: of a model whose parts are bound to `PARTS`.
    """

    def __init__(self, view: Any) -> None:
        self.stack = native_stack(view.layers)
        self._embed, self._head = embedding_matrix(view.embed), linear.matrix_of(getattr(view.head, "head", view.head))
        layers = ctypes.addressof(self.stack.layers)
        self.model = Model(layers, self.stack.count, self._embed, self._head, native_norm(view.norm.norm))
        self.model.embed_factor, self.model.logit_scale = getattr(view.embed, "factor", 1.0), logit_scale(view.head)
        self.vocab, self.width = self._head.n, self._head.k


def embedding_matrix(view: Any) -> Matrix:
    """The rows of an op `embedding` or `scaled_embedding` as the library reads them."""
    embed = getattr(view, "embed", view)
    rows = embed.weight
    if not isinstance(rows, torch.Tensor):
        return linear.matrix_of(embed)
    # A step reads a few rows: no need of huge pages.
    return Matrix(BF16, 0, *rows.shape, rows.stride(0), rows.data_ptr())


def logit_scale(view: Any) -> LogitScale:
    """What an op `lm_head` or `scaled_head` does with its logits."""
    return LogitScale(getattr(view, "factor", 1.0), getattr(view, "cap", None) or 0.0)


def _has_plain_rows(op: Any) -> bool:
    return op.embed.weight.dtype in (None, torch.bfloat16) and op.embed.reduce is None


@KERNELS(
    "scaled_embedding",
    "native",
    when=When(
        (torch.bfloat16,),
        features=("native",),
        needs=(("an embedding of bfloat16 values on one rank", _has_plain_rows),),
    ),
    rank=RANK_PORTABLE,
    inlines={"embed": EMBEDDINGS},
    batch_invariant=True,
)
def scaled_embedding(view: Any, ids: torch.Tensor) -> torch.Tensor:
    """Rows by their ids, times the factor, in one pass."""
    w: Matrix = view.once("inferplane_cpu.embedding", embedding_matrix, view)
    return linear.gather_rows(w, ids, view.factor)


@KERNELS(
    "scaled_head",
    "native",
    when=When((torch.bfloat16,), features=("native",)),
    rank=RANK_PORTABLE,
    inlines={"head": HEADS},
    batch_invariant=True,
)
def scaled_head(view: Any, x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """The head by the kernel that it is bound to, then its logits scaled and capped in place."""
    logits: torch.Tensor = view.head.kernel.target(view.head, x, batch).contiguous()
    library().ip_scale_logits(logit_scale(view), logits.data_ptr(), logits.numel())
    return logits


@KERNELS("decoder_stack", "native", when=STACK, rank=RANK_PORTABLE, inlines={"*": LAYERS}, batch_invariant=True)
def decoder_stack(
    view: Any, x: torch.Tensor, residual: torch.Tensor | None, batch: Batch, cache: KVCache
) -> tuple[torch.Tensor, torch.Tensor]:
    """All layers in one call, with nothing but barriers between them, for at most 8 tokens."""
    stack, x = native_stack(view), x.contiguous()
    if batch.tokens > MAX_TOKENS or not stack.fits:
        return view.body(x, residual, batch, cache)
    caches, other = stack.caches(cache), None if residual is None else residual.contiguous()
    out, summed = torch.empty_like(x), torch.empty_like(x)
    pointers = x.data_ptr(), None if other is None else other.data_ptr(), out.data_ptr(), summed.data_ptr()
    if library().ip_decoder_layers(stack.layers, caches, stack.count, stack.steps(batch), *pointers):
        return out, summed
    stack.fits = False
    return view.body(x, residual, batch, cache)


@KERNELS(
    "causal_lm",
    "native",
    when=When(
        (torch.bfloat16,),
        step_kinds=("decode",),
        features=("native",),
        needs=(("logits that stand on one rank", _on_one_rank), ("an embedding of bfloat16 values", _has_bf16_rows)),
        extensions=(*SCALED, *STACK.extensions),
    ),
    rank=RANK_PORTABLE,
    inlines=PARTS,
    batch_invariant=True,
)
def causal_lm(view: Any, batch: Batch, cache: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
    """A step of at most 8 tokens in one call, the token with the largest logit of each row found on the way."""
    native: NativeModel = view.once("inferplane_cpu.model", NativeModel, view)
    if batch.tokens > MAX_TOKENS or not native.stack.fits:
        return view.body(batch, cache)
    rows = batch.logit_rows
    num_rows = batch.tokens if rows is None else rows.shape[0]
    logits = torch.empty(num_rows, native.vocab, dtype=torch.float32)
    hidden = torch.empty(batch.tokens, native.width, dtype=torch.bfloat16)
    argmax = torch.empty(num_rows, dtype=torch.int64)
    pointers = batch.ids.data_ptr(), None if rows is None else rows.data_ptr()
    model_io = ModelIO(*pointers, num_rows, logits.data_ptr(), argmax.data_ptr(), hidden.data_ptr())
    caches = native.stack.caches(cache)
    done = library().ip_model_step(native.model, caches, native.stack.steps(batch), model_io)
    if done == 1:
        return ModelOutput(logits, hidden, argmax)
    native.stack.fits = done != 0  # otherwise an id or a row is out of range, or rows are wanted again and again
    return view.body(batch, cache)
