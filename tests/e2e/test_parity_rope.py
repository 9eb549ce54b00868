"""Every family with every rotary scaling, two configs of each, far beyond the context that the scaling starts from.

Within its context and under every scaling but "dynamic" transformers' logits for a whole prompt are the measure. Under
"dynamic" they depend on how a prompt is cut, so there each token is compared with transformers token by token
(docs/decisions/0008).
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
import torch

from inferplane import LLM, SamplingParams
from inferplane.models.registry import ARCHITECTURES
from inferplane.models.rope import TYPES
from tests.e2e.mixtures import ragged
from tests.e2e.test_parity import FLOAT32, error
from tests.e2e.test_text_parts import WHOLES
from tests.e2e.tiny_models import CASES, config_of, greedy_tokens, logits_of, prompts, random_model
from tests.families.cases import CASES as NEWER
from tests.families.cases import config_of as newer_config
from tests.families.wholes import WHOLES as FORMS_OF_THEIR_OWN

CONTEXT = 40
"""Tokens before scaling, of prompts that are shorter, just as long, one longer, and much longer."""
LENGTHS = (23, CONTEXT, CONTEXT + 1, 117)

ROPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({"rope_theta": 10000.0}, {"rope_theta": 1000000.0}),
    "linear": ({"rope_theta": 5000.0, "factor": 4.0}, {"rope_theta": 10000.0, "factor": 2.5}),
    "dynamic": ({"rope_theta": 10000.0, "factor": 4.0}, {"rope_theta": 500000.0, "factor": 3.0}),
    "llama3": (
        {"rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_theta": 10000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 2.0},
    ),
    "yarn": (
        {"rope_theta": 10000.0, "factor": 16.0, "beta_fast": 32, "beta_slow": 1},
        {"rope_theta": 1000000.0, "factor": 4.0, "beta_fast": 8.0, "beta_slow": 0.5, "attention_factor": 1.3},
    ),
}
"""Two settings of each type, without its name and the context it starts from."""

FORMS = {family: list(cases)[:2] for family, cases in CASES.items()}
"""Two configs of each family."""

TABLE = [(family, kind, k) for family in FORMS for kind in ROPES for k in (0, 1)]


def config_for(family: str, kind: str, k: int) -> Any:
    rope = {"rope_type": kind, **ROPES[kind][k]}
    if kind in ("llama3", "yarn"):
        rope["original_max_position_embeddings"] = CONTEXT
    if kind == "yarn" and family.startswith("deepseek"):  # which has a temperature of its own
        rope = {**{x: v for x, v in rope.items() if x != "attention_factor"}, "mscale": 0.7, "mscale_all_dim": 1.0 - k}
    positions = CONTEXT if kind == "dynamic" else 256
    return config_of(family, FORMS[family][k], rope=rope, max_position_embeddings=positions)


def token_by_token(model: Any, ids: list[int]) -> torch.Tensor:
    """transformers' logits after every token, each computed in a call of its own: float32 `[tokens, vocab]`."""
    cache, rows = None, []
    with torch.no_grad():
        for token in ids:
            out = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            cache, _ = out.past_key_values, rows.append(out.logits[0, 0].float())
    return torch.stack(rows)


def test_the_table_is_complete():
    """Two different configs at least for every family of this table and every type."""
    names = {type(config_for(family, "default", k)).__name__ for family in FORMS for k in (0, 1)}
    newer = {type(newer_config(family, next(iter(cases)))).__name__ for family, cases in NEWER.items()}
    models = {name.removesuffix("Config").removesuffix("Text") for name in names | newer}
    wholes = {cases[0].removesuffix("Config") for cases in FORMS_OF_THEIR_OWN.values()}  # tests/families/test_wholes.py
    text_parts = {f"{name}ForConditionalGeneration" for name in (*WHOLES, *wholes)} & ARCHITECTURES.keys()
    assert {f"{name}ForCausalLM" for name in models} | text_parts == set(ARCHITECTURES)
    different = {(f, kind, config_for(f, kind, k).to_json_string()) for f, kind, k in TABLE}
    counts = Counter((f, kind) for f, kind, _ in different)
    assert {*ROPES, "longrope"} == set(TYPES), "test_checkpoint_forms has longrope, which depends on the model's length"
    assert set(counts) == {(f, kind) for f in FORMS for kind in ROPES} and min(counts.values()) >= 2


@pytest.mark.parametrize(("family", "kind", "k"), TABLE, ids=lambda x: str(x))
def test_logits(family, kind, k, tmp_path):
    """Prompts of different lengths, alone in chunks and in ragged steps together."""
    model = random_model(config_for(family, kind, k), seed=k)
    model.save_pretrained(tmp_path)
    many = prompts(model.config.vocab_size, LENGTHS)
    reference = token_by_token if kind == "dynamic" else logits_of
    want = [reference(model, ids) for ids in many]
    with LLM(tmp_path, device="cpu", dtype="float32", max_num_seqs=len(many)) as llm:
        stretched = CONTEXT * ROPES[kind][k]["factor"] if kind in ("dynamic", "yarn") else 0
        assert llm.runner.max_model_len == (stretched if kind == "dynamic" else max(stretched, 256))
        for chunk_tokens in (1000, 9):
            for got, rows in zip(llm.logits(many, chunk_tokens=chunk_tokens), want):
                assert error(got, rows) <= FLOAT32
        for got, rows in zip(ragged(llm.runner, many)[0], want):
            assert error(got, rows) <= FLOAT32


@pytest.mark.parametrize("family", ["llama", "qwen2", "deepseek_v2"])
@pytest.mark.parametrize("kind", ["dynamic", "llama3", "yarn"])
def test_greedy_tokens_across_the_context(family, kind, tmp_path):
    """Sequences that start within the context and leave it at different steps of one batch."""
    model = random_model(config_for(family, kind, 0))
    model.save_pretrained(tmp_path)
    many = prompts(model.config.vocab_size, (CONTEXT, 1, 29, 13), seed=3)
    with LLM(tmp_path, device="cpu", dtype="float32", max_num_seqs=3) as llm:
        results = llm.generate(many, SamplingParams(max_tokens=64, temperature=0))
    for ids, result in zip(many, results):
        if kind == "dynamic":  # where how a text is cut counts
            asked = torch.tensor([ids])
            found = model.generate(asked, attention_mask=torch.ones_like(asked), max_new_tokens=64, do_sample=False)
            greedy = found[0, len(ids) :].tolist()
        else:
            greedy = greedy_tokens(model, ids, result.token_ids)
        assert result.token_ids == greedy and len(result.token_ids) == 64


# ------------------------------------------------------------------ configs as they are published

PUBLISHED: dict[str, dict[str, Any]] = {
    "DeepSeek-R1-Distill-Llama-8B": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    },
    "DeepSeek-R1-Distill-Qwen-1.5B": {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "max_window_layers": 21,
        "model_type": "qwen2",
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "use_mrope": False,
        "use_sliding_window": False,
    },
    "Qwen2.5-7B-Instruct with YaRN": {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "max_window_layers": 28,
        "model_type": "qwen2",
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
        "rope_theta": 1000000.0,
        "sliding_window": 131072,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
    },
}
"""Entries of published config files but for sizes, in their own spelling."""

SIZES = {"hidden_size": 96, "intermediate_size": 112, "num_hidden_layers": 2, "vocab_size": 160}
HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_spellings(name, tmp_path):
    """Both read one file, written as its publisher writes it; positions up to 3000."""
    from transformers import AutoConfig

    entries = {**PUBLISHED[name], **SIZES, **HEADS, "torch_dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(entries))
    model = random_model(AutoConfig.from_pretrained(tmp_path))
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(entries))
    ids = prompts(SIZES["vocab_size"], (3000,))[0]
    with LLM(tmp_path, device="cpu", max_num_seqs=1, max_model_len=4096) as llm:
        assert llm.runner.dtype is torch.float32
        assert error(llm.logits([ids])[0], logits_of(model, ids)) <= FLOAT32
