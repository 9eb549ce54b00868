"""Configs and names from the metadata of GGUF files, and what is refused."""

from __future__ import annotations

import re

import numpy as np
import pytest

from inferplane.errors import CheckpointError, UnsupportedModelError
from inferplane.gguf import ARCHITECTURES, Metadata, make_config
from inferplane.gguf.metadata import decimal
from inferplane.gguf.opened import GGUFModel
from inferplane.models.build import Build
from inferplane.models.reading.config import Config
from inferplane.models.reading.gguf_source import GGUFSource
from inferplane.models.registry import ARCHITECTURES as FAMILIES
from inferplane.models.registry import build
from tests.unit.gguf.files import llama, random_blocks, write

LLAMA = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 512,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": float(np.float32(1e-5)),
    "tokenizer.ggml.eos_token_id": 7,
}


def config(values, tensors=None, read=None):
    return make_config(Metadata(values, "a.gguf", {"token_embd.weight": (33, 64), **(tensors or {})}, read or dict))


def test_numbers_are_the_shortest_decimals():
    assert decimal(float(np.float32(1e-6))) == 1e-6 and decimal(1e6) == 1e6


def test_a_config_of_llama():
    found = config(LLAMA)
    wanted = {"head_dim": 16, "rms_norm_eps": 1e-5, "num_key_value_heads": 4, "eos_token_id": 7, "vocab_size": 33}
    assert wanted.items() <= found.items()
    assert found["tie_word_embeddings"] and not config(LLAMA, {"output.weight": (33, 64)})["tie_word_embeddings"]


def test_a_config_of_gemma_3():
    meta = {key.replace("llama", "gemma3"): value for key, value in LLAMA.items()}
    meta |= {
        "general.architecture": "gemma3",
        "gemma3.block_count": 7,
        "gemma3.attention.key_length": 32,
        "gemma3.attention.sliding_window": 512,
        "gemma3.rope.scaling.type": "linear",
        "gemma3.rope.scaling.factor": 8.0,
    }
    found = config(meta)
    assert [kind.partition("_")[0] for kind in found["layer_types"]] == ["sliding"] * 5 + ["full", "sliding"]
    assert found["rope_parameters"]["full_attention"] == {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
    assert found["query_pre_attn_scalar"] == 32 == found["head_dim"]
    assert config({**meta, "gemma3.block_count": 62})["query_pre_attn_scalar"] == 16


def test_llama_3s_factors_become_its_settings():
    """The factors of Llama 3.2's frequencies, as a file has them: 1 up to a wavelength of 2048, 32 from 8192 on."""
    values = {**LLAMA, "llama.rope.freq_base": 500000.0, "llama.attention.key_length": 64}
    lengths = 2 * np.pi * 500000.0 ** (np.arange(32) / 32)
    smooth = np.clip((8192 / lengths - 1) / 3, 0, 1)
    factors = [decimal(1 / ((1 - s) / 32 + s)) for s in smooth]
    rope = config(values, {"rope_freqs.weight": (32,)}, lambda name: factors)["rope_parameters"]
    assert (rope["rope_type"], rope["factor"], rope["high_freq_factor"]) == ("llama3", 32.0, 4.0)
    odd = [1.0] * 20 + [3.0] * 12
    rope = config(values, {"rope_freqs.weight": (32,)}, lambda name: odd)["rope_parameters"]
    assert rope["rope_type"] == "longrope" and rope["long_factor"] == odd and rope["attention_factor"] == 1.0


NEMOTRON = {
    **{key.replace("llama.", "nemotron_h_moe."): value for key, value in LLAMA.items()},
    "general.architecture": "nemotron_h_moe",
    "nemotron_h_moe.attention.head_count_kv": np.array([2, 0]),
    "nemotron_h_moe.feed_forward_length": np.array([0, 96]),
    "nemotron_h_moe.expert_count": 8,
    "nemotron_h_moe.expert_used_count": 2,
    "nemotron_h_moe.expert_shared_feed_forward_length": 40,
    **{f"nemotron_h_moe.ssm.{key}": 8 for key in ("conv_kernel", "state_size", "group_count", "time_step_rank")},
    "nemotron_h_moe.ssm.inner_size": 64,
}
LAYERS = {"blk.0.attn_q.weight": (64, 64), "blk.1.ffn_gate_inp.weight": (8, 64)}


def test_a_config_of_nemotron_h():
    found = config(NEMOTRON, LAYERS)
    assert found["layers_block_type"] == ["attention", "moe"] and found["n_routed_experts"] == 8
    assert (found["mamba_head_dim"], found["moe_intermediate_size"], found["topk_group"]) == (8, 96, 1)
    latent = config({**NEMOTRON, "nemotron_h_moe.moe_latent_size": 32}, LAYERS)
    with pytest.raises(UnsupportedModelError, match="moe_latent_size = 32 is not implemented"):
        build(Build(Config(latent)))
    with pytest.raises(CheckpointError, match=r"lacks nemotron_h_moe\.expert_group_used_count"):
        config({**NEMOTRON, "nemotron_h_moe.expert_group_count": 4}, LAYERS)
    with pytest.raises(CheckpointError, match="feed_forward_length"):
        config({**NEMOTRON, "nemotron_h_moe.feed_forward_length": np.array([40, 96])}, LAYERS)


def test_every_architecture_is_one_of_a_family():
    for form in ARCHITECTURES.values():
        assert form.name in FAMILIES
        assert form.moe is None or form.moe.name in FAMILIES


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"llama.context_length": None}, CheckpointError, "lacks llama.context_length"),
        ({"llama.block_count": 0}, CheckpointError, "block_count"),
        ({"llama.embedding_length": "64"}, CheckpointError, "embedding_length"),
        ({"llama.attention.head_count": np.array([4, 2])}, CheckpointError, "head_count"),
        ({"llama.rope.scaling.type": "odd"}, UnsupportedModelError, "'odd', which is not read"),
        ({"general.architecture": "mamba"}, UnsupportedModelError, "'mamba', which is not read from GGUF"),
        ({"general.architecture": None}, CheckpointError, "lacks general.architecture"),
    ],
)
def test_what_is_missing_or_unknown_is_refused(changes, error, words):
    values = {key: value for key, value in {**LLAMA, **changes}.items() if value is not None}
    with pytest.raises(error, match=re.escape(words)):
        config(values)


def test_tensors_without_a_place_are_refused(tmp_path):
    tensors = llama("F16") | {"blk.0.odd.weight": ("F32", random_blocks("F32", (8,)))}
    model = GGUFModel.open(write(tmp_path / "a.gguf", tensors))
    with pytest.raises(CheckpointError, match=r"no place in a model of llama: blk\.0\.odd\.weight"):
        GGUFSource(model.header, model.meta)
