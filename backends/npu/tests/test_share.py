"""How much of a decode step runs on the vendor's operators, by number of sites, at published sizes, without an NPU."""

from __future__ import annotations

import pytest
import torch

from inferplane.binding import PlanSettings, bind
from inferplane.models import Build, Config, build
from inferplane.plugin import Feature, Features
from inferplane_npu.backend import NpuBackend
from tests.vendors.share import ATTENTION_OR_CACHE, DEEPSEEK, LLAMA, PUBLISHED, check, count_providers, count_sites

VENDOR = ("torch_npu", "atb")
V32 = {**DEEPSEEK, "architectures": ["DeepseekV32ForCausalLM"]}
GLM5 = {
    **{**DEEPSEEK, "architectures": ["GlmMoeDsaForCausalLM"], "vocab_size": 154880, "n_group": 1, "topk_group": 1},
    **{"hidden_size": 6144, "intermediate_size": 12288, "num_hidden_layers": 78, "q_lora_rank": 2048},
    **{"num_attention_heads": 64, "num_key_value_heads": 64, "qk_nope_head_dim": 192, "v_head_dim": 256},
}
SPARSE = pytest.mark.parametrize("config", [V32, GLM5], ids=["deepseek_v32", "glm_5"])
TORCHS = {"embedding", "linear", "lm_head", "sample"}
"""What torch's own operators compute everywhere: lookups, products and sampling."""
ARCHS = pytest.mark.parametrize("arch", ["910b", "910_93", "950"])


@ARCHS
@PUBLISHED
def test_a_decode_step_is_the_vendors(config, arch, record_property):
    check(count_providers(NpuBackend(), config, arch, "decode"), VENDOR, record_property, min_share=0.8)


@ARCHS
@PUBLISHED
def test_prompts_attend_by_the_vendors_operators_too(config, arch):
    found = count_providers(NpuBackend(), config, arch, "mixed")
    assert {provider for op, provider in found if op in ATTENTION_OR_CACHE} <= set(VENDOR)


def test_the_310p_runs_llama_on_atb():
    found = count_providers(NpuBackend(), LLAMA, "310p", "decode", torch.float16)
    assert {provider for op, provider in found if op in ATTENTION_OR_CACHE} == {"atb"}
    assert count_sites(found, *VENDOR, "torch") >= 0.8 * found.total(), found


@ARCHS
@SPARSE
@pytest.mark.parametrize("kind", ["decode", "mixed"])
def test_sparse_attention_is_the_vendors(config, arch, kind, record_property):
    found = count_providers(NpuBackend(), config, arch, kind)
    assert {op for op, provider in found if provider != "torch_npu"} == TORCHS, found
    assert found["sparse_mla_block", "torch_npu"] == config["num_hidden_layers"]
    record_property("share", {"sites": found.total(), "vendor": count_sites(found, "torch_npu")})


@ARCHS
@SPARSE
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_nothing_is_composed_without_the_prologue_either(config, arch, kv_dtype):
    """As with several ranks, quantized weights or int8: the strict plan of the block's parts leaves torch the products
    and the indexer's norm or, in int8, the write of latents. What prompts and decode steps attend and choose by is the
    vendor's.
    """
    backend = NpuBackend()
    features = Features({**backend.features(arch), "mla-prolog": Feature(False, "not in this test")})
    settings = PlanSettings("npu", torch.bfloat16, arch, features, assumed=True)
    layouts = lambda r: [x for x in backend.kv_layouts(r, torch.bfloat16) if x.kv_dtype == kv_dtype]  # noqa: E731
    tree = build(
        Build(Config({**config, "num_hidden_layers": 4}), positions=512, rotates_index_keys=kv_dtype == "int8")
    )
    plan = bind(tree, backend.kernels(), settings, layouts, strict=True)
    allowed = {*TORCHS, "layer_norm" if kv_dtype == "auto" else "mla_kv_write"}
    for kind in ("decode", "mixed"):
        chosen = [(op.name, choice) for _, op, choice in plan.sites(kind) if choice.kernel is not None]
        assert {op for op, choice in chosen if choice.kernel.provider != "torch_npu"} == allowed
        indexer = "index_select" if kv_dtype == "auto" else "lightning_indexer"
        served = {op for op, choice in chosen if choice.kernel.provider == "torch_npu"}
        assert {"sparse_mla_absorbed", "sparse_mla_expanded", indexer} <= served
