"""The trees of published models, by their configs alone: sizes, names, ties."""

from __future__ import annotations

import math
import time

import pytest
import torch

from inferplane.errors import CheckpointError, UnsupportedModelError
from inferplane.models import Build, Config, build
from inferplane.ops import MLABlock
from inferplane.quant import format_of
from inferplane.types import ActivationQuant, Placement

V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "hidden_act": "silu",
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}


def llama(layers, width, inner, heads, vocab=128256, **more):
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        **more,
    }


def weights(config, **options):
    """Distinct weights that are read from a checkpoint."""
    model = build(Build(Config(config), **options))
    return {id(w): w for _, w in model.weights() if w.parts}.values()


@pytest.mark.parametrize(
    ("config", "want"),
    [
        (llama(16, 2048, 8192, 32, tie_word_embeddings=True), 1_235_814_400),  # Llama 3.2 1B
        (llama(32, 4096, 14336, 32), 8_030_261_248),  # Llama 3 8B
        (llama(80, 8192, 28672, 64), 70_553_706_496),  # Llama 3 70B
    ],
)
def test_parameters_of_llama(config, want):
    assert sum(math.prod(w.shape) for w in weights(config)) == want


def qwen(name, layers, width, inner, heads, kv_heads, vocab=151936, **more):
    config = llama(layers, width, inner, heads, vocab, num_key_value_heads=kv_heads, max_position_embeddings=40960)
    return {**config, "architectures": [f"{name}ForCausalLM"], "use_sliding_window": False, "head_dim": 128, **more}


DISTILL_QWEN_7B = qwen(
    "Qwen2", 28, 3584, 18944, 28, 4, 152064, head_dim=None, sliding_window=4096, max_window_layers=28, use_mrope=False
)
V2_LITE = {
    **{k: v for k, v in V3.items() if k not in ("q_lora_rank", "num_nextn_predict_layers", "topk_group", "n_group")},
    "architectures": ["DeepseekV2ForCausalLM"],
    "q_lora_rank": None,
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "norm_topk_prob": False,
    "scoring_func": "softmax",
    "topk_method": "greedy",
}
ERNIE_EXPERTS = {"moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": 1536}
GLM_EXPERTS = {"n_routed_experts": 128, "moe_intermediate_size": 1408}


def mixture(name, layers, width, inner, heads, vocab, **more):
    config = llama(layers, width, inner, heads, vocab, num_experts_per_tok=8, **more)
    return {**config, "architectures": [f"{name}ForCausalLM"]}


QWEN2_EXPERTS = {"shared_expert_intermediate_size": 5632, "num_experts_per_tok": 4, "head_dim": None}
DOTS1 = {
    **llama(62, 4096, 10944, 32, 152064, num_key_value_heads=32, moe_intermediate_size=1408, n_routed_experts=128),
    **{"n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "sliding_window": None},
    "architectures": ["Dots1ForCausalLM"],
}
GPT_OSS = {
    **llama(
        24, 2880, 2880, 64, 201088, num_key_value_heads=8, head_dim=64, num_local_experts=32, num_experts_per_tok=4
    ),
    "architectures": ["GptOssForCausalLM"],
}
GEMMA3_270M = {
    **llama(18, 640, 2048, 4, 262144, num_key_value_heads=1, head_dim=256, tie_word_embeddings=True),
    **{"architectures": ["Gemma3ForCausalLM"], "hidden_act": "gelu_pytorch_tanh"},
}
GEMMA2_2B = {
    **llama(26, 2304, 9216, 8, 256000, num_key_value_heads=4, head_dim=256, tie_word_embeddings=True),
    **{"architectures": ["Gemma2ForCausalLM"], "hidden_act": "gelu_pytorch_tanh"},
}
LFM2_1_2B = {
    **llama(16, 2048, 12288, 32, 65536, num_key_value_heads=8, full_attn_idxs=[2, 5, 8, 10, 12, 14]),
    "architectures": ["Lfm2ForCausalLM"],
}
LFM2_8B_A1B = {
    **llama(24, 2048, 7168, 32, 65536, num_experts=32, num_experts_per_tok=4, moe_intermediate_size=1792),
    "layer_types": ["full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)],
    "architectures": ["Lfm2MoeForCausalLM"],
}
QWEN3_NEXT = {
    **llama(48, 2048, 5120, 16, 151936, num_key_value_heads=2, head_dim=256, num_experts=512, num_experts_per_tok=10),
    **{"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "linear_conv_kernel_dim": 4},
    **{"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128},
    **{"linear_value_head_dim": 128, "architectures": ["Qwen3NextForCausalLM"]},
}
NEMOTRON_NANO_9B_V2 = {
    **llama(56, 4480, 15680, 40, 131072, num_key_value_heads=8, head_dim=128, hidden_act="relu2"),
    **{"mamba_num_heads": 128, "mamba_head_dim": 80, "ssm_state_size": 128, "n_groups": 8},
    "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    "architectures": ["NemotronHForCausalLM"],
}
GRANITE_4_H_TINY = {
    **llama(40, 1536, 512, 12, 100352, num_key_value_heads=4, tie_word_embeddings=True, num_local_experts=64),
    **{"num_experts_per_tok": 6, "shared_intermediate_size": 1024, "mamba_n_heads": 48, "mamba_d_state": 128},
    "layer_types": ["attention" if i % 10 == 5 else "mamba" for i in range(40)],
    "architectures": ["GraniteMoeHybridForCausalLM"],
}
FALCON_H1_0_5B = {
    **llama(36, 1024, 2048, 8, 32784, num_key_value_heads=2, head_dim=64, mamba_d_ssm=1536, mamba_n_heads=24),
    **{"mamba_d_state": 128, "mamba_n_groups": 1, "architectures": ["FalconH1ForCausalLM"]},
}
NEMOTRON_3_NANO = {
    **llama(52, 2688, 1856, 32, 131072, num_key_value_heads=2, head_dim=128, hidden_act="relu2", mamba_num_heads=64),
    **{"mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "n_routed_experts": 128, "num_experts_per_tok": 6},
    **{"moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712},
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "architectures": ["NemotronHForCausalLM"],
}
PHI_3_5_MOE = {
    **llama(32, 4096, 6400, 32, 32064, num_local_experts=16, attention_bias=True, lm_head_bias=True),
    "architectures": ["PhimoeForCausalLM"],
}
LLAMA_4_SCOUT = {
    **llama(48, 5120, 8192, 40, 202048, intermediate_size_mlp=16384, num_local_experts=16, head_dim=128),
    "architectures": ["Llama4ForCausalLM"],
}
KIMI_LINEAR = {
    **llama(27, 2304, 9216, 32, 163840, kv_lora_rank=512, q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64),
    **{"v_head_dim": 128, "moe_intermediate_size": 1024, "num_experts": 256, "num_experts_per_token": 8},
    "linear_attn_config": {
        **{"full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "kda_layers": [n for n in range(1, 27) if n % 4]},
        **{"head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4},
    },
    "architectures": ["KimiLinearForCausalLM"],
}
MIMO_V2_FLASH = {
    **llama(48, 4096, 16384, 64, 152576, num_key_value_heads=4, head_dim=192, v_head_dim=128, n_routed_experts=256),
    **{"num_experts_per_tok": 8, "moe_intermediate_size": 2048, "architectures": ["MiMoV2FlashForCausalLM"]},
}
LONGCAT_FLASH = {
    **llama(56, 6144, 12288, 64, 131072, num_layers=28, kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128),
    **{"qk_rope_head_dim": 64, "v_head_dim": 128, "moe_topk": 12, "n_routed_experts": 512, "zero_expert_num": 256},
    **{"expert_ffn_hidden_size": 2048, "architectures": ["LongcatFlashForCausalLM"]},
}
HY3 = {
    **llama(80, 4096, 13312, 64, 120832, head_dim=128, num_experts=192, num_experts_per_tok=8),
    **{"moe_intermediate_size": 1536, "architectures": ["HYV3ForCausalLM"]},
}
MISTRAL = {**llama(32, 4096, 14336, 32, 32000), "architectures": ["MistralForCausalLM"], "sliding_window": 4096}


@pytest.mark.parametrize(
    ("config", "want"),
    [
        (qwen("Qwen2", 24, 896, 4864, 14, 2, head_dim=None, tie_word_embeddings=True), 494_032_768),  # Qwen2.5 0.5B
        (DISTILL_QWEN_7B, 7_615_616_512),  # Qwen2.5 7B, DeepSeek-R1-Distill-Qwen-7B
        (qwen("Qwen3", 36, 4096, 12288, 32, 8), 8_190_735_360),  # Qwen3 8B
        (
            qwen("Qwen3Moe", 48, 2048, 6144, 32, 4, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768),
            30_532_122_624,  # Qwen3 30B-A3B
        ),
        (MISTRAL, 7_241_732_096),
        (
            {**MISTRAL, "architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2},
            46_702_792_704,
        ),
        (V2_LITE, 15_706_484_224),
        (
            qwen("Qwen2Moe", 24, 2048, 5632, 16, 16, **QWEN2_EXPERTS, moe_intermediate_size=1408, num_experts=60),
            14_315_784_192,  # Qwen1.5-MoE-A2.7B
        ),
        (DOTS1, 142_774_381_696),  # dots.llm1
        (GPT_OSS, 20_914_757_184),  # 20b
        (LFM2_1_2B, 1_170_340_608),
        (FALCON_H1_0_5B, 521_411_104),
        (NEMOTRON_NANO_9B_V2, 8_888_227_328),
        (NEMOTRON_3_NANO, 31_577_940_288),
        (GRANITE_4_H_TINY, 6_939_037_248),
        (LFM2_8B_A1B, 8_339_930_560),  # 704 of them are biases of routers
        (PHI_3_5_MOE, 41_873_153_344),
        (LLAMA_4_SCOUT, 107_769_861_120),  # the text part
        (QWEN3_NEXT, 79_674_391_296),  # 80B-A3B: 81,324,862,720 with its layer for multi-token prediction
        (
            mixture("Olmoe", 16, 2048, 1024, 16, 50304, num_key_value_heads=16, num_experts=64),
            6_919_161_856,  # OLMoE-1B-7B
        ),
        (
            mixture("GraniteMoe", 24, 1024, 512, 16, 49155, num_local_experts=32, tie_word_embeddings=True),
            1_334_628_352,  # Granite 3.0 1B-A400M
        ),
        (
            mixture("Ernie4_5_Moe", 28, 2560, 12288, 20, 103424, num_key_value_heads=4, head_dim=128, **ERNIE_EXPERTS),
            21_825_437_888,  # ERNIE 4.5 21B-A3B
        ),
        (
            mixture("HunYuanMoEV1", 32, 4096, 3072, 32, 128167, tie_word_embeddings=True, head_dim=128, num_experts=64),
            80_393_183_232,  # Hunyuan-A13B
        ),
        (
            mixture("Glm4Moe", 46, 4096, 10944, 96, 151552, head_dim=128, attention_bias=True, **GLM_EXPERTS),
            106_852_251_264,  # GLM 4.5 Air
        ),
        (KIMI_LINEAR, 49_122_681_728),  # 48B-A3B
        (MIMO_V2_FLASH, 308_778_780_864),  # 309B, without its layers for multi-token prediction
        (LONGCAT_FLASH, 560_664_980_480),  # 560B
        (HY3, 295_033_543_488),  # 295B
        (GEMMA3_270M, 268_098_176),
        (GEMMA2_2B, 2_614_341_888),
    ],
)
def test_parameters_of_other_families(config, want):
    """Counts as the published safetensors state them; those of Nemotron 3, Phi-3.5-MoE, LFM2-MoE, Llama 4,
    Kimi Linear, MiMo, LongCat and Hy3 were computed from configs, and guard against changes only."""
    assert sum(math.prod(w.shape) for w in weights(config)) == want


def windows(config):
    return [layer.attn.kv_requests()[0].window for layer in build(Build(Config(config))).layers]


def test_which_layers_have_a_window():
    on = {**DISTILL_QWEN_7B, "use_sliding_window": True, "num_hidden_layers": 4}
    types = ["full_attention", "sliding_attention"] * 2
    assert windows(DISTILL_QWEN_7B) == [None] * 28 and windows({**on, "max_window_layers": 2})[1:] == [None, 4096, 4096]
    assert windows({**on, "layer_types": types}) == [None, 4096] * 2
    assert set(windows(MISTRAL)) == {4096} and set(windows({**MISTRAL, "sliding_window": None})) == {None}
    with pytest.raises(UnsupportedModelError, match="layer_types = 'chunked_attention'"):
        windows({**on, "layer_types": ["chunked_attention"] * 4})
    with pytest.raises(CheckpointError, match="layer_types is not a list of 4 names"):
        windows({**on, "layer_types": types[:3]})
    with pytest.raises(CheckpointError, match="sliding_window is -1"):
        windows({**MISTRAL, "sliding_window": -1})


def test_parameters_of_deepseek_v3():
    """671B (README_WEIGHTS.md of the model's repository), and an MTP module by the names of the published files."""
    start = time.perf_counter()
    main, both = weights(V3), weights(V3, mtp=True)
    assert time.perf_counter() - start < 10
    count = [sum(math.prod(w.shape) for w in found) for found in (main, both)]
    layer = sum(math.prod(w.shape) for w in main if w.parts[0].startswith("model.layers.60."))
    assert count == [671_026_419_200, 671_026_419_200 + layer + 2 * 7168**2 + 3 * 7168]
    names = {n for w in both for n in w.parts}
    assert len(names) == sum(len(w.parts) for w in both)
    assert {
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.3.mlp.gate.e_score_correction_bias",
        "model.layers.60.mlp.experts.255.up_proj.weight",
        "model.layers.60.mlp.shared_experts.gate_proj.weight",
        "model.layers.60.self_attn.kv_a_proj_with_mqa.weight",
        "model.layers.61.eh_proj.weight",
        "model.layers.61.shared_head.norm.weight",
        "model.layers.61.mlp.experts.0.down_proj.weight",
    } <= names
    assert not any(n.endswith(("61.embed_tokens.weight", "shared_head.head.weight")) for n in names)
    assert {w.dtype for w in both if w.parts[0].endswith("bias")} == {torch.float32}


def test_formats_reach_the_weights():
    fp8 = format_of({"quant_method": "fp8", "weight_block_size": [128, 128]}, None)
    found = weights({**V3, "num_hidden_layers": 4, "n_routed_experts": 16}, format_of=fp8, mtp=True)
    plain = {w.parts[0].split(".")[-2] for w in found if w.format == "plain" and len(w.shape) > 1}
    assert plain == {"embed_tokens", "lm_head", "gate", "eh_proj"}
    mixed = lambda name: "fp8_block" if "gate_proj" in name else "plain"  # noqa: E731
    with pytest.raises(CheckpointError, match=r"gate_proj.weight and 1 more are fused.*fp8_block, plain"):
        weights(V3, format_of=mixed)


def test_what_is_shared_is_one_object():
    model = build(Build(Config({**V3, "num_hidden_layers": 4, "tie_word_embeddings": True}), mtp=True))
    assert model.embed.weight is model.head.weight is model.mtp[0].embed.weight is model.mtp[0].head.weight
    attention = model.layers[0].attn
    assert isinstance(attention, MLABlock) and attention.expanded.kv_b.weight is attention.absorbed.kv_b
    assert len({id(layer.attn.enter.rope.table) for layer in (*model.layers, model.mtp[0].layer)}) == 1
    assert attention.absorbed.scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)


@pytest.mark.parametrize(
    "changes",
    [
        {"scoring_func": "softmax"},
        {"topk_method": "greedy"},
        {"moe_layer_freq": 2},
        {"hidden_act": "gelu"},
        {"rope_scaling": {"type": "ntk"}},
    ],
)
def test_what_deepseek_v3_lacks_is_refused(changes):
    with pytest.raises(UnsupportedModelError, match="'ntk'" if "rope_scaling" in changes else next(iter(changes))):
        weights({**V3, **changes})
    with pytest.raises(CheckpointError, match="256 experts cannot form 7 equal groups"):
        weights({**V3, "n_group": 7})


def test_parameters_of_deepseek_v32():
    """DeepSeek-V3's, and an indexer a layer, also in the prediction layer; all ranks have the whole indexer."""
    config = {**V3, "architectures": ["DeepseekV32ForCausalLM"]}
    plain, found = weights(V3, mtp=True), weights(config, mtp=True)
    indexer = 64 * 128 * 1536 + 128 * 7168 + 2 * 128 + 64 * 7168
    assert sum(math.prod(w.shape) for w in found) - sum(math.prod(w.shape) for w in plain) == 62 * indexer
    shapes = {w.parts[0]: (w.shape, w.dtype) for w in found if ".61.self_attn.indexer." in w.parts[0]}
    name = "model.layers.61.self_attn.indexer"
    assert shapes == {
        f"{name}.wq_b.weight": ((64 * 128, 1536), None),
        f"{name}.wk.weight": ((128, 7168), None),
        f"{name}.k_norm.weight": ((128,), None),
        f"{name}.k_norm.bias": ((128,), None),
        f"{name}.weights_proj.weight": ((64, 7168), torch.float32),
    }
    shared = weights(config, placement=Placement.shared(1, 8))
    assert {w.shape for w in shared if ".indexer.wq_b" in w.parts[0]} == {(64 * 128, 1536)}


@pytest.mark.parametrize(
    ("changes", "full"),
    [
        ({}, range(6)),
        ({"index_topk_freq": 4}, [0, 1, 5]),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 3}, [0, 1, 2, 4]),
        ({"index_topk_pattern": "FSSFSS"}, [0, 3]),
        ({"index_topk_pattern": "FSSFSSSS"}, [0, 3]),
        ({"indexer_types": ["full"] + ["shared"] * 5, "index_topk_pattern": "FF"}, [0]),
        ({"index_topk_pattern": ["full", "shared"] * 3, "index_topk_freq": 4}, [0, 2, 4]),
        ({"indexer_types": ["full"] + ["shared"] * 5, "index_topk_pattern": "FFFFFF"}, [0]),
    ],
)
def test_indexers_of_glm_5(changes, full):
    """As transformers' config reads the same entries; prediction layers have one each."""
    from transformers import GlmMoeDsaConfig

    config = {**V3, "architectures": ["GlmMoeDsaForCausalLM"], "num_hidden_layers": 6, **changes}
    names = {w.parts[0] for w in weights(config, mtp=True) if w.parts[0].endswith("indexer.wk.weight")}
    assert names == {f"model.layers.{i}.self_attn.indexer.wk.weight" for i in (*full, 6)}
    theirs = GlmMoeDsaConfig(num_hidden_layers=6, **changes).indexer_types
    assert [i for i, kind in enumerate(theirs) if kind == "full"] == list(full)


def test_ignored_names():
    b = Build(Config(V3))
    build(b)
    assert b.ignored == ["model.layers.61.*"]
    b = Build(Config({**V3, "tie_word_embeddings": True}), mtp=True)
    build(b)
    assert sorted(b.ignored) == [
        "lm_head.weight",
        "model.layers.61.embed_tokens.weight",
        "model.layers.61.shared_head.head.weight",
    ]


@pytest.mark.parametrize("rank", [0, 1])
def test_other_ranks_expect_biases_that_the_first_one_adds(rank):
    """They do not report them as tensors that nothing reads."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": 96, **sizes}
    b = Build(Config({**config, "attention_bias": True, "mlp_bias": True}), Placement.shared(rank, 2))
    read = {part for _, weight in build(b).weights() for part in weight.parts}
    biases = {f"model.layers.0.{name}.bias" for name in ("self_attn.o_proj", "mlp.down_proj")}
    assert (biases <= read, {*b.ignored} & biases) == ((True, set()) if rank == 0 else (False, biases))
    assert "model.layers.0.mlp.up_proj.bias" in read


@pytest.mark.parametrize(("settings", "quant"), [
    ({}, None),
    ({"quant_method": "fp8", "weight_block_size": [128, 128]}, None),
    ({"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
     ActivationQuant("fp8", 128)),
    ({"quant_method": "fp8", "activation_scheme": "dynamic"}, ActivationQuant("fp8")),
])  # fmt: skip
def test_norms_know_how_their_readers_quantize(settings, quant):
    from benchmarks.shapes import REAL
    from inferplane.engine import ModelFiles, Runner, RunnerOptions
    from inferplane.plugins import host

    for name in ("Qwen3-8B", "DeepSeek-V3, 4 layers"):
        config = {**REAL[name], "num_hidden_layers": 2, "quantization_config": settings}
        model = Runner.plan_only(ModelFiles(config), host(), "cpu", RunnerOptions(dtype="bfloat16")).model
        for layer in model.layers:
            norms = [layer.attn_norm, layer.mlp_norm]
            norms += [layer.attn.enter] if name.startswith("DeepSeek") else []
            assert [norm.output_quant for norm in norms] == [quant] * len(norms)
        assert model.norm.output_quant is None, "the output head reads it unquantized"
