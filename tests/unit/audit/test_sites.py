"""Names of sites, and pins that divide kernels."""

from __future__ import annotations

from inferplane.audit.sites import find_layer, find_part, find_part_pins, name_modules
from tests.unit.support.small import tiny_llama, tiny_v3


def test_sites_have_the_names_of_modules():
    names = name_modules(tiny_llama())
    at = "model.layers.1"
    assert names["layers.1"] == at and names["layers.1.attn"] == f"{at}.self_attn"
    assert names["layers.1.attn.qkv"] == f"{at}.self_attn.{{q_proj,k_proj,v_proj}}"
    assert names["layers.1.attn_norm"] == f"{at}.input_layernorm"
    assert names["layers.1.mlp"] == f"{at}.mlp" and names["layers.1.mlp.act"] == f"{at}.mlp (act)"
    assert names["layers.1.mlp.down"] == f"{at}.mlp.down_proj"
    assert names["embed"] == "model.embed_tokens" and names["norm"] == "model.norm"
    assert len(set(names.values())) == len(names) - sum(".attn." in site for site in names) + len(
        {names[site] for site in names if ".attn." in site}
    )


def test_names_of_experts_and_latent_attention():
    names = name_modules(tiny_v3())
    assert names["layers.1.mlp.experts"] == "model.layers.1.mlp.experts"
    assert names["layers.1.mlp.router"] == "model.layers.1.mlp.gate"
    assert names["layers.1.mlp.shared.gate_up"] == "model.layers.1.mlp.shared_experts.{gate_proj,up_proj}"
    assert names["layers.1.attn.kv_a"] == "model.layers.1.self_attn.kv_a_proj_with_mqa"
    assert not any(site.startswith(("mtp", "sample")) for site in names), "the engine calls them, not a step"


def test_layers_and_parts_of_sites():
    assert find_layer("layers.12.mlp") == 12 and find_layer("layers") is None and find_layer("embed") is None
    assert find_part("layers.12.mlp.down") == "layer.mlp.down" and find_part("layers.3") == "layer"
    assert find_part("head") == "head" and find_part("layers") == "layers"


def test_pins_divide_what_has_products_below():
    pins = find_part_pins(tiny_llama(), {})
    assert set(pins) == {"causal_lm", "decoder_stack", "decoder_layer", "gqa_block", "gated_mlp"}
    assert set(pins.values()) == {"decomposition"}
    assert {"moe", "mla_block"} <= set(find_part_pins(tiny_v3(), {}))
    assert find_part_pins(tiny_llama(), {"gated_mlp": "reference"})["gated_mlp"] == "reference"
    everywhere = find_part_pins(tiny_llama(), {"layers*": "reference"})
    assert set(everywhere) == {"causal_lm", "layers*"}, "a pin that no site would use is an error"
