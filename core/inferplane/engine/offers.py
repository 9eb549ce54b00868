"""The KV layouts that a backend offers for a layer, as far as they are what was asked for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from inferplane.engine.runner.options import RunnerOptions
from inferplane.errors import UsageError
from inferplane.kvcache import paged_layout
from inferplane.types import Backend, KVLayout, KVRequest

DEFAULT_BLOCK_TOKENS = 64


def offered(
    backend: Backend, request: KVRequest, dtype: torch.dtype, options: RunnerOptions, name: str
) -> Sequence[KVLayout]:
    """Layouts for one kind of layer, in the KV dtype and the blocks that the options ask for.

    Args:
        backend: of the device; where it offers none, core's paged layouts do.
        request: what a layer remembers.
        dtype: of the plan.
        options: of the engine.
        name: of the model, for the error.

    Raises:
        UsageError: no layout has the KV dtype, or blocks as those of the model that this one drafts for.
    """
    offers = list(backend.kv_layouts(request, dtype)) or [
        paged_layout(DEFAULT_BLOCK_TOKENS, kv_dtype) for kv_dtype in ("auto", "fp8", "int8")
    ]
    fitting = [x for x in offers if x.kv_dtype == options.kv_dtype]
    blocks = options.block_tokens
    if fitting and blocks is not None and not (fitting := [x for x in fitting if x.block_tokens == blocks]):
        raise UsageError(
            f"{name} drafts for a model with KV blocks of {blocks} tokens.",
            there_is=f"blocks of {', '.join(sorted({str(x.block_tokens) for x in offers}))} for it",
            remedy="use a draft model whose cache has blocks of that size, or another method",
        )
    if not fitting:
        raise UsageError(
            f"kv_dtype = {options.kv_dtype!r} on device {backend.name!r}.",
            there_is=", ".join(sorted({x.kv_dtype for x in offers})),
        )
    return fitting
