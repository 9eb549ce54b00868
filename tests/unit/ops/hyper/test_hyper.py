"""Hyper-connections and their routers against transformers' modules of DeepSeek-V4 with the same weights."""

from __future__ import annotations

import pytest
import torch
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4DecoderLayer,
    DeepseekV4HashRouter,
    DeepseekV4HyperConnection,
    DeepseekV4HyperHead,
    DeepseekV4RMSNorm,
    DeepseekV4SparseMoeBlock,
    DeepseekV4TopKRouter,
)

from inferplane.ops import (
    ActivationMul,
    AddRMSNorm,
    Embedding,
    GatedMLP,
    HashMoE,
    HashRoute,
    HyperCollapse,
    HyperHead,
    HyperLayer,
    HyperMTPLayer,
    HyperNorm,
    HyperPost,
    HyperPre,
    Linear,
    LMHead,
    MoE,
    MoEExperts,
    MoERoute,
    RMSNorm,
    Sinkhorn,
)
from inferplane.types.batch import Query, make_batch
from tests.unit.support.small import F32

WIDTH, TOKENS, VOCAB = 40, 23, 97


def config(**entries):
    sizes = {"hidden_size": WIDTH, "moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 3}
    attention = {"num_attention_heads": 4, "head_dim": 16, "q_lora_rank": 12, "o_groups": 2, "o_lora_rank": 10}
    layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention"] * 2, "vocab_size": VOCAB}
    return DeepseekV4Config(**{**sizes, **attention, **layers, "swiglu_limit": 0.3, **entries})


def numbers(*shape, seed, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def randomize(module):
    tensors = [*module.named_parameters(), *module.named_buffers()]
    for i, (name, tensor) in enumerate(tensors):
        if name.endswith("tid2eid"):
            order = numbers(*tensor.shape[:1], 8, seed=i).argsort(-1)
            tensor.data.copy_(order[:, : tensor.shape[1]])
        elif tensor.is_floating_point() and "inv_freq" not in name:
            tensor.data.copy_(numbers(*tensor.shape, seed=i, scale=0.4))
    return module.eval()


def near(got, want):
    assert got.shape == want.shape
    torch.testing.assert_close(got.double(), want.double(), rtol=1e-5, atol=1e-6)


def pre(module, cfg):
    collapse = HyperCollapse(
        module.fn.data, module.base.data, module.scale.data, cfg.hc_mult, cfg.rms_norm_eps, cfg.hc_eps
    )
    return HyperPre(collapse, Sinkhorn(cfg.hc_sinkhorn_iters, cfg.hc_eps))


@pytest.mark.parametrize("entries", [{}, {"hc_mult": 2, "hc_sinkhorn_iters": 1}, {"hc_mult": 3, "hc_eps": 0.03}])
def test_what_stands_before_a_block(entries):
    cfg = config(**entries)
    module = randomize(DeepseekV4HyperConnection(cfg))
    x = numbers(TOKENS, cfg.hc_mult, WIDTH, seed=40)
    with torch.no_grad():
        post, mix, h = module(x[None])
    for got, want in zip(pre(module, cfg)(x), (h, post, mix)):
        near(got, want[0])


def test_mixes_become_doubly_stochastic_and_keep_their_direction():
    mix = Sinkhorn(20, 1e-6)(numbers(TOKENS, 4, 4, seed=1))
    near(mix.sum(-1), torch.ones(TOKENS, 4))
    near(mix.sum(-2), torch.ones(TOKENS, 4))
    x, y = numbers(TOKENS, 4, WIDTH, seed=2), numbers(TOKENS, WIDTH, seed=3)
    post = numbers(TOKENS, 4, seed=4)
    got = HyperPost(4, WIDTH)(y, x, post, mix)
    for k in range(4):
        near(got[:, k], post[:, k, None] * y + sum(mix[:, j, k, None] * x[:, j] for j in range(4)))


@pytest.mark.parametrize("streams", [4, 2])
def test_the_head_and_the_norm_behind_the_layers(streams):
    cfg = config(hc_mult=streams)
    module, norm = randomize(DeepseekV4HyperHead(cfg)), randomize(DeepseekV4RMSNorm(WIDTH))
    x = numbers(TOKENS, streams, WIDTH, seed=40)
    head = HyperHead(module.hc_fn.data, module.hc_base.data, module.hc_scale.data, streams, 1e-6, cfg.hc_eps)
    op = HyperNorm(head, AddRMSNorm(RMSNorm(norm.weight.data, 1e-6)))
    with torch.no_grad():
        near(head(x), module(x[None])[0])
        got, kept = op(x, None)
        near(got, norm(module(x[None]))[0])
    assert kept is x


def by_expert(weights, chosen, experts):
    return torch.zeros(weights.shape[0], experts).scatter_add(1, chosen, weights)


@pytest.mark.parametrize("score", ["sqrtsoftplus", "sigmoid"])
def test_routers(score):
    cfg = config(scoring_func=score)
    x, ids = numbers(TOKENS, WIDTH, seed=9), torch.randint(0, VOCAB, (TOKENS,))
    for module in (randomize(DeepseekV4TopKRouter(cfg)), randomize(DeepseekV4HashRouter(cfg))):
        is_hash = isinstance(module, DeepseekV4HashRouter)
        with torch.no_grad():
            logits, weights, chosen = module(x, ids) if is_hash else module(x)
        if is_hash:
            got = HashRoute(module.tid2eid.int(), score, factor=1.5)(logits, ids)
        else:
            got = MoERoute(module.e_score_correction_bias, 3, score, factor=1.5)(logits)
        near(by_expert(*got, 8), by_expert(weights, chosen, 8))


def experts(module):
    """The layer of experts with transformers' weights."""
    shared, limit = module.shared_experts, module.experts.limit
    act = ActivationMul("silu", limit=limit, limits_input=True)
    both = torch.cat((shared.gate_proj.weight.data, shared.up_proj.weight.data))
    parts = (
        Linear(module.gate.weight.data, out_dtype=F32),
        MoEExperts(module.experts.gate_up_proj.data, module.experts.down_proj.data, limit=limit, limits_input=True),
        GatedMLP(Linear(both), Linear(shared.down_proj.weight.data), act),
    )
    if module.is_hash:
        return HashMoE(parts[0], HashRoute(module.gate.tid2eid.int(), factor=1.5), *parts[1:])
    return MoE(parts[0], MoERoute(module.gate.e_score_correction_bias, 3, "sqrtsoftplus", factor=1.5), *parts[1:])


@pytest.mark.parametrize("kind", ["hash_moe", "moe"])
@pytest.mark.parametrize("limit", [0.3, 10.0])
def test_experts(kind, limit):
    module = randomize(DeepseekV4SparseMoeBlock(config(mlp_layer_types=[kind] * 2, swiglu_limit=limit), 0))
    x, ids = numbers(TOKENS, WIDTH, seed=9), torch.randint(0, VOCAB, (TOKENS,))
    with torch.no_grad():
        want = module(x[None], input_ids=ids[None])[0]
    near(experts(module)(x, ids) if kind == "hash_moe" else experts(module)(x), want)


MIXING = numbers(TOKENS, TOKENS, seed=60, scale=0.2)
"""What stands for attention."""


def layer(module, cfg):
    """Our layer with transformers' weights, around the same given attention in both."""
    module.self_attn.forward = lambda x, **_: (MIXING @ x, None)
    norms = [rms_norm(norm) for norm in (module.input_layernorm, module.post_attention_layernorm)]
    first, second, mlp = pre(module.attn_hc, cfg), pre(module.ffn_hc, cfg), experts(module.mlp)
    post, attention = HyperPost(4, WIDTH), lambda x, batch, kv: MIXING @ x
    is_hash = module.mlp.is_hash
    return HyperLayer(first, AddRMSNorm(norms[0]), attention, post, second, AddRMSNorm(norms[1]), mlp, post, is_hash)


def rms_norm(module):
    return RMSNorm(module.weight.data, 1e-6)


def step(ids):
    return make_batch([Query(ids.tolist(), 0, range(8))], block_tokens=16, device="cpu")


@pytest.mark.parametrize("kind", ["hash_moe", "moe"])
def test_a_layer_around_a_given_attention(kind):
    cfg = config(mlp_layer_types=[kind] * 2)
    module = randomize(DeepseekV4DecoderLayer(cfg, 1))
    ids, x = torch.randint(0, VOCAB, (TOKENS,)), numbers(TOKENS, 4, WIDTH, seed=5)
    op = layer(module, cfg)
    with torch.no_grad():
        want = module(x[None], input_ids=ids[None])[0]
    got, residual = op(x, None, step(ids), None)
    near(got, want)
    assert residual is None


def test_a_prediction_layer_around_a_given_attention():
    """transformers has none: its modules in the order of the published files' own."""
    cfg = config(mlp_layer_types=["moe"] * 2)
    module, head = randomize(DeepseekV4DecoderLayer(cfg, 1)), randomize(DeepseekV4HyperHead(cfg))
    norms = [randomize(DeepseekV4RMSNorm(WIDTH)) for _ in range(3)]
    e_proj, h_proj = (numbers(WIDTH, WIDTH, seed=70 + i, scale=0.2) for i in range(2))
    vocab, ids = numbers(VOCAB, WIDTH, seed=72), torch.randint(0, VOCAB, (TOKENS,))
    hidden = numbers(TOKENS, 4, WIDTH, seed=73)
    collapse = HyperHead(head.hc_fn.data, head.hc_base.data, head.hc_scale.data, 4, 1e-6, cfg.hc_eps)
    enorm, hnorm, last = map(rms_norm, norms)
    op = HyperMTPLayer(
        *(Embedding(vocab), enorm, hnorm, Linear(e_proj), Linear(h_proj), layer(module, cfg)),
        *(HyperNorm(collapse, AddRMSNorm(last)), LMHead(vocab), 4),
    )
    with torch.no_grad():
        x = norms[1](hidden) @ h_proj.T + (norms[0](vocab[ids]) @ e_proj.T)[:, None]
        want = module(x[None])
        logits = norms[2](head(want))[0] @ vocab.T
    got, streams = op(hidden.flatten(1), step(ids), None)
    near(streams, want[0].flatten(1))
    torch.testing.assert_close(got, logits, rtol=1e-5, atol=1e-5)
