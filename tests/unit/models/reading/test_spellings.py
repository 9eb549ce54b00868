"""Configs of every family as transformers reads them: each spelling of the rotary settings, and each key left out."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from inferplane.errors import CheckpointError, InferplaneError, UnsupportedModelError
from inferplane.models import Build, Config, build
from inferplane.models.reading.normalize import SPELLINGS as FAMILIES
from inferplane.models.reading.normalize import complaints
from inferplane.models.rope import frequencies
from inferplane.ops import Op
from inferplane.types import Weight
from tests.families.cases import ALL_CASES as CASES
from tests.families.cases import CASES as NEWER
from tests.families.cases import config_of

MODEL_TYPES = {spelling.model_type: name for name, spelling in FAMILIES.items()}
TYPES = {family: "deepseek_v3" if family == "deepseek" else family for family in CASES}
POSITIONS = 48


def written(family: str, case: str) -> dict[str, Any]:
    """The entries that transformers writes for a named case."""
    config = config_of(family, case)
    return {**config.to_dict(), "architectures": [MODEL_TYPES[config.model_type]]}


def read_by_transformers(entries: dict[str, Any]) -> Any:
    return CONFIG_MAPPING[entries["model_type"]].from_dict(copy.deepcopy(entries))


# ------------------------------------------------------------------ rotary settings

PLAIN = {"rope_type": "default", "rope_theta": 3e5}
YARN = {"factor": 4.0, "beta_fast": 16, "beta_slow": 2}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ORIGINAL = "original_max_position_embeddings"
SPELLINGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "theta": {"rope_theta": 7e4},
    "theta, null": {"rope_theta": 7e4, "rope_scaling": None, "rope_parameters": None},
    "new": {"rope_parameters": PLAIN},
    "new beside theta": {"rope_parameters": PLAIN, "rope_theta": 7e4},
    "new without theta": {"rope_parameters": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 7e4},
    "new without any theta": {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
    "old linear": {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 7e4},
    "old linear without theta": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "linear beside new": {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": PLAIN},
    "linear beside new and theta": {
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "rope_parameters": PLAIN,
        "rope_theta": 7e4,
    },
    "both names of the type": {"rope_scaling": {"type": "linear", "rope_type": "dynamic", "factor": 3.0}},
    "yarn beside new": {
        "rope_scaling": {"type": "yarn", **YARN, ORIGINAL: 64},
        "rope_parameters": PLAIN,
        "rope_theta": 7e4,
    },
    "empty old beside new": {"rope_scaling": {}, "rope_parameters": {**PLAIN, "rope_type": "linear", "factor": 5.0}},
    "yarn with its context on top": {"rope_scaling": {"type": "yarn", **YARN}, ORIGINAL: 64},
    "new yarn with its context on top": {"rope_parameters": {"rope_type": "yarn", **YARN}, ORIGINAL: 64},
    "yarn with two contexts": {"rope_scaling": {"type": "yarn", **YARN, ORIGINAL: 32}, ORIGINAL: 64},
    "yarn without a context": {"rope_scaling": {"type": "yarn", **YARN}},
    "yarn of null": {"rope_scaling": {"type": "yarn", **YARN, "factor": None, ORIGINAL: 64}},
    "yarn of null with its context on top": {"rope_parameters": {"rope_type": "yarn", "factor": None}, ORIGINAL: 32},
    "yarn of null and weights": {
        "rope_parameters": {"rope_type": "yarn", "factor": None, "mscale": 0.7, "mscale_all_dim": 1.1, ORIGINAL: 32}
    },
    "yarn of nulls": {"rope_scaling": {"type": "yarn", **YARN, "beta_fast": None, "mscale": None, ORIGINAL: 64}},
    "yarn not rounded": {"rope_scaling": {"type": "yarn", **YARN, "truncate": False, ORIGINAL: 64}},
    "llama3 with its context on top": {"rope_scaling": {"rope_type": "llama3", **LLAMA3}, ORIGINAL: 64},
    "llama3 with two contexts": {"rope_scaling": {"rope_type": "llama3", **LLAMA3, ORIGINAL: 32}, ORIGINAL: 64},
    "llama3 without a context": {"rope_parameters": {"rope_type": "llama3", **LLAMA3, "rope_theta": 7e4}},
    "llama3 beside new": {"rope_scaling": {"rope_type": "llama3", **LLAMA3, ORIGINAL: 64}, "rope_parameters": PLAIN},
    "linear with a context on top": {"rope_scaling": {"type": "linear", "factor": 2.0}, ORIGINAL: 64},
    "longrope": {"rope_scaling": {"type": "longrope", "short_factor": ..., "long_factor": ..., ORIGINAL: 64}},
    "longrope with its context on top": {
        "rope_scaling": {"rope_type": "longrope", "short_factor": ..., "long_factor": ...},
        ORIGINAL: 32,
    },
    "longrope with a factor": {
        "rope_parameters": {"rope_type": "longrope", "short_factor": ..., "long_factor": ..., "factor": 3.0},
        ORIGINAL: 32,
    },
    "a share of a head": {"partial_rotary_factor": 0.5},
    "a share of a head inside": {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}},
}


OWN_SETTINGS = (
    *("phi3", "olmo3", "ministral3", "gemma3", "nemotron_h", "phimoe", "kimi_linear", "mimo_v2_flash"),
    "deepseek_v4",
)
"""Families that transformers refuses to scale in most ways, which tests/unit/models/families has, or never rotates."""
PARTIAL = {"glm": 2, "glm4": 2, "glm4_moe": 2, "minimax_m2": 2, "qwen3_next": 4, "qwen3_5": 4, "qwen3_5_moe": 4}
"""Families that rotate one part of so many of each head in their first config; spellings with a share state a half."""


@pytest.mark.parametrize("family", [family for family in CASES if family not in OWN_SETTINGS])
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.filterwarnings("ignore:partial_rotary_factor")
@pytest.mark.filterwarnings("ignore:Rotary scaling of type 'longrope'")
def test_rotary_settings_in_every_spelling(family, spelling):
    """The same radians per position and the same factor as transformers computes from the same entries."""
    entries = written(family, next(iter(CASES[family])))
    entries = {k: v for k, v in entries.items() if k not in ("rope_parameters", "rope_theta", "rope_scaling")}
    dim = entries.get("qk_rope_head_dim") or entries.get("head_dim") or 16
    entries = {**entries, "head_dim": dim, **copy.deepcopy(SPELLINGS[spelling])}
    if family in PARTIAL:
        dim //= 2 if "a share" in spelling else PARTIAL[family]
    for settings in (entries.get("rope_scaling"), entries.get("rope_parameters")):
        for key, grow in (("short_factor", 0.1), ("long_factor", 0.7)):
            if settings and settings.get(key) is ...:
                settings[key] = [1 + grow * i for i in range(dim // 2)]
    if family == "gpt_oss" and spelling == "a share of a head":  # its default is scaled, and a share is never scaled
        with pytest.raises(UnsupportedModelError, match="on a share of a head"):
            build(Build(Config(entries), positions=POSITIONS))
        return
    theirs = read_by_transformers(entries)
    kind = theirs.rope_parameters["rope_type"]
    for positions in (64, 512):
        if kind == "default":
            theta = theirs.rope_parameters["rope_theta"]
            want, factor = theta ** -(torch.arange(0, dim, 2, dtype=torch.float32) / dim), 1.0
        else:
            seen = positions if kind == "longrope" else None
            want, factor = ROPE_INIT_FUNCTIONS[kind](theirs, torch.device("cpu"), seq_len=seen)
        config = Config(entries)
        assert config == Config(dict(config)), "a second reading changes nothing"
        settings = config.rope
        assert settings["rope_type"] == kind
        if kind != "dynamic":
            got, scale = frequencies(settings, dim, positions)
            torch.testing.assert_close(got, want, rtol=2e-6, atol=0)
            assert scale == pytest.approx(factor, rel=1e-6)
    build(Build(Config(entries), positions=POSITIONS))


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_settings_of_their_own_for_kinds_of_layers_are_refused(family):
    entries = written(family, next(iter(CASES[family])))
    entries["rope_parameters"] = {"full_attention": PLAIN, "sliding_attention": {**PLAIN, "rope_theta": 1e4}}
    with pytest.raises(UnsupportedModelError, match="full_attention, sliding_attention"):
        build(Build(Config(entries)))


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "llama3"])
def test_scaling_of_a_share_of_a_head_is_refused(kind):
    settings = {"rope_type": kind, **LLAMA3, ORIGINAL: 64}
    for entries in ({"partial_rotary_factor": 0.5}, {"rope_parameters": {**settings, "partial_rotary_factor": 0.5}}):
        config = {**written("llama", "gqa"), "rope_parameters": settings, **entries}
        with pytest.raises(UnsupportedModelError, match=r"partial_rotary_factor = 0\.5"):
            build(Build(Config(config)))


# ------------------------------------------------------------------ keys that are left out


def content(value: Any) -> Any:
    """What a tree of ops says, comparable: computed weights by their values."""
    if isinstance(value, Weight):
        made = value.make().tolist() if value.make is not None else None
        return repr(replace(value, make=None)), made
    if isinstance(value, Op):
        return type(value).__name__, {name: content(getattr(value, name)) for name in value.fields()}
    if isinstance(value, tuple):
        return tuple(map(content, value))
    return value


def tree(entries: dict[str, Any]) -> Any:
    """What a config stands for; None if it is refused."""
    try:
        config = Config(entries)
        return content(build(Build(config, positions=POSITIONS))), config.positions
    except InferplaneError:
        return None


UNREADABLE = {("exaone4", "full", "layer_types")}
"""Configs that transformers cannot read either: it divides by the pattern of windows where there is no window."""
LEFT_OUT = [
    (family, case, key)
    for family, cases in CASES.items()
    for case in list(cases)[: 2 if family in NEWER else 4]
    for key in written(family, case)
    if key not in ("model_type", "architectures", "transformers_version", "return_dict")
    and (family, case, key) not in UNREADABLE
]


@pytest.mark.parametrize(("family", "case", "key"), LEFT_OUT, ids=lambda x: str(x))
@pytest.mark.filterwarnings("ignore")
def test_a_key_left_out_has_its_class_default(family, case, key):
    entries = {k: v for k, v in written(family, case).items() if k != key}
    got = tree(entries)
    if got is not None:
        theirs = read_by_transformers(entries).to_dict()
        assert got == tree({**entries, key: theirs.get(key)})


DEFAULTS = [
    ("deepseek", "routed_scaling_factor", 2.5),
    ("deepseek", "n_shared_experts", 1),
    ("deepseek", "topk_group", 4),
    ("deepseek", "n_group", 8),
    ("deepseek", "first_k_dense_replace", 3),
    ("deepseek", "norm_topk_prob", True),
    ("deepseek", "rope_interleave", True),
    ("deepseek", "q_lora_rank", 1536),
    ("deepseek_v2", "n_shared_experts", 2),
    ("deepseek_v2", "first_k_dense_replace", 0),
    ("deepseek_v2", "q_lora_rank", 1536),
    ("mistral", "sliding_window", 4096),
    ("mistral", "num_key_value_heads", 8),
    ("mixtral", "rms_norm_eps", 1e-5),
    ("mixtral", "sliding_window", None),
    ("mixtral", "num_key_value_heads", 8),
    ("mixtral", "num_experts_per_tok", 2),
    ("lfm2_moe", "num_experts_per_tok", 4),
    ("lfm2_moe", "num_dense_layers", 2),
    ("lfm2_moe", "use_expert_bias", True),
    ("llama4", "num_experts_per_tok", 1),
    ("llama4", "attention_chunk_size", 8192),
    ("llama4", "floor_scale", 8192),
    ("llama4", "attn_scale", 0.1),
    ("phimoe", "router_jitter_noise", 0.01),
    ("phimoe", "lm_head_bias", False),
    ("nemotron_h", "norm_topk_prob", True),
    ("qwen2", "num_key_value_heads", 32),
    ("qwen2", "max_window_layers", 28),
    ("qwen3", "head_dim", 128),
    ("qwen3", "num_key_value_heads", 32),
    ("qwen3_moe", "num_key_value_heads", 4),
    ("qwen3_moe", "norm_topk_prob", False),
    ("llama", "max_position_embeddings", 2048),
    ("llama", "num_key_value_heads", None),
    ("dots1", "sliding_window", 4096),
    ("ernie4_5_moe", "tie_word_embeddings", True),
    ("ernie4_5_moe", "moe_num_shared_experts", 2),
    ("glm4_moe_lite", "q_lora_rank", 768),
    ("glm4_moe", "first_k_dense_replace", 1),
    ("glm4_moe", "norm_topk_prob", True),
    ("minimax_m2", "head_dim", 128),
    ("granitemoe", "num_key_value_heads", None),
    ("dots1", "norm_topk_prob", False),
    ("qwen2_moe", "qkv_bias", True),
    ("qwen2_moe", "num_key_value_heads", 16),
    ("gpt_oss", "sliding_window", 128),
    ("gpt_oss", "attention_bias", True),
    ("gpt_oss", "swiglu_alpha", 1.702),
    ("gpt_oss", "swiglu_limit", 7.0),
    ("gemma2", "attn_logit_softcapping", 50.0),
    ("gemma2", "final_logit_softcapping", 30.0),
    ("gemma2", "query_pre_attn_scalar", 256),
    ("gemma3", "vocab_size", 262208),
    ("gemma3", "num_attention_heads", 8),
    ("gemma3", "final_logit_softcapping", None),
]


@pytest.mark.parametrize(("family", "key", "value"), DEFAULTS)
def test_class_defaults(family, key, value):
    """The table holds what the installed transformers says."""
    entries = {k: v for k, v in written(family, next(iter(CASES[family]))).items() if k != key}
    assert Config(entries).get(key) == value
    theirs = getattr(CONFIG_MAPPING[entries["model_type"]](), key)
    assert theirs == value or (value is None and key == "num_key_value_heads")


SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
LEFT_OUT = {
    ("gemma3", "num_attention_heads"),
    ("gemma3", "vocab_size"),
    ("nemotron_h", "num_hidden_layers"),
    ("longcat_flash", "num_hidden_layers"),
}
"""Sizes that published configs leave out, so that the family has those of transformers' class, or counts the layers."""


@pytest.mark.parametrize(("family", "key"), [(f, k) for f in CASES for k in SIZES if (f, k) not in LEFT_OUT])
def test_sizes_are_required(family, key):
    entries = {k: v for k, v in written(family, next(iter(CASES[family]))).items() if k != key}
    with pytest.raises(CheckpointError, match=f"lacks '{key}'"):
        build(Build(Config(entries)))


# ------------------------------------------------------------------ names


@pytest.mark.parametrize(
    ("family", "changes", "same"),
    [
        ("qwen3_moe", {"num_experts": ..., "num_local_experts": 8}, {"num_experts": 8}),
        ("deepseek", {"n_routed_experts": ..., "num_local_experts": 8}, {"n_routed_experts": 8}),
        ("deepseek", {"n_routed_experts": ..., "num_experts": 8}, {"n_routed_experts": 8}),
        ("deepseek_v2", {"n_routed_experts": ..., "num_experts": 8}, {"n_routed_experts": 8}),
        ("mixtral", {"num_local_experts": ..., "num_experts": 4}, {"num_local_experts": 4}),
        ("mixtral", {"num_local_experts": None, "num_experts": 8}, {"num_local_experts": 8}),
        ("mixtral", {"num_local_experts": 4, "num_experts": 8}, {"num_local_experts": 4}),
        ("llama", {"hidden_act": "swish"}, {}),
        ("llama", {"architectures": ["LlamaModel"]}, {}),
        ("qwen3", {"architectures": ["Qwen3Model"]}, {}),
        ("mistral", {"architectures": ["MistralModel"]}, {}),
        ("gemma3", {"architectures": ["Gemma3TextModel"]}, {}),
        ("llama4", {"architectures": ["Llama4TextModel"]}, {}),
        ("qwen3_5", {"architectures": ["Qwen3_5TextModel"]}, {}),
        ("llama4", {"no_rope_layers": []}, {"no_rope_layers": ...}),
        ("qwen2", {"architectures": None}, {}),
        ("mixtral", {"architectures": ...}, {}),
        ("deepseek", {"architectures": []}, {}),
        ("deepseek", {"model_type": "kimi_k2", "architectures": None}, {}),
        ("dots1", {"n_routed_experts": ..., "num_local_experts": 8}, {}),
    ],
)
def test_other_names(family, changes, same):
    entries = written(family, next(iter(CASES[family])))
    other, plain = ({k: v for k, v in {**entries, **more}.items() if v is not ...} for more in (changes, same))
    assert tree(other) == tree(plain) is not None


@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_every_other_name_of_an_entry_is_known(kind):
    """Those of transformers; where its config class has the name that we replace, the pair is there turned round."""
    ours = {frozenset(pair) for pair in FAMILIES[MODEL_TYPES[kind]].aliases.items()}
    assert {frozenset(pair) for pair in CONFIG_MAPPING[kind].attribute_map.items()} <= ours


@pytest.mark.parametrize(
    ("family", "case", "changes", "stated"),
    [
        ("mistral", "window", {"sliding_window": 5}, "LlamaForCausalLM"),
        ("mistral", "window", {"sliding_window": 5}, "LlamaModel"),
        ("llama", "gqa", {"sliding_window": 5}, "MistralForCausalLM"),
        ("qwen2", "tied", {}, "LlamaForCausalLM"),
        ("qwen3", "plain", {}, "Qwen2ForCausalLM"),
        ("mixtral", "plain", {}, "MistralForCausalLM"),
    ],
)
def test_model_type_counts_before_another_architecture_and_is_told(family, case, changes, stated):
    """As in transformers, whose config class `model_type` chooses."""
    entries = {**written(family, case if case in CASES[family] else next(iter(CASES[family]))), **changes}
    config = Config({**entries, "architectures": [stated]})
    assert tree({**entries, "architectures": [stated]}) == tree(entries) is not None
    assert config == Config(dict(config))
    own = MODEL_TYPES[entries["model_type"]]
    assert complaints(config) == (
        f"architectures names {stated}, model_type is '{entries['model_type']}'; the model is built as {own}.",
    )


@pytest.mark.parametrize(
    ("kind", "stated", "built"),
    [
        ("llama", ["LlamaForCausalLM"], "LlamaForCausalLM"),
        ("llama", ["LlamaModel"], "LlamaForCausalLM"),
        ("qwen2", ["Qwen2ForCausalLM", "LlamaForCausalLM"], "Qwen2ForCausalLM"),
        ("kimi_k2", ["DeepseekV3ForCausalLM"], "DeepseekV3ForCausalLM"),
        (None, ["MistralForCausalLM"], "MistralForCausalLM"),
        ("llama", ["LlamaForCausalLMEagle"], "LlamaForCausalLMEagle"),
        ("llama", ["AcmeForCausalLM"], "AcmeForCausalLM"),
        (["llama"], ["MistralForCausalLM"], "MistralForCausalLM"),
    ],
)
def test_pairs_of_model_type_and_architecture_that_stay(kind, stated, built):
    config = Config({"model_type": kind, "architectures": stated})
    assert config.architecture == built
    if stated[1:] == []:
        assert complaints(config) == ()
