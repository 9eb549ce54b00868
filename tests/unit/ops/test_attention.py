"""Attention over the paged cache against dense attention in float64 with explicit masks."""

import pytest
import torch

from inferplane.kvcache import paged_layout
from inferplane.ops import Attention, GQABlock, KVWrite, Linear, NormRopeWrite, RMSNorm, Rope, each_range, mask_pairs
from inferplane.types import KVRequest, Weight
from inferplane.types.batch import Query, make_batch
from tests.unit.support.formulas import SEQUENCES, norm, rope_table, rotate
from tests.unit.support.small import DTYPES, F32, bound, close, w


def dense(q, k, v, scale, window=None):
    """One sequence: q `[m, H, D]` are its last m tokens, k and v `[n, G, D]` all of them. By query and head."""
    m, n, group = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    out = torch.zeros(m, q.shape[1], v.shape[-1], dtype=torch.float64)
    for i in range(m):
        last = n - m + i
        seen = [t for t in range(n) if t <= last and (window is None or last - t < window)]
        for h in range(q.shape[1]):
            s = (k[seen, h // group].double() @ q[i, h].double()) * scale
            out[i, h] = torch.softmax(s, 0) @ v[seen, h // group].double()
    return out


def world(request, sequences, dtype=F32, size=8, seed=0):
    """Sequences in scattered blocks of a cache: `(batch, cache, [k of each], [v of each])`, all tokens written."""
    g = torch.Generator().manual_seed(seed)
    counts = [-(-(new + before) // size) for new, before in sequences]
    kv = paged_layout(size).build(request, sum(counts) + 2, dtype, torch.device("cpu"))
    order = torch.randperm(sum(counts) + 2, generator=g).tolist()
    queries, ks, vs = [], [], []
    for (new, before), count in zip(sequences, counts):
        blocks, order = order[:count], order[count:]
        n = new + before
        k = torch.randn(n, request.heads, request.dim, generator=g).to(dtype)
        v = torch.randn(n, request.heads, request.v_dim, generator=g).to(dtype)
        kv.write(torch.tensor([blocks[t // size] * size + t % size for t in range(n)]), k, v)
        queries.append(Query([0] * new, before, blocks))
        ks.append(k)
        vs.append(v)
    return make_batch(queries, block_tokens=size, device="cpu"), kv, ks, vs


@pytest.mark.parametrize(
    ("query_tokens", "tokens", "window"), [(1, 1, None), (3, 7, None), (4, 9, 3), (5, 5, 1), (2, 6, 99)]
)
def test_hidden_pairs(query_tokens, tokens, window):
    got = mask_pairs(query_tokens, tokens, window, torch.device("cpu"))
    for i in range(query_tokens):
        position = tokens - query_tokens + i
        for t in range(tokens):
            seen = t <= position and (window is None or t > position - window)
            assert got[i, t].item() is not seen


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "v_dim"), [(4, 2, 16, 16), (3, 3, 8, 24), (8, 1, 32, 16)])
def test_attention_is_dense_attention(dtype, window, heads, kv_heads, dim, v_dim):
    request = KVRequest("gqa", kv_heads, dim, v_dim, window)
    op = Attention(heads, 0.3, request)
    batch, kv, ks, vs = world(request, SEQUENCES, dtype)
    q = torch.randn(batch.tokens, heads, dim).to(dtype)
    want = torch.cat([dense(q[r.start : r.stop], k, v, 0.3, window) for r, k, v in zip(batch.rows(), ks, vs)])
    assert close(op, bound(op, dtype=dtype)(q, batch, kv), want, dtype)


@pytest.mark.parametrize(("first", "last", "calls"), [(0, 7, ["few", "many"]), (0, 4, ["few"]), (4, 7, ["many"])])
def test_each_range_keeps_order_and_sends_rows_where_they_belong(first, last, calls):
    batch, kv, *_ = world(KVRequest("gqa", 1, 4, 4), SEQUENCES[first:last])
    seen = []

    def attend(name):
        def run(q, other, part, cache):
            assert cache is kv and q.shape[0] == other.shape[0] == part.tokens
            assert all((r.stop - r.start <= 8) == (name == "few") for r in part.rows())
            seen.append(name)
            return q + other

        return run

    q = torch.randn(batch.tokens, 2)
    got = each_range(batch, (q, 10 * q), attend("few"), attend("many"), kv)
    assert torch.equal(got, q + 10 * q) and seen == calls


def test_kv_write_ignores_padding():
    request = KVRequest("gqa", 2, 4, 6)
    batch, kv, *_ = world(request, [(2, 3)])
    before = [t.clone() for t in kv.read(batch.block_tables[0], 5)]
    op = bound(KVWrite(request))
    k, v = torch.randn(2, 2, 4), torch.randn(2, 2, 6)
    object.__setattr__(batch, "slots", torch.stack((batch.slots[0], torch.tensor(-1))))
    assert op(k, v, batch, kv) is None
    got = kv.read(batch.block_tables[0], 5)
    for g, b, new in zip(got, before, (k, v)):
        assert torch.equal(g[:3], b[:3]) and torch.equal(g[3], new[0]) and torch.equal(g[4], b[4])


WIDTH, HEADS, KV_HEADS, DIM = 24, 4, 2, 8


def block(norms):
    request = KVRequest("gqa", KV_HEADS, DIM, DIM)
    qk_norms = [RMSNorm(w(name, DIM), 1e-6) if norms else None for name in ("qn", "kn")]
    return GQABlock(
        qkv=Linear(Weight(("q", "k", "v"), ((HEADS + 2 * KV_HEADS) * DIM, WIDTH))),
        o=Linear(w("o", WIDTH, HEADS * DIM)),
        enter=NormRopeWrite(Rope(rope_table(DIM)[0]), KVWrite(request), *qk_norms),
        few=Attention(HEADS, DIM**-0.5, request, "few"),
        many=Attention(HEADS, DIM**-0.5, request, "many"),
        heads=(HEADS, KV_HEADS),
        head_dim=DIM,
    )


@pytest.mark.parametrize("norms", [False, True])
def test_gqa_block_over_several_steps_is_one_dense_pass(norms):
    rows = {"q": HEADS * DIM, "k": KV_HEADS * DIM, "v": KV_HEADS * DIM}
    t = {name: torch.randn(n, WIDTH) / WIDTH**0.5 for name, n in rows.items()}
    t["o"] = torch.randn(WIDTH, HEADS * DIM) / (HEADS * DIM) ** 0.5
    t |= {"qn": torch.rand(DIM) + 0.5, "kn": torch.rand(DIM) + 0.5}
    op, d = block(norms), {name: v.double() for name, v in t.items()}
    run, x = bound(op, t), torch.randn(30, WIDTH)

    def heads(name, count):
        return (x.double() @ d[name].T).view(30, count, DIM)

    q, k, v = heads("q", HEADS), heads("k", KV_HEADS), heads("v", KV_HEADS)
    if norms:
        q, k = norm(q, d["qn"], 1e-6), norm(k, d["kn"], 1e-6)
    q, k = (rotate(a, rope_table(DIM)[1][:30, None], interleaved=False) for a in (q, k))
    want = dense(q, k, v, DIM**-0.5).flatten(1) @ d["o"].T

    kv = paged_layout(4).build(KVRequest("gqa", KV_HEADS, DIM, DIM), 12, F32, torch.device("cpu"))
    blocks, other = [7, 2, 9, 0, 5, 11, 1, 3], [4, 6, 8, 10]
    got, at = [], 0
    for n in (12, 1, 3, 9, 1, 4):  # prefill, decode, drafts, a chunk: beside another sequence that must not matter
        mine = Query([0] * n, at, blocks)
        beside = Query([0] * (2 if n <= 8 else 16), 0, other)
        batch = make_batch([mine, beside], block_tokens=4, device="cpu")
        noise = torch.randn(batch.tokens - n, WIDTH)
        got.append(run(torch.cat((x[at : at + n], noise)), batch, kv)[:n])
        at += n
    assert close(op, torch.cat(got), want)
