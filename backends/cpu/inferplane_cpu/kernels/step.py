"""A step of few tokens as one native call: embedding, layers, the last norm and the head.

Between calls the caches hold what the weights left there, which is nothing: every line of Python between the parts of a
step is read from memory, and costs several times what it costs in a loop of its own.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from inferplane.kernels.composed import basic
from inferplane.plugin import Batch, KVCache
from inferplane_cpu.kernels import linear
from inferplane_cpu.kernels.layer_description import chained, native_step
from inferplane_cpu.kernels.rowwise import add_rms_norm
from inferplane_cpu.kernels.sampling import set_likeliest
from inferplane_cpu.native import BF16, Matrix, Model, ModelIO, library

ROWS = 8
"""Tokens of a step at most; csrc: kMaxDecodeRows."""
HEADS = (linear.lm_head_batch_invariant, linear.lm_head, linear.lm_head_panels_batch_invariant, linear.lm_head_panels)


class Whole:
    """What surrounds a model's layers as the library reads it.

    Args:
        p: the model's view, whose embedding, norm and head are those of `served`.
    """

    def __init__(self, view: Any) -> None:
        self.views = view.layers.chain.__self__
        embed, norm, head = (part.__self__ for part in (view.embed, view.norm, view.head))
        self.norm, self.eps, self.head = norm.norm.weight, norm.norm.eps, linear.matrix_of(head)
        if view.embed.__func__ is linear.embedding_panels:
            self.embed: Matrix = linear.matrix_of(embed)
        else:  # of which a step reads a few rows: no need of huge pages
            w = embed.weight
            self.embed = Matrix(BF16, 0, *w.shape, w.stride(0), w.data_ptr(), None, None, None)

    def model(self, layers: Any) -> Model:
        """With the layers as they are described for a cache."""
        return Model(ctypes.addressof(layers), len(self.views), self.embed, self.head, self.norm.data_ptr(), self.eps)


def served(view: Any) -> bool:
    """Whether the parts around a model's layers are bound to the kernels that the library repeats."""
    embed, norm, head = (getattr(part, "__func__", None) for part in (view.embed, view.norm, view.head))
    rows = embed is linear.embedding_panels or (
        embed is basic.embedding and view.embed.__self__.weight.dtype is torch.bfloat16
    )
    return rows and norm is add_rms_norm and head in HEADS


def whole(view: Any, batch: Batch, cache: KVCache) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Logits and hidden states of a model's step in one call; None where it is not for it (`Kernel.whole`)."""
    found: Whole | bool | None = view.__dict__.get("described")
    if found is None:
        found = view.described = Whole(view) if served(view) else False
    if found is False or batch.tokens > ROWS:
        return None
    assert isinstance(found, Whole)
    layers = chained(found.views, cache.layers)
    model: Model | None = layers.model
    if model is None:
        model = layers.model = found.model(layers.layers)
    rows = batch.logit_rows
    wanted = batch.tokens if rows is None else rows.shape[0]
    logits = torch.empty(wanted, model.head.n, dtype=torch.float32)
    hidden = torch.empty(batch.tokens, model.head.k, dtype=torch.bfloat16)
    likeliest = torch.empty(wanted, dtype=torch.int64)
    pointers = batch.ids.data_ptr(), None if rows is None else rows.data_ptr()
    ends = ModelIO(*pointers, wanted, logits.data_ptr(), likeliest.data_ptr(), hidden.data_ptr())
    done = library().ip_model_step(model, layers.caches, native_step(batch), ends)
    if not done:  # layers of two kinds: so will it be in the next step
        view.described = False
    if done != 1:  # an id or a row is out of range, or rows are asked for again and again: the parts know
        return None
    set_likeliest(logits, likeliest)
    return logits, hidden
