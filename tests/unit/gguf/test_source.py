"""Tensors of GGUF files under their published names: values of every type, by slices too, and packed rows."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from inferplane.errors import CheckpointError
from inferplane.gguf.opened import GGUFModel
from inferplane.models.reading.gguf_source import GGUFSource
from inferplane.types import Shard
from tests.unit.gguf.files import LLAMA, TYPES, llama, random_blocks, write

DOWN = "model.layers.0.mlp.down_proj.weight"
Q = "model.layers.0.self_attn.q_proj.weight"
WHOLE = Shard()
SHARDS = [WHOLE, Shard(0, 1, 2), Shard(1, 1, 2), Shard(0, 2, 4), Shard(1, 0, 4)]


def open_source(path):
    model = GGUFModel.open(path)
    return GGUFSource(model.header, model.meta)


def read(source, name, shard=WHOLE):
    shape = list(source.shape(name))
    if not shard.is_whole:
        first, last = shard.bounds(shape[shard.axis])
        shape[shard.axis] = last - first
    out = torch.full(shape, torch.nan)
    source.read_into(name, out, shard)
    return out


def cut(values, shard):
    if shard.is_whole:
        return values
    first, last = shard.bounds(values.shape[shard.axis])
    return values.narrow(shard.axis, first, last - first)


def published(rows, heads):
    """llama.cpp writes row `half d + i` of a head as its row `2 i + half`; here it is taken back row by row."""
    rows = rows.reshape(heads, -1, rows.shape[-1])
    out = torch.empty_like(rows)
    dim = rows.shape[1]
    for half in range(2):
        for i in range(dim // 2):
            out[:, half * dim // 2 + i] = rows[:, 2 * i + half]
    return out.reshape(-1, rows.shape[-1])


@pytest.mark.parametrize("kind", TYPES)
def test_values_are_those_of_the_gguf_package(tmp_path, kind, monkeypatch):
    monkeypatch.setattr("inferplane.models.reading.gguf_source.CHUNK_BYTES", 50_000)  # 48 rows
    tensors = llama(kind)
    source = open_source(write(tmp_path / "a.gguf", tensors))
    number = gguf.GGMLQuantizationType[kind]
    down, q = (
        torch.from_numpy(gguf.dequantize(tensors[name][1], number).astype(np.float32))
        for name in ("blk.0.ffn_down.weight", "blk.0.attn_q.weight")
    )
    assert down.isfinite().all() and down.std() > 0
    for shard in SHARDS:
        assert torch.equal(read(source, DOWN, shard), cut(down, shard)), shard
        assert torch.equal(read(source, Q, shard), cut(published(q, 4), shard)), shard
    source.close()


@pytest.mark.parametrize("kind", ["Q4_0", "Q6_K", "MXFP4"])
def test_packed_rows_stand_in_the_published_order(tmp_path, kind):
    tensors = llama(kind)
    source = open_source(write(tmp_path / "a.gguf", tensors))
    packed = torch.from_numpy(tensors["blk.0.attn_q.weight"][1])
    want = published(packed, 4)
    assert source.raw(Q)[0] == kind == source.find_packed_type(Q)
    assert torch.equal(source.raw(Q)[1], want)
    assert torch.equal(source.raw(Q, 70, 33)[1], want[70:103])
    assert source.find_packed_type("model.norm.weight") is None
    with pytest.raises(CheckpointError, match="not packed"):
        source.raw("model.norm.weight")
    assert source.quantization()["types"][DOWN] == kind


def test_biases_of_q_and_k_are_in_the_order_of_their_rows(tmp_path):
    tensors = llama("F16") | {"blk.0.attn_q.bias": ("F32", random_blocks("F32", (256,), 50))}
    source = open_source(write(tmp_path / "a.gguf", tensors))
    want = published(torch.from_numpy(tensors["blk.0.attn_q.bias"][1])[:, None], 4)[:, 0]
    for shard in (Shard(), Shard(0, 1, 2)):
        assert torch.equal(read(source, "model.layers.0.self_attn.q_proj.bias", shard), cut(want, shard))


def test_norms_of_gemma_lose_their_one(tmp_path):
    entries = {**LLAMA, "attention.sliding_window": 16}
    source = open_source(write(tmp_path / "a.gguf", llama("Q8_0"), entries, "gemma3"))
    norm = torch.from_numpy(llama("Q8_0")["output_norm.weight"][1])
    assert torch.equal(read(source, "model.norm.weight"), norm - 1)


def test_experts_of_gpt_oss_have_gate_and_up_in_turn(tmp_path):
    entries = {
        **{key: value for key, value in LLAMA.items() if key != "feed_forward_length"},
        "expert_count": 2,
        "expert_used_count": 1,
        "expert_feed_forward_length": 32,
        "attention.sliding_window": 16,
    }
    outside = ("token_embd.weight", "output_norm.weight")
    tensors = {name: data for name, data in llama("F16").items() if name in outside}
    for seed, (part, shape) in enumerate({"gate": (2, 32, 256), "up": (2, 32, 256), "down": (2, 256, 32)}.items()):
        tensors[f"blk.0.ffn_{part}_exps.weight"] = "MXFP4", random_blocks("MXFP4", shape, seed)
        tensors[f"blk.0.ffn_{part}_exps.bias"] = "F32", random_blocks("F32", shape[:2], seed + 9)
    source = open_source(write(tmp_path / "a.gguf", tensors, entries, "gpt-oss"))
    number = gguf.GGMLQuantizationType.MXFP4
    gate, up = (
        torch.from_numpy(gguf.dequantize(tensors[f"blk.0.ffn_{p}_exps.weight"][1], number)) for p in ("gate", "up")
    )
    name = "model.layers.0.mlp.experts.1.gate_up_proj"
    want = torch.stack((gate[1], up[1]), 1).reshape(64, 256)
    for shard in (Shard(), Shard(0, 1, 2), Shard(1, 0, 2)):
        assert torch.equal(read(source, f"{name}.weight", shard), cut(want, shard))
    packed = (torch.from_numpy(tensors[f"blk.0.ffn_{p}_exps.weight"][1][1]) for p in ("gate", "up"))
    assert torch.equal(source.raw(f"{name}.weight", 3, 10)[1], torch.stack(tuple(packed), 1).reshape(64, -1)[3:13])
    biases = (torch.from_numpy(tensors[f"blk.0.ffn_{p}_exps.bias"][1][1]) for p in ("gate", "up"))
    assert torch.equal(read(source, f"{name}.bias"), torch.stack(tuple(biases), 1).reshape(1, 64))


def test_halves_of_latent_attention_are_joined(tmp_path):
    heads, nope, value, latent = 4, 32, 64, 96
    entries = {
        **LLAMA,
        "attention.head_count": heads,
        "attention.kv_lora_rank": latent,
        "attention.key_length_mla": nope + 16,
        "attention.value_length_mla": value,
        "rope.dimension_count": 16,
        "expert_count": 2,
        "expert_used_count": 1,
    }
    tensors = {name: data for name, data in llama("F16").items() if not name.startswith("blk.0.attn_")}
    tensors["blk.0.attn_k_b.weight"] = "Q8_0", random_blocks("Q8_0", (heads, latent, nope), 1)
    tensors["blk.0.attn_v_b.weight"] = "Q4_0", random_blocks("Q4_0", (heads, value, latent), 2)
    source = open_source(write(tmp_path / "a.gguf", tensors, entries, "deepseek2"))
    k = gguf.dequantize(tensors["blk.0.attn_k_b.weight"][1], gguf.GGMLQuantizationType.Q8_0)
    v = gguf.dequantize(tensors["blk.0.attn_v_b.weight"][1], gguf.GGMLQuantizationType.Q4_0)
    want = torch.from_numpy(np.concatenate((k.swapaxes(1, 2), v), 1).reshape(heads * (nope + value), latent))
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    for shard in (Shard(), Shard(0, 1, 2)):
        assert torch.equal(read(source, name, shard), cut(want, shard))
    assert source.find_packed_type(name) is None
