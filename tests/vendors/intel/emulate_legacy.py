"""What is left of intel_extension_for_pytorch: call forms as vLLM's _ipex_ops.py has them, and two schemas that its
wheel for processors stated. Whether padding is skipped by its write is not known; vLLM gave it slots of -1.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import ModuleType, SimpleNamespace

import torch
import torch.nn.functional as F

from tests.vendors import semantics
from tests.vendors.emulator import Implementations, require
from tests.vendors.intel import chip, emulate_basic

IMPLEMENTATIONS = emulates = Implementations()
PACKAGE = "intel_extension_for_pytorch"
FUNCTIONAL, PAGED = f"{PACKAGE}__llm__functional", f"{PACKAGE}__llm__modules__PagedAttention"


def install(names: Iterable[str]) -> None:
    """Modules that pass calls on to the operators of these names."""
    held: dict[str, dict[str, object]] = {FUNCTIONAL: {}, PAGED: {}}
    for name in names:
        space, _, function = name.partition("::")
        if space in held:
            held[space][function] = getattr(getattr(torch.ops, space), function)
    for name in ("", ".llm", ".llm.functional", ".llm.modules"):
        sys.modules[PACKAGE + name] = ModuleType(PACKAGE + name)
        if parent := name.rpartition(".")[0] if name else None:
            setattr(sys.modules[PACKAGE + parent], name.rpartition(".")[2], sys.modules[PACKAGE + name])
    setattr(sys.modules[PACKAGE], "llm", sys.modules[f"{PACKAGE}.llm"])  # noqa: B010 - as the others
    vars(sys.modules[f"{PACKAGE}.llm.functional"]).update(held[FUNCTIONAL])
    vars(sys.modules[f"{PACKAGE}.llm.modules"])["PagedAttention"] = SimpleNamespace(**held[PAGED])


@emulates(f"{FUNCTIONAL}::rms_norm")
@emulates("torch_ipex::rmsnorm")
def rms_norm(input, weight, eps):
    chip.floats(input=input, weight=weight)
    chip.contiguous(input=input, weight=weight)
    chip.shape("weight", weight, input.shape[-1])
    return semantics.normalize(input, weight, eps)


@emulates(f"{FUNCTIONAL}::add_rms_norm")
def add_rms_norm(add, input, weight, bias, eps, add_back):
    """add <- add + input, where that is requested; the norm of the sum."""
    chip.absent(bias=bias)
    return _add(input, add, weight, eps, add_back)


@emulates("torch_ipex::add_rmsnorm")
def add_rmsnorm(input, input1, weight, eps, add_back):
    return _add(input, input1, weight, eps, add_back)


def _add(input, add, weight, eps, add_back):
    chip.floats(input=input, add=add, weight=weight)
    chip.contiguous(input=input, add=add, weight=weight)
    chip.shape("add", add, *input.shape)
    total = input.float() + add.float()
    if add_back:
        add.copy_(total.to(add.dtype))
    return semantics.normalize(total, weight, eps).to(input.dtype)


@emulates(f"{FUNCTIONAL}::silu_mul")
def silu_mul(x, y):
    chip.floats(x=x, y=y)
    chip.contiguous(x=x, y=y)
    chip.shape("y", y, *x.shape)
    return (F.silu(x.float()) * y.float()).to(x.dtype)


@emulates(f"{PAGED}::reshape_and_cache_flash")
def reshape_and_cache_flash(k_scale, v_scale, **call):
    require(k_scale == v_scale == 1.0, "scales are not emulated")
    one = torch.ones(1)
    emulate_basic.reshape_and_cache_flash(k_scale=one, v_scale=one, **call)


@emulates(f"{PAGED}::flash_attn_varlen_func")
def flash_attn_varlen_func(
    output, query, key_cache, value_cache, cu_seqlens_q, seqused_k, max_seqlen_q, max_seqlen_k, scale, is_causal,
    block_table, alibi_slopes, softcap, window_size_left, window_size_right, k_scale, v_scale,
):  # fmt: skip
    """Ragged queries over blocks, lengths a sequence."""
    chip.absent(alibi_slopes=alibi_slopes)
    require(is_causal and not softcap and k_scale == v_scale == 1.0, "causal, without caps and scales")
    chip.half(output=output, query=query, key_cache=key_cache, value_cache=value_cache)
    chip.contiguous(output=output, query=query)
    chip.dtype(chip.INT32, seqused_k=seqused_k, block_table=block_table)
    chip.shape("output", output, *query.shape)
    require(key_cache.shape == value_cache.shape and key_cache.shape[1] in chip.BLOCKS, "blocks of 16, 32 or 64 tokens")
    starts = semantics.check_running_sums("cu_seqlens_q", cu_seqlens_q, query.shape[0])
    lens = seqused_k.tolist()
    require(len(lens) == len(starts) - 1, f"{len(starts) - 1} sequences of queries, {len(lens)} of keys")
    require(max(lens) <= max_seqlen_k, f"max_seqlen_k is at least {max(lens)}, got {max_seqlen_k}")
    require(window_size_right in (-1, 0), "windows end with the token itself")
    for b, (a, z, n) in enumerate(zip(starts, starts[1:], lens)):
        require(z - a <= max_seqlen_q, f"max_seqlen_q is at least {z - a}, got {max_seqlen_q}")
        first = 0 if window_size_left < 0 else max(0, n - (z - a) - window_size_left)
        keys, values = (semantics.read_paged(t, block_table[b], first, n) for t in (key_cache, value_cache))
        hidden = semantics.hidden_keys(z - a, first, n, window_size_left)
        output[a:z] = semantics.softmax_v(query[a:z], keys, values, hidden, scale).to(output.dtype)
