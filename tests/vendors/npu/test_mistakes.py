"""Mistakes that are easily made with the vendor's operators, made on purpose: each is caught by the emulator, because
the call breaks a documented limit, or by the op's oracle, because the numbers are wrong.

A mistake changes the call that a kernel makes, between the kernel and the operator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from inferplane_npu import graphs, kvcache
from inferplane_npu.kernels import attention, basic, mla, moe, quant
from inferplane_npu.kvcache import NpuKV
from tests.vendors import mistakes
from tests.vendors.emulator import Meddled
from tests.vendors.mistakes import swapped, with_
from tests.vendors.npu import chip
from tests.vendors.npu.emulated import EMULATOR

pytestmark = pytest.mark.skipif(chip.LIFTED, reason="in the vendor's dtypes: without INFERPLANE_EMULATED_FLOAT32")

FUSED, SCATTER, GROUPED = "npu_fused_infer_attention_score", "npu_scatter_pa_kv_cache", "npu_grouped_matmul"


@dataclass(frozen=True)
class Mistake:
    """One mistake.

    Args:
        words: what is done wrong.
        where: the module whose `npu` is meddled with.
        operator: the operator that is called wrongly.
        change: `(real, *args, **kwargs)` -> result of the wrong call.
        kernel: the kernel that makes the call. sample: of its op.
        caught: a part of what is said of it.
        series: the chip on which it is made.
    """

    words: str
    where: Any
    operator: str
    change: Callable[..., Any]
    kernel: str
    sample: str
    caught: str
    series: str = "910b"


def steps(values: list[int]) -> list[int]:
    return [b - a for a, b in zip([0, *values], values)]


def sums(values: list[int]) -> list[int]:
    return torch.tensor(values).cumsum(0).tolist()


def fused(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[..., Any]:
    return lambda real, *args, **kwargs: real(*args, **{**kwargs, **change(kwargs)})


def lower(mask: torch.Tensor) -> torch.Tensor:
    return 1 - mask


def renamed(real, x):
    return real(x=x)


def other_result(real, *args):
    y, rstd, s = real(*args)
    return y, s, rstd.expand_as(y).to(y.dtype)


def turned_halves(real, x):
    return real(torch.cat(x.chunk(2, -1)[::-1], -1))


def heads_first(real, k, v, k_cache, v_cache, slots, **kwargs):
    real(k, v, k_cache.transpose(1, 2), v_cache.transpose(1, 2), slots, **kwargs)


def ragged(real, q, *args, **kwargs):
    return real(q.flatten(0, 1), *args, **{**kwargs, "input_layout": "TND"})


def packed_by_rows(real, weight):
    return real(weight.t().contiguous()).t().contiguous()


def columns_first(real, rows, weights, **kwargs):
    return real(rows, [w.transpose(1, 2).contiguous() for w in weights], **kwargs)


RAGGED, BY_SEQUENCE = "torch_npu:attention_ragged", "torch_npu:attention_by_sequence"
MISTAKES = [
    Mistake(
        "the default cache mode, which is NZ",
        attention,
        SCATTER,
        with_(cache_mode=None),
        "torch_npu:kv_write",
        "mixed",
        "key_cache has shape",
    ),
    Mistake("K and V exchanged", attention, SCATTER, swapped(2, 3), "torch_npu:kv_write", "decode", ""),
    Mistake(
        "blocks of heads first", attention, SCATTER, heads_first, "torch_npu:kv_write", "decode", "must be contiguous"
    ),
    Mistake(
        "query lengths not cumulative",
        graphs,
        FUSED,
        fused(lambda c: {"actual_seq_lengths": steps(c["actual_seq_lengths"])}),
        RAGGED,
        "prefill_d128",
        "cumulative",
    ),
    Mistake(
        "lengths of a paged cache cumulative",
        graphs,
        FUSED,
        fused(lambda c: {"actual_seq_lengths_kv": sums(c["actual_seq_lengths_kv"])}),
        RAGGED,
        "prefill_d128",
        "",
    ),
    Mistake("the default scale, which is 1", graphs, FUSED, with_(scale=None), RAGGED, "decode_d128_mqa", ""),
    Mistake("no mask", graphs, FUSED, with_(sparse_mode=0, atten_mask=None), RAGGED, "prefill_d128", ""),
    Mistake(
        "a mask of queries by keys",
        graphs,
        FUSED,
        fused(lambda c: {"atten_mask": c["atten_mask"][:77, :142].contiguous()}),
        RAGGED,
        "prefill_d128",
        "atten_mask is [2048, 2048]",
    ),
    Mistake(
        "a mask with ones where keys are seen",
        graphs,
        FUSED,
        fused(lambda c: {"atten_mask": lower(c["atten_mask"])}),
        RAGGED,
        "prefill_d128",
        "1 above the diagonal",
    ),
    Mistake("causal from the upper left corner", graphs, FUSED, with_(sparse_mode=2), RAGGED, "prefill_d128", ""),
    Mistake("another block size", graphs, FUSED, with_(block_size=64), RAGGED, "decode_d128_mqa", "block_size 64"),
    Mistake("KV heads left out", graphs, FUSED, with_(num_key_value_heads=None), RAGGED, "decode_d128_mqa", ""),
    Mistake(
        "a window one token too wide",
        attention,
        FUSED,
        fused(lambda c: {"pre_tokens": c["pre_tokens"] + 1} if c.get("sparse_mode") == 4 else {}),
        BY_SEQUENCE,
        "window_prefill",
        "",
    ),
    Mistake("TND with heads of 64", attention, FUSED, ragged, BY_SEQUENCE, "prefill", "TND takes heads of 128"),
    Mistake(
        "the rotated part of the key forgotten",
        graphs,
        FUSED,
        with_(key_rope=None),
        "torch_npu:mla_absorbed",
        "v3_dims",
        "come together",
    ),
    Mistake(
        "dense lengths not cumulative",
        mla,
        FUSED,
        fused(lambda c: {"actual_seq_lengths_kv": [1, *steps(c["actual_seq_lengths_kv"])]}),
        "torch_npu:mla_expanded",
        "v3_dims",
        "TND needs lengths",
    ),
    Mistake(
        "no output dtype, so int8",
        quant,
        "npu_quant_matmul",
        with_(output_dtype=None),
        "torch_npu:linear_w8a8",
        "int8_act",
        "int8",
    ),
    Mistake(
        "a keyword that only the page has",
        quant,
        "npu_dynamic_quant",
        renamed,
        "torch_npu:quantize",
        "int8_row",
        "missing value for argument 'input'",
    ),
    Mistake(
        "scales in float32",
        quant,
        "npu_weight_quant_batchmatmul",
        lambda real, x, w, s, *a: real(x, w, s.float(), *a),
        "torch_npu:linear_w8a16",
        "int8_row",
        "have one dtype",
    ),
    Mistake(
        "the group size left out",
        quant,
        "npu_weight_quant_batchmatmul",
        lambda real, *a: real(*a[:7]),
        "torch_npu:linear_w4a16",
        "int4_group",
        "a scale a column",
    ),
    Mistake(
        "int4 packed along the wrong dimension",
        quant,
        "npu_convert_weight_to_int4pack",
        packed_by_rows,
        "torch_npu:linear_w4a16",
        "int4_group",
        "",
    ),
    Mistake("experts' weights turned", moe, GROUPED, columns_first, "torch_npu:moe_experts", "t13", "weight [E, K, N]"),
    Mistake(
        "counts where sums are expected",
        moe,
        GROUPED,
        with_(group_list_type=0),
        "torch_npu:moe_experts",
        "t13",
        "group_list adds up",
    ),
    Mistake(
        "counts not asked for",
        moe,
        "npu_moe_init_routing_v2",
        with_(expert_tokens_num_flag=False),
        "torch_npu:moe_experts",
        "t13",
        "group_list is an int64 tensor",
    ),
    Mistake(
        "groups judged by their best expert",
        moe,
        "npu_moe_gating_top_k",
        with_(group_select_mode=0),
        "torch_npu:moe_route",
        "v3",
        "",
    ),
    Mistake(
        "the sum taken for the second result",
        basic,
        "npu_add_rms_norm",
        other_result,
        "torch_npu:add_rms_norm",
        "t3_d64",
        "",
    ),
    Mistake("cosines and sines exchanged", basic, "npu_rotary_mul", swapped(1, 2), "torch_npu:rope", "half", ""),
    Mistake(
        "the default pairs, which are halves",
        basic,
        "npu_rotary_mul",
        lambda real, x, c, s, mode: real(x, c, s),
        "torch_npu:rope_interleaved",
        "interleaved",
        "",
    ),
    Mistake("gate and up exchanged", basic, "npu_swiglu", turned_halves, "torch_npu:silu_mul", "t3_i64", ""),
    Mistake(
        "a cache of the NZ shape without its format",
        kvcache,
        "npu_format_cast",
        lambda real, t, format: t,
        "atb:kv_write_nz",
        "decode",
        "must have the NZ format",
        "310p",
    ),
    Mistake(
        "positions rotated in three dimensions",
        basic,
        "npu_rotary_mul",
        lambda real, x, c, s: real(x[0], c[0], s[0])[None],
        "torch_npu:rope_128",
        "strided",
        "4 dimensions",
        "310p",
    ),
    Mistake(
        "activations in int8 beside weights in FP8",
        quant,
        "npu_dynamic_quant",
        with_(dst_type=None),
        "torch_npu:linear_fp8",
        "fp8_row_act",
        "x1 and x2 are int8",
        "950",
    ),
    Mistake(
        "no output dtype, in FP8",
        quant,
        "npu_quant_matmul",
        with_(output_dtype=None),
        "torch_npu:linear_fp8",
        "fp8_row_act",
        "not torch.int8",
        "950",
    ),
]
HERE = [m for m in MISTAKES if m.series == chip.ARCH]


def judged(kernel_name: str, label: str) -> str:
    return mistakes.judged("npu", chip.DTYPE, kernel_name, label)


@pytest.mark.parametrize("mistake", HERE, ids=lambda m: m.words.replace(" ", "_"))
def test_is_caught(mistake, monkeypatch):
    assert not judged(mistake.kernel, mistake.sample), "the kernel itself is right"
    monkeypatch.setattr(EMULATOR, "listeners", [])  # a mistake is no call of the backend's
    monkeypatch.setattr(mistake.where, "npu", Meddled(torch.ops.npu, {mistake.operator: mistake.change}))
    found = judged(mistake.kernel, mistake.sample)
    assert found, "nothing was said"
    assert mistake.caught in found, found


a2 = pytest.mark.skipif(chip.ARCH != "910b", reason="on the 910b")


@a2
def test_padding_that_reaches_the_operator_is_caught(monkeypatch):
    """The vendor's writes know no slot -1."""
    monkeypatch.setattr(NpuKV, "real", lambda kv, slots: slots)
    assert "lies in [0, " in judged("torch_npu:kv_write", "decode")


@a2
def test_rotated_parts_in_different_orders_are_caught(monkeypatch):
    """The cache keeps even entries first; a query that does not is wrong without breaking any limit."""
    monkeypatch.setattr(mla, "even_first", lambda x: x)
    assert "error" in judged("torch_npu:mla_absorbed", "v3_dims")
