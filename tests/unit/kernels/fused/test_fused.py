"""What kernels share that are fused operators of a vendor: operands, call forms, packings, latents."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from inferplane.kernels.fused import latents, needs, operands, packings, vllm_calls
from inferplane.ops import Linear, MLADims
from inferplane.types import HOST, RANK_FUSED, Kernels, QTensor, Weight, When

D = MLADims(3, 16, 8, 12, 32)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(7)


def test_one_scale_a_device():
    scale = operands.unit_scale(torch.device(HOST))
    assert scale.tolist() == [1.0] and scale.dtype is torch.float32
    assert operands.unit_scale(torch.device(HOST)) is scale


@pytest.mark.parametrize("heads", [1, 2, 5])
def test_the_last_head_goes_as_the_key(heads):
    """Heads are a view of something wider, and stay as they are."""
    whole = torch.randn(4, heads, 12)
    x, before, shapes = whole[..., :6], whole.clone(), []

    def double(rest, last):
        shapes.append((tuple(rest.shape), tuple(last.shape)))
        rest.mul_(2)
        last.mul_(2)

    torch.testing.assert_close(operands.rotate_last_head_as_key(x, double), x * 2, rtol=0, atol=0)
    assert shapes == [((4, max(1, heads - 1) * 6), (4, 6))]
    torch.testing.assert_close(whole, before, rtol=0, atol=0)


def test_each_token_alone():
    """Two sequences with 3 and 2 tokens, the second of which is padding; then one token each, as they are."""
    batch = SimpleNamespace(
        tokens=5,
        query_start=torch.tensor([0, 3, 5], dtype=torch.int32),
        seq_lens=torch.tensor([10, 0], dtype=torch.int32),
        block_tables=torch.tensor([[4, 7], [0, 0]], dtype=torch.int32),
        max_query_tokens=3,
    )
    lens, tables = operands.one_sequence_per_token(batch)
    assert lens.tolist() == [8, 9, 10, 0, 0] and lens.dtype is torch.int32
    assert tables.tolist() == [[4, 7]] * 3 + [[0, 0]] * 2
    batch.max_query_tokens = 1
    lens, tables = operands.one_sequence_per_token(batch)
    assert lens is batch.seq_lens and tables is batch.block_tables


def test_running_sums_and_room_for_routes():
    starts = operands.cumulative_lengths((3, 0, 5), torch.device(HOST))
    assert starts.tolist() == [0, 3, 3, 8] and starts.dtype is torch.int32
    weights, ids = operands.allocate_routing(torch.randn(4, 16, dtype=torch.bfloat16), 3)
    assert weights.shape == ids.shape == (4, 3)
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)


def strided(rows, columns):
    """Rows that are every second one of a wider tensor, and a copy of them."""
    x = torch.randn(2 * rows, columns)[::2]
    return x, x.clone()


def test_norms_leave_their_inputs_as_they_are():
    """The call forms are given something else to compute: copies are what is tested."""
    (x, x_before), (residual, residual_before) = strided(3, 8), strided(3, 8)
    norm = SimpleNamespace(weight=torch.randn(8), eps=1e-6)

    def scaled(out, rows, weight, eps):
        assert rows.is_contiguous() and eps == norm.eps
        out.copy_(rows * weight)

    def added(rows, total, weight, eps):
        assert rows.is_contiguous() and total.is_contiguous() and eps == norm.eps
        total.add_(rows)
        rows.copy_(total * weight)

    torch.testing.assert_close(vllm_calls.rms_norm(scaled, norm, x), x_before * norm.weight)
    y, total = vllm_calls.add_rms_norm(added, norm, x, residual)
    torch.testing.assert_close(total, x_before + residual_before)
    torch.testing.assert_close(y, total * norm.weight)
    assert torch.equal(x, x_before) and torch.equal(residual, residual_before)


def test_the_activation_is_given_room_of_half_the_width():
    def first_half(out, rows):
        assert rows.is_contiguous()
        out.copy_(rows[..., : rows.shape[-1] // 2])

    x, _ = strided(4, 6)
    torch.testing.assert_close(vllm_calls.silu_mul(first_half, x), x[:, :3])


def test_writes_are_called_with_the_cache_as_it_is_and_a_scale_of_one():
    (k, _), (v, _), (keys, values), called = strided(4, 8), strided(4, 8), torch.zeros(2, 5, 8), []
    batch, one = SimpleNamespace(slots=torch.tensor([3, -1, 0, 1])), operands.unit_scale(torch.device(HOST))
    vllm_calls.kv_write(lambda *given: called.append(given), k, v, (keys, values), batch)
    vllm_calls.mla_kv_write(lambda *given: called.append(given), k, v, keys, batch)
    (first, second, *rest), (latent, k_rope, *more) = called
    assert rest[0] is keys and rest[1] is values and rest[2:] == [batch.slots, "auto", one, one]
    assert more[0] is keys and more[1:] == [batch.slots, "auto", one]
    for given, of in ((first, k), (second, v), (latent, k), (k_rope, v)):
        assert given.is_contiguous() and torch.equal(given, of)


def test_a_table_is_cast_once_for_each_dtype():
    angles = torch.randn(9, 2, 4)
    table = packings.RopeTable(angles)
    half = table.to_dtype(torch.bfloat16)
    assert half is table.to_dtype(torch.bfloat16)
    assert table.to_dtype(torch.float16).dtype is torch.float16
    torch.testing.assert_close(half, torch.cat((angles[:, 0], angles[:, 1]), 1).bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize("zeros", [True, False])
def test_zero_points_are_taken_off_a_product_that_knows_none(zeros):
    data, scale = torch.randint(-127, 128, (6, 64), dtype=torch.int8), torch.rand(6, 1) + 0.5
    zero = torch.randint(-9, 10, (6, 1)).float() if zeros else None
    weight = QTensor(data, scale, zero, (1, 64), "int8_row")
    rows = packings.Int8Rows(weight)
    plain = (data.double() - (zero.double() if zeros else 0)) * scale
    x = torch.randint(-127, 128, (3, 64), dtype=torch.int8)
    by = torch.rand(3, 1) + 0.5
    product = ((x.double() @ rows.data.double().t()) * rows.scale).float()
    exact = x.double() @ plain.t()
    torch.testing.assert_close(rows.subtract_zero_points(product, x).double(), exact)
    torch.testing.assert_close(rows.subtract_zero_points(product * by, x, by).double(), exact * by)
    assert zeros or rows.subtract_zero_points(product, x) is product


def test_folded_queries_score_latents_as_queries_score_expanded_keys():
    """And sums of latents, unfolded, are sums of expanded values."""
    kv_b = torch.randn(D.heads * (D.nope + D.value), D.latent, dtype=torch.float64)
    entries = torch.randn(7, D.latent + D.rope, dtype=torch.float64)
    q_nope, q_rope = (torch.randn(5, D.heads, n, dtype=torch.float64) for n in (D.nope, D.rope))
    absorbed = SimpleNamespace(dims=D, kv_b=kv_b)
    keys, values = latents.expand_latents(SimpleNamespace(dims=D, kv_b=SimpleNamespace(weight=kv_b)), entries)
    assert keys.shape == values.shape == (7, D.heads, D.nope + D.rope)
    assert not values[..., D.value :].any()
    scores = torch.einsum("thd,nhd->thn", torch.cat((q_nope, q_rope), -1), keys)
    query = latents.fold_query(absorbed, q_nope, q_rope)
    assert query.shape == (5, D.heads, D.latent + D.rope)
    torch.testing.assert_close(torch.einsum("thd,nd->thn", query, entries), scores)
    mid = torch.einsum("thn,nd->thd", scores, entries[:, : D.latent])
    out = latents.unfold_result(absorbed, mid)
    torch.testing.assert_close(out, torch.einsum("thn,nhv->thv", scores, values[..., : D.value]))
    assert out.is_contiguous()


def test_blocks_of_latents_are_expanded_in_their_shape():
    p = SimpleNamespace(dims=D, kv_b=SimpleNamespace(weight=torch.randn(D.heads * (D.nope + D.value), D.latent)))
    entries = torch.randn(2, 4, D.latent + D.rope)
    for blocks, rows in zip(latents.expand_latents(p, entries), latents.expand_latents(p, entries.flatten(0, 1))):
        torch.testing.assert_close(blocks.flatten(0, 1), rows)


def test_a_plain_kv_b_has_no_bias_and_gives_the_plans_dtype():
    def kv_b(**more):
        return SimpleNamespace(kv_b=Linear(Weight(("w",), (56, 32)), **more))

    _, plain = needs.PLAIN_KV_B
    assert plain(kv_b())
    assert not plain(kv_b(bias=Weight(("b",), (56,))))
    assert not plain(kv_b(out_dtype=torch.float32))


def test_a_declaration_states_what_its_module_shares():
    """A module's own conditions hold for each kernel that does not state others; so do rank and capture safety."""
    kernels = Kernels()
    fused = partial(needs.declare_fused, kernels, provider="acme", features=("acme-ops",))
    wide = ("wide rows", lambda op: True)

    @fused("rms_norm", wide, packs={"weight": packings.FLOAT32})
    def norm(view, x):
        return x

    @fused("linear", dtypes=needs.FLOATS, formats=("int8_row",), features=(), rank=65, capture_safe=False)
    def linear(view, x):
        return x

    first, second = kernels
    assert (first.op, first.name, first.function()) == ("rms_norm", "acme:norm", norm)
    assert first.when == When(needs.HALF, features=("acme-ops",), needs=(wide,))
    assert (first.rank, first.capture_safe, first.packs) == (RANK_FUSED, True, {"weight": packings.FLOAT32})
    assert second.when == When(needs.FLOATS, ("int8_row",)) and second.function() is linear
    assert (second.rank, second.capture_safe) == (65, False)
