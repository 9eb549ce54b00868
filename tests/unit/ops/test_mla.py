"""Latent attention: absorbed, expanded and a dense formula in float64 are one function."""

import pytest
import torch

from inferplane.kvcache import paged_layout
from inferplane.ops import (
    Linear,
    MLAAbsorbed,
    MLABlock,
    MLADims,
    MLAExpanded,
    MLAKVWrite,
    MLANormRopeWrite,
    RMSNorm,
    Rope,
)
from inferplane.types.batch import Query, make_batch
from tests.unit.support.formulas import SEQUENCES, norm, rope_table, rotate
from tests.unit.support.small import F32, bound, close, w

D = MLADims(heads=3, nope=8, rope=4, value=6, latent=16)
SCALE = 0.37


def dense(q_nope, q_rope, c, kv_b):
    """One sequence: q `[m, H, .]` are its last m tokens, c `[n, R + P]` what the cache holds of all."""
    m, n = q_nope.shape[0], c.shape[0]
    weight = kv_b.double().view(D.heads, D.nope + D.value, D.latent)
    out = torch.zeros(m, D.heads, D.value, dtype=torch.float64)
    for h in range(D.heads):
        k = torch.cat((c[:, : D.latent].double() @ weight[h, : D.nope].T, c[:, D.latent :].double()), 1)
        v = c[:, : D.latent].double() @ weight[h, D.nope :].T
        for i in range(m):
            q = torch.cat((q_nope[i, h], q_rope[i, h])).double()
            seen = n - m + i + 1
            out[i, h] = torch.softmax(k[:seen] @ q * SCALE, 0) @ v[:seen]
    return out


def world(sequences, size=8, seed=0):
    g = torch.Generator().manual_seed(seed)
    counts = [-(-(new + before) // size) for new, before in sequences]
    kv = paged_layout(size).build(D.request, sum(counts), F32, torch.device("cpu"))
    order = torch.randperm(sum(counts), generator=g).tolist()
    queries, latents = [], []
    for (new, before), count in zip(sequences, counts):
        blocks, order = order[:count], order[count:]
        c = torch.randn(new + before, D.latent + D.rope, generator=g)
        kv.write(torch.tensor([blocks[t // size] * size + t % size for t in range(len(c))]), c)
        queries.append(Query([0] * new, before, blocks))
        latents.append(c)
    return make_batch(queries, block_tokens=size, device="cpu"), kv, latents


def test_absorbed_expanded_and_dense_agree():
    kv_b = torch.randn(D.heads * (D.nope + D.value), D.latent) / 4
    weight = w("kv_b", *kv_b.shape)
    expanded = MLAExpanded(Linear(weight), D, SCALE, D.request)
    absorbed = MLAAbsorbed(weight, D, SCALE, D.request)
    batch, kv, latents = world(SEQUENCES)
    q = torch.randn(batch.tokens, D.heads, D.nope + D.rope)
    q_nope, q_rope = q.split((D.nope, D.rope), -1)
    rows = [slice(r.start, r.stop) for r in batch.rows()]
    want = torch.cat([dense(q_nope[r], q_rope[r], c, kv_b) for r, c in zip(rows, latents)])
    for op in (expanded, absorbed):
        assert close(op, bound(op, {"kv_b": kv_b})(q_nope, q_rope, batch, kv), want)


def test_the_latent_is_stored_before_the_rotated_key():
    batch, kv, _ = world([(3, 0)])
    latent, rope = torch.randn(3, D.latent), torch.randn(3, 2 * D.rope)[:, ::2]
    bound(MLAKVWrite(D.request))(latent, rope, batch, kv)
    assert torch.equal(kv.read(batch.block_tables[0], 3)[0], torch.cat((latent, rope), 1))


WIDTH, RANK = 20, 10


def block(q_lora):
    kv_b = w("kv_b", D.heads * (D.nope + D.value), D.latent)
    rope, q_norm = Rope(rope_table(D.rope)[0], True), RMSNorm(w("q_n", RANK), 1e-6) if q_lora else None
    return MLABlock(
        q_a=Linear(w("q_a", RANK, WIDTH)) if q_lora else None,
        q_b=Linear(w("q_b", D.heads * (D.nope + D.rope), RANK if q_lora else WIDTH)),
        kv_a=Linear(w("kv_a", D.latent + D.rope, WIDTH)),
        enter=MLANormRopeWrite(q_norm, RMSNorm(w("kv_n", D.latent), 1e-6), rope, MLAKVWrite(D.request), D),
        rope=rope,
        expanded=MLAExpanded(Linear(kv_b), D, SCALE, D.request),
        absorbed=MLAAbsorbed(kv_b, D, SCALE, D.request),
        o=Linear(w("o", WIDTH, D.heads * D.value)),
        dims=D,
    )


@pytest.mark.parametrize("q_lora", [True, False])
@pytest.mark.parametrize("form", [None, "absorbed", "expanded"])
def test_mla_block_over_several_steps_is_one_dense_pass(q_lora, form):
    op = block(q_lora)
    t = {}
    for _, weight in op.weights():
        if weight.parts:
            shape = weight.shape
            t[weight.parts[0]] = torch.rand(shape) + 0.5 if len(shape) == 1 else torch.randn(shape) / shape[1] ** 0.5
    d, x = {name: v.double() for name, v in t.items()}, torch.randn(30, WIDTH)
    run = bound(op, t, pins={"mla_block": form} if form else {})

    c = x.double()
    if q_lora:
        c = norm(c @ d["q_a"].T, d["q_n"], 1e-6)
    q = (c @ d["q_b"].T).view(30, D.heads, -1)
    latent, k_rope = (x.double() @ d["kv_a"].T).split((D.latent, D.rope), -1)
    turn = rope_table(D.rope)[1][:30]
    q_rope, k_rope = rotate(q[..., D.nope :], turn[:, None], interleaved=True), rotate(k_rope, turn, interleaved=True)
    stored = torch.cat((norm(latent, d["kv_n"], 1e-6), k_rope), -1)
    want = dense(q[..., : D.nope], q_rope, stored, t["kv_b"]).flatten(1) @ d["o"].T

    kv = paged_layout(4).build(D.request, 12, F32, torch.device("cpu"))
    got, at = [], 0
    for n in (12, 1, 3, 9, 1, 4):
        beside = Query([0] * (2 if n <= 8 else 16), 0, [4, 6, 8, 10])
        batch = make_batch([Query([0] * n, at, [7, 2, 9, 0, 5, 11, 1, 3]), beside], block_tokens=4, device="cpu")
        got.append(run(torch.cat((x[at : at + n], torch.randn(batch.tokens - n, WIDTH))), batch, kv)[:n])
        at += n
    assert close(op, torch.cat(got), want)
