"""What every op promises: samples, tolerances, cost, structure; and a comparison that can fail."""

import math

import pytest
import torch

from inferplane.binding import view_of
from inferplane.errors import UsageError
from inferplane.kvcache import paged_layout
from inferplane.ops import (
    OPS,
    Attention,
    Cost,
    Draw,
    Embedding,
    GatedMLP,
    GQABlock,
    Linear,
    LMHead,
    MLABlock,
    MoE,
    Op,
    SampleTokens,
    Workload,
    encode,
    placeholder,
)
from inferplane.ops.op import MEANINGS
from inferplane.types import Batch, KVRequest, Weight
from tests.unit.support.small import BF16, DTYPES, F32, bound, tiny_llama, tiny_v3

IN_TREE = {name: op for name, op in OPS.items() if op.__module__.startswith("inferplane.")}
SAMPLES = [pytest.param(s, id=f"{name}-{s.label}") for name, op in IN_TREE.items() for s in op.samples()]
LOAD = Workload(tokens=5, kv_tokens=300, pairs=900)


def draw(seed=0, dtype=F32):
    layout = paged_layout(16)
    return Draw(seed, dtype, build_kv=lambda r, n: layout.build(r, n, dtype, torch.device("cpu")))


@pytest.mark.parametrize("name", IN_TREE)
def test_every_op_states_what_it_is(name):
    op = IN_TREE[name]
    assert op.name == name and op.__doc__
    assert all(op.tolerance[dtype] >= 0 for dtype in DTYPES)
    labels = [s.label for s in op.samples()]
    assert len(set(labels)) == len(labels) and (labels or name == "causal_lm")
    assert all(type(s.op) is op for s in op.samples())


@pytest.mark.parametrize("sample", SAMPLES)
def test_samples_are_of_the_step_they_say(sample):
    batches = [a for a in sample.inputs(draw()) if isinstance(a, Batch)]
    if batches and sample.op.name != "lm_head":
        assert [b.kind for b in batches] == [sample.step_kind]


@pytest.mark.parametrize("sample", SAMPLES)
def test_cost_is_finite_and_grows(sample):
    small, large = sample.op.cost(LOAD), sample.op.cost(Workload(50, 3000, 9000))
    assert all(0 <= x < math.inf for c in (small, large) for x in (c.nbytes, c.flops))
    assert large.nbytes >= small.nbytes and large.flops >= small.flops
    if sample.op.hot and sample.op.name not in ("moe_experts", "clamped_experts"):  # the layer around them counts
        assert small.nbytes > 0 and small.flops > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_bytes_are_exact(dtype):
    plain, fp8 = Linear(placeholder(30, 70)), Linear(placeholder(30, 70, format="fp8_block"))
    size, load = dtype.itemsize, Workload(5, dtype=dtype)
    assert plain.cost(load) == Cost(30 * 70 * size + 5 * (30 + 70) * size, 2 * 5 * 30 * 70)
    assert fp8.cost(load).nbytes == 30 * 70 + 5 * (30 + 70) * size
    fixed = Linear(placeholder(30, 70, dtype=F32))
    assert fixed.cost(load).nbytes == 30 * 70 * 4 + 5 * (30 + 70) * size


def test_cost_of_blocks_counts_each_sequence_once():
    block: GQABlock = GQABlock.samples()[0].op
    parts = [block.qkv, block.o, block.many, block.enter]
    assert block.cost(LOAD) == sum((p.cost(LOAD) for p in parts), Cost())
    attention = Attention(4, 1.0, KVRequest("gqa", 2, 64, 32))
    assert attention.cost(LOAD) == Cost(300 * 2 * (64 + 32) * 2, 2 * 900 * 4 * (64 + 32))


def test_cost_of_latent_attention_is_that_of_the_cheaper_form():
    block: MLABlock = next(o for _, o in tiny_v3().sites() if o.name == "mla_block")
    decode, prefill = Workload(4, 4000, 4000), Workload(1000, 1000, 1_000_000)
    rest = [c for path, c in block.children() if path not in ("absorbed", "expanded")]
    for load, form in ((decode, block.absorbed), (prefill, block.expanded)):
        assert block.cost(load).flops == form.cost(load).flops + sum(c.cost(load).flops for c in rest)


def test_cost_of_a_mixture_reads_chosen_experts_only():
    moe: MoE = MoE.samples()[1].op  # 8 experts of 64 x 64 and 64 x 32, two a token, nothing shared
    one = (64 * 64 + 64 * 32) * 2
    router = moe.router.cost(Workload(1)).nbytes
    assert moe.cost(Workload(1)).nbytes == router + 2 * one
    assert moe.cost(Workload(100)).nbytes == moe.router.cost(Workload(100)).nbytes + 8 * one
    assert moe.cost(Workload(1)).flops - moe.router.cost(Workload(1)).flops == 2 * 2 * (64 * 64 + 64 * 32)


def test_cost_of_a_model_is_what_a_call_runs():
    with_mtp, without = tiny_v3(mtp=True), tiny_v3()
    assert len(with_mtp.mtp) == 1 and with_mtp.cost(LOAD) == without.cost(LOAD)


def test_each_site_has_one_name():
    model = tiny_v3(mtp=True)
    sites = [site for site, _ in model.sites()]
    assert sites[0] == "" and len(set(sites)) == len(sites)
    assert {"layers.1.mlp.experts", "layers.0.mlp.down", "layers.3.attn.absorbed", "mtp.0.layer.attn.o", "sample"} <= {
        *sites
    }
    kept = {path: weight for path, weight in model.weights()}
    assert kept["layers.2.attn.absorbed.kv_b"] is kept["layers.2.attn.expanded.kv_b.weight"], "the tie"
    assert kept["mtp.0.embed.weight"] is kept["embed.weight"]


def test_keys_say_what_binds_alike():
    a, b = tiny_v3(), tiny_v3()
    assert a.key() == b.key() and hash(a.key()) == hash(b.key()) and a.key() is a.key()
    layers = [layer.key() for layer in a.layers]
    assert layers[1] == layers[2] == layers[3] != layers[0]
    assert len({tiny_llama(**c).key() for c in ({}, {"hidden_size": 32}, {"head_dim": 8}, {"rms_norm_eps": 1e-3})}) == 4
    formats = {Linear(Weight(("w",), (4, 4), format=f)).key() for f in ("plain", "int8_row")}
    assert len(formats | {Linear(Weight(("w",), (4, 4), F32)).key()}) == 3
    assert Linear(Weight(("a",), (4, 4))).key() == Linear(Weight(("b",), (4, 4), optional=True)).key()


def test_what_is_below():
    model = tiny_v3()
    assert model.formats() == {"plain"} and [r.kind for r in model.kv_requests()] == ["mla"]
    fp8 = Linear(placeholder(4, 4, format="fp8_block"))
    assert GatedMLP(fp8, Linear(placeholder(4, 2))).formats() == {"plain", "fp8_block"}


def test_names_of_ops_are_taken_once():
    with pytest.raises(UsageError, match=r"'linear' exists already: inferplane.ops.linear.Linear"):

        class Again(Op, name="linear"):
            pass

    with pytest.raises(TypeError):

        class Broken(Op, name="broken_by_field_order"):
            first: int = 0
            second: int

    assert "broken_by_field_order" not in OPS and OPS["linear"] is Linear


def test_an_op_without_a_body_says_so():
    with pytest.raises(NotImplementedError):
        Op()()


def test_ops_of_one_weight_only_read_it():
    """A body works on a weight as it is kept, also in the plan's narrow dtype."""
    weight = torch.randn(7, 16)
    got = bound(LMHead(Weight(("w",), (7, 16))), {"w": weight}, dtype=BF16)
    assert view_of(got).weight.dtype is BF16
    assert view_of(bound(Embedding(Weight(("w",), (7, 16), F32)), {"w": weight}, dtype=BF16)).weight.dtype is F32


def test_variants_and_hot_marks():
    assert set(MLABlock.variants) == {"absorbed", "expanded"} and not GQABlock.variants
    hot = {name for name, op in IN_TREE.items() if op.hot}
    products = {"linear", "lm_head", "clamped_experts", "moe_experts"}
    sparse = {"index_select", "sparse_mla_expanded", "sparse_mla_absorbed"}
    dense = {"attention", "mla_expanded", "mla_absorbed", "shared_kv_attention"}
    compressed = {"compress_rows", "compressed_attention"}
    assert hot == products | dense | sparse | compressed | {"gated_delta_rule", "selective_scan"}
    assert not SampleTokens.hot


def test_meanings_are_not_inherited():
    """Kernels of a layer compute its children themselves: a child with another body must not pass for its parent."""
    having = {meaning: [name for name, op in IN_TREE.items() if getattr(op, meaning)] for meaning in MEANINGS}
    assert having == {
        "has_grouped_queries": ["gqa_block"],
        "has_latent_attention": ["mla_block"],
        "has_sparse_attention": ["sparse_mla_block"],
        "has_compressed_attention": ["compressed_block"],
        "has_shared_kv": ["shared_kv_block"],
        "is_gated_mlp": ["gated_mlp"],
        "has_recurrence": ["recurrent_block"],
        "is_delta_net": ["gated_delta_net"],
        "is_kimi_delta_attention": ["kimi_delta_attention"],
        "is_mamba2": ["mamba2_mixer"],
        "is_short_convolution": ["short_conv"],
        "has_experts": ["moe"],
    }
    try:

        class Other(MoE, name="other_moe"):
            pass

        assert MoE.has_experts and not Other.has_experts
    finally:
        OPS.pop("other_moe", None)


def test_encoders_are_what_samples_draw():
    op = Linear(placeholder(20, 256, format="fp8_block"))
    q = draw().weight(op.weight)
    values = torch.randn(20, 256, generator=torch.Generator().manual_seed(0)) / 16
    assert torch.equal(q.dequantize(), encode(values, "fp8_block").dequantize())
