"""Orders of rows and columns in GGUF files of models with recurrent layers."""

from __future__ import annotations

import torch

from inferplane.gguf.opened import GGUFModel
from inferplane.models.reading.gguf_source import GGUFSource
from inferplane.types import Shard
from tests.unit.gguf.files import LLAMA, random_blocks, write

KEYS, EACH, DIM, SIZE, WIDTH = 2, 3, 16, 32, 64
"""Key heads, value heads of each, entries of both, and the model's width."""
ENTRIES = {
    **LLAMA,
    "embedding_length": WIDTH,
    "full_attention_interval": 2,
    "ssm.group_count": KEYS,
    "ssm.time_step_rank": KEYS * EACH,
    "ssm.state_size": DIM,
    "ssm.inner_size": KEYS * EACH * SIZE,
    "ssm.conv_kernel": 4,
}
INNER, BEFORE = KEYS * EACH * SIZE, 2 * KEYS * DIM


def source_of(path, tensors, architecture, **entries):
    tensors = {"token_embd.weight": ("F32", random_blocks("F32", (8, WIDTH), 99)), **tensors}
    model = GGUFModel.open(write(path, tensors, {**ENTRIES, **entries}, architecture))
    return GGUFSource(model.header, model.meta)


def read(source, name, shard=None):
    shape = list(source.shape(name))
    shard = shard or Shard()
    first, last = (0, shape[0]) if shard.is_whole else shard.bounds(shape[0])
    out = torch.empty([last - first, *shape[1:]])
    source.read_into(name, out, shard)
    return out


def tiled(heads):
    """Value heads by key heads `[KEYS, EACH, ...]` as files have them: the first of every key head, then the second."""
    return heads.transpose(0, 1).reshape(-1, *heads.shape[3:]).contiguous()


def test_value_heads_of_qwen3_5(tmp_path):
    v, z = (torch.from_numpy(random_blocks("F32", (KEYS, EACH, SIZE, WIDTH), seed)) for seed in (1, 2))
    qk, a_log = torch.from_numpy(random_blocks("F32", (BEFORE, WIDTH), 3)), torch.arange(1.0, 7).reshape(KEYS, EACH, 1)
    out = torch.from_numpy(random_blocks("F32", (KEYS, EACH, SIZE, WIDTH), 4))
    heads = torch.from_numpy(random_blocks("F32", (KEYS, EACH, 1, WIDTH), 5))
    tensors = {
        "attn_qkv.weight": torch.cat((qk, tiled(v))),
        "attn_gate.weight": tiled(z),
        "ssm_alpha.weight": tiled(heads),
        "ssm_beta.weight": tiled(heads),
        "ssm_a": -tiled(a_log).exp(),
        "ssm_dt.bias": tiled(a_log),
        "ssm_conv1d.weight": torch.cat((qk[:, :4], tiled(v)[:, :4])),
        "ssm_out.weight": tiled(out).T.contiguous(),
    }
    named = {f"blk.0.{name}": ("F32", tensor.numpy()) for name, tensor in tensors.items()}
    source = source_of(tmp_path / "a.gguf", named, "qwen35")
    prefix = "model.layers.0.linear_attn"
    assert torch.equal(read(source, f"{prefix}.in_proj_qkv.weight"), torch.cat((qk, v.reshape(-1, WIDTH))))
    assert torch.equal(read(source, f"{prefix}.in_proj_z.weight"), z.reshape(-1, WIDTH))
    assert torch.equal(read(source, f"{prefix}.in_proj_z.weight", Shard(0, 1, 2)), z[1].reshape(-1, WIDTH))
    assert torch.equal(read(source, f"{prefix}.in_proj_a.weight"), heads.reshape(-1, WIDTH))
    assert torch.equal(read(source, f"{prefix}.dt_bias"), a_log.flatten())
    assert torch.allclose(read(source, f"{prefix}.A_log"), a_log.flatten(), rtol=1e-6)
    assert torch.equal(read(source, f"{prefix}.out_proj.weight"), out.reshape(-1, WIDTH).T)
    assert torch.equal(read(source, f"{prefix}.conv1d.weight")[BEFORE:], v.reshape(-1, WIDTH)[:, :4])


def test_key_heads_of_qwen3_next(tmp_path):
    """Packed rows of two tensors are joined by key heads; with two types, as values."""
    kinds = ("Q8_0", "Q8_0"), ("Q8_0", "Q4_0")
    for number, (one, other) in enumerate(kinds):
        qkv, z = random_blocks(one, (BEFORE + INNER, WIDTH), 1), random_blocks(other, (INNER, WIDTH), 2)
        named = {"blk.0.attn_qkv.weight": (one, qkv), "blk.0.attn_gate.weight": (other, z)}
        counts = {"expert_count": 2, "expert_used_count": 1, "expert_feed_forward_length": 32}
        source = source_of(tmp_path / f"{number}.gguf", named, "qwen3next", **counts)
        name = "model.layers.0.linear_attn.in_proj_qkvz.weight"
        assert source.shape(name) == (BEFORE + 2 * INNER, WIDTH)
        if one == other:
            group, rows = EACH * SIZE, torch.from_numpy(qkv)
            parts = [
                part
                for head in range(KEYS)
                for part in (
                    rows[head * DIM : (head + 1) * DIM],
                    rows[(KEYS + head) * DIM : (KEYS + head + 1) * DIM],
                    rows[BEFORE + head * group : BEFORE + (head + 1) * group],
                    torch.from_numpy(z)[head * group : (head + 1) * group],
                )
            ]
            assert torch.equal(source.raw(name)[1], torch.cat(parts))
            want = read(source, name)
        else:
            assert source.find_packed_type(name) is None
            got = read(source, name)
            assert torch.equal(got[:DIM], want[:DIM]) and got.isfinite().all()
