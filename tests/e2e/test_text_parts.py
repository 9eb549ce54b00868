"""Multimodal checkpoints: the language model inside one is served as if it stood alone, and that is said."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from inferplane import LLM
from inferplane.errors import InferplaneWarning, UnsupportedModelError
from inferplane.models import Config
from tests.e2e.tiny_models import SMALL, logits_of, prompts, random_model
from tests.families.cases import config_of

LAYOUTS = {
    "older": lambda name: f"language_model.{name}",
    "newer": lambda name: name if name.startswith("lm_head") else name.replace("model.", "model.language_model.", 1),
}
"""Names of the language model's tensors in published multimodal checkpoints."""
VISION = {
    "vision_tower.transformer.layers.0.attention.q_proj.weight": (8, 8),
    "vision_tower.ln_pre.weight": (8,),
    "multi_modal_projector.norm.weight": (8,),
    "multi_modal_projector.linear_1.weight": (64, 8),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tied", [False, True])
def test_mistral3(layout, tied, tmp_path):
    model = random_model(config_of("mistral", "window", tie_word_embeddings=tied))
    model.save_pretrained(tmp_path)
    inner = json.loads((tmp_path / "config.json").read_text())
    inner.pop("tie_word_embeddings")
    whole = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "tie_word_embeddings": tied,
        "text_config": {k: v for k, v in inner.items() if k != "architectures"},
        "vision_config": {"model_type": "pixtral", "hidden_size": 8},
    }
    (tmp_path / "config.json").write_text(json.dumps(whole))
    text = {LAYOUTS[layout](name): value for name, value in load_file(tmp_path / "model.safetensors").items()}
    save_file({**text, **{name: torch.randn(*shape) for name, shape in VISION.items()}}, tmp_path / "model.safetensors")
    with pytest.warns(InferplaneWarning, match="Of Mistral3ForConditionalGeneration the text part is read"):
        llm = LLM(tmp_path, device="cpu", dtype="float32")
    with llm:
        assert not llm.runner.loaded.unused
        many = prompts(160, (41, 7))
        for ids, got in zip(many, llm.logits(many)):
            want = logits_of(model, ids)
            assert (got - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.parametrize(
    ("whole", "kind", "architecture"),
    [
        ("KimiVLForConditionalGeneration", "deepseek_v3", "DeepseekV3ForCausalLM"),
        ("LlavaForConditionalGeneration", "llama", "LlamaForCausalLM"),
        ("InternVLForConditionalGeneration", "qwen3_moe", "Qwen3MoeForCausalLM"),
        ("Mistral3ForConditionalGeneration", "ministral3", "Ministral3ForCausalLM"),
        ("Llama4ForConditionalGeneration", "llama4_text", "Llama4ForCausalLM"),
        ("Qwen3VLForConditionalGeneration", "qwen3_vl_text", "Qwen3VLForConditionalGeneration"),
    ],
)
def test_text_parts_are_found_by_their_model_type(whole, kind, architecture):
    config = Config({"architectures": [whole], "text_config": {"model_type": kind, "hidden_size": 64}})
    assert config.architecture == architecture and config["text_part_of"] == whole and config["hidden_size"] == 64
    assert Config(dict(config)) == config, "a second reading changes nothing"


def test_a_text_part_that_is_unknown():
    entries = {"architectures": ["FooForConditionalGeneration"], "text_config": {"model_type": "foo"}}
    assert Config(entries).architecture == "FooForConditionalGeneration"
    with pytest.raises(UnsupportedModelError, match="FooForConditionalGeneration"):
        LLM(entries, device="cpu", load_format="dummy")


def test_gemma3(tmp_path):
    """Published configs leave out sizes of the text part; layers with a window keep their own rotary base."""
    linear = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    config = config_of(
        "gemma3",
        "scaled",
        hidden_size=32,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        query_pre_attn_scalar=256,
        vocab_size=262208,
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        rope={"full_attention": linear, "sliding_attention": plain},
    )
    model = random_model(config)
    model.save_pretrained(tmp_path)
    stated = ("hidden_size", "intermediate_size", "num_hidden_layers", "layer_types", "sliding_window", "eos_token_id")
    inner = {k: v for k, v in json.loads((tmp_path / "config.json").read_text()).items() if k in stated}
    inner |= {"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": inner}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    text = {f"language_model.{name}": value for name, value in load_file(tmp_path / "model.safetensors").items()}
    save_file({**text, "vision_tower.post_layernorm.weight": torch.randn(8)}, tmp_path / "model.safetensors")
    with pytest.warns(InferplaneWarning, match="Of Gemma3ForConditionalGeneration the text part is read"):
        llm = LLM(tmp_path, device="cpu", dtype="float32", max_model_len=256)
    with llm:
        assert not llm.runner.loaded.unused
        ids = prompts(1000, (41,))[0]
        want = logits_of(model, ids)
        assert (llm.logits([ids])[0] - want).abs().max() <= 1e-5 * want.abs().max()


SIZES = {**SMALL, "head_dim": 16, "rms_norm_eps": 1e-5}
QWEN_VISION = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
GLM_EXPERTS = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}

LLAMA_4 = {
    "intermediate_size": 40,
    "intermediate_size_mlp": 56,
    "num_local_experts": 4,
    "attention_chunk_size": 16,
    "interleave_moe_layer_step": 2,
    "no_rope_layer_interval": 3,
}
LLAMA_VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "image_size": 28,
    "vision_output_dim": 32,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
}


def rope(sections, **more):
    return {"rope_type": "default", "rope_theta": 5e5, "mrope_section": sections, **more}


WHOLES = {
    "Qwen2VL": ({"rope_parameters": rope([4, 2, 2])}, {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2}),
    "Qwen2_5_VL": ({"rope_parameters": rope([2, 3, 3]), "head_dim": ...}, QWEN_VISION),
    "Qwen3VL": (
        {"rope_parameters": rope([6, 4, 2], mrope_interleaved=True), "head_dim": 24, "attention_bias": True},
        {**QWEN_VISION, "deepstack_visual_indexes": [0]},
    ),
    "Qwen3VLMoe": (
        {**EXPERTS, "rope_parameters": rope([4, 2, 2], mrope_interleaved=True), "mlp_only_layers": [1]},
        {**QWEN_VISION, "deepstack_visual_indexes": [0]},
    ),
    "Glm4v": ({"rope_parameters": rope([2, 1, 1], partial_rotary_factor=0.5), "head_dim": ...}, QWEN_VISION),
    "Llama4": (LLAMA_4, LLAMA_VISION),
    "Glm4vMoe": ({**GLM_EXPERTS, "rope_parameters": rope([2, 1, 1], partial_rotary_factor=0.5)}, QWEN_VISION),
}
"""Multimodal models: entries of their text part and of their vision part."""


@pytest.mark.parametrize("name", WHOLES)
def test_text_alone_is_what_the_whole_model_computes(name, tmp_path):
    """Beside transformers' multimodal model, which rotates by three positions a token."""
    text, vision = WHOLES[name]
    config = getattr(transformers, f"{name}Config")(
        text_config={k: v for k, v in {**SIZES, **text}.items() if v is not ...}, vision_config=vision
    )
    model = random_model(config)
    model.save_pretrained(tmp_path)
    compare_text(model, name, tmp_path)
    if name.startswith("Qwen2"):  # published configs name all entries at the top
        whole = json.loads((tmp_path / "config.json").read_text())
        inner = {k: v for k, v in whole.pop("text_config").items() if k not in ("model_type", "rope_parameters")}
        inner |= {"rope_theta": 5e5, "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]}}
        (tmp_path / "config.json").write_text(json.dumps({**inner, **whole}))
        compare_text(model, name, tmp_path)


def compare_text(model, name, folder):
    with pytest.warns(InferplaneWarning, match=f"Of {name}ForConditionalGeneration the text part is read"):
        llm = LLM(folder, device="cpu", dtype="float32", max_model_len=128)
    with llm:
        assert not llm.runner.loaded.unused
        many = prompts(160, (41, 7))
        for ids, got in zip(many, llm.logits(many, chunk_tokens=17)):
            want = logits_of(model, ids)
            assert (got - want).abs().max() <= 1e-5 * want.abs().max()
