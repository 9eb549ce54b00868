"""Configs and arguments that cannot be meant: each is one clear error, before anything is loaded."""

from __future__ import annotations

import asyncio
import re

import pytest
import torch

from inferplane import LLM, AsyncLLM, SamplingParams
from inferplane.dialogue.template import Template
from inferplane.errors import CheckpointError, UnsupportedModelError, UsageError
from inferplane.models import Build, Config, as_config, build
from inferplane.types import HOST, Placement
from tests.unit.support.small import LLAMA, V3

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def without(entries, key):
    return {k: v for k, v in entries.items() if k != key}


def told(error):
    """The message, which has no half of a traceback in it."""
    assert error.what.endswith(".") and (error.there_is or error.remedy)
    return str(error)


# ------------------------------------------------------------------ configs

EITHER = [
    ({"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6', not a number from 0"),
    ({"rms_norm_eps": [1e-6]}, "rms_norm_eps"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
    ({"rms_norm_eps": -1e-6}, "rms_norm_eps is -1e-06, not a number from 0"),
    ({"rms_norm_eps": True}, "rms_norm_eps"),
    ({"max_position_embeddings": "512"}, "max_position_embeddings is '512', not a positive integer"),
    ({"max_position_embeddings": 512.5}, "max_position_embeddings"),
    ({"max_position_embeddings": 0}, "max_position_embeddings"),
    ({"max_position_embeddings": -1}, "max_position_embeddings"),
    ({"max_position_embeddings": [512]}, "max_position_embeddings"),
    ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM', not a list"),
    ({"architectures": {"LlamaForCausalLM": 1}}, "architectures"),
    ({"architectures": [5]}, "architectures"),
    ({"rope_scaling": [1]}, r"rope_scaling is \[1\], not an object"),
    ({"rope_scaling": []}, "rope_scaling"),
    ({"rope_scaling": "yarn"}, "rope_scaling"),
    ({"rope_parameters": ["linear", 2.0]}, "rope_parameters"),
    ({"rope_theta": "10000"}, "rope_theta = '10000'"),
    ({"rope_theta": -1.0}, "rope_theta"),
    ({"rope_scaling": {"type": "linear"}}, "'linear' lacks 'factor'"),
    ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor = '2'"),
    ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor = 0"),
    ({"rope_scaling": {"type": "linear", "factor": float("inf")}}, "factor = inf"),
    *(
        ({"rope_scaling": without(LLAMA3, key), "max_position_embeddings": None}, f"lacks '{key}'")
        for key in LLAMA3
        if key != "rope_type"
    ),
    ({"rope_scaling": {"type": "longrope", "long_factor": [1.0]}}, "lacks 'short_factor'"),
    ({"rope_scaling": {"type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [1.0]}}, "a list of"),
    ({"rope_scaling": {"type": "longrope", "short_factor": ["1"], "long_factor": 3}}, "short_factor"),
    *(({"rope_scaling": {**LLAMA3, key: "8"}}, f"{key} = '8'") for key in LLAMA3 if key != "rope_type"),
    ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "above low_freq_factor"),
    ({"rope_scaling": without(YARN, "factor")}, "lacks 'factor'"),
    (
        {"rope_scaling": without(YARN, "original_max_position_embeddings"), "max_position_embeddings": None},
        "lacks 'max_position_embeddings'",
    ),
    *(
        ({"rope_scaling": {**YARN, key: value}}, key)
        for key in ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor")
        for value in ("4", [4], True, 0)
    ),
    *(({"rope_scaling": {**YARN, key: value}}, key) for key in ("mscale", "mscale_all_dim") for value in ("1", -1)),
    ({"rope_scaling": YARN, "rope_theta": 1.0}, "rope_theta = 1.0"),
]
OF_LLAMA = [
    ({"num_attention_heads": 6, "num_key_value_heads": 4}, "num_attention_heads = 6 .*num_key_value_heads = 4"),
    ({"num_attention_heads": 2, "num_key_value_heads": 4}, "num_key_value_heads = 4"),
    ({"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": None}, "hidden_size = 64"),
    ({"head_dim": 15}, "15 entries of a head.*head_dim"),
    ({"hidden_size": 60, "head_dim": None}, "15 entries of a head"),
    ({"head_dim": "16"}, "head_dim"),
]
OF_V3 = [
    ({"num_experts_per_tok": 9, "n_group": 1, "topk_group": 1}, "num_experts_per_tok = 9 exceeds n_routed_experts = 8"),
    ({"topk_group": 5}, "topk_group = 5 exceeds n_group = 4"),
    ({"n_group": 8}, "n_group = 8 leaves 1 expert per group"),
    ({"n_group": 16}, "8 experts cannot form 16 equal groups"),
    ({"num_experts_per_tok": 5}, "num_experts_per_tok = 5 exceeds the 4 experts in topk_group = 2 groups"),
    ({"qk_rope_head_dim": 7}, "7 entries of a head.*qk_rope_head_dim"),
    ({"first_k_dense_replace": "1"}, "first_k_dense_replace"),
    ({"q_lora_rank": -1}, "q_lora_rank"),
    ({"n_shared_experts": 1.5}, "n_shared_experts"),
    ({"routed_scaling_factor": "2.5"}, "routed_scaling_factor"),
    ({"num_nextn_predict_layers": [1]}, "num_nextn_predict_layers"),
]


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [(family, *case) for family in (LLAMA, V3) for case in EITHER]
    + [(LLAMA, *case) for case in OF_LLAMA]
    + [(V3, *case) for case in OF_V3],
)
def test_a_config_that_cannot_be_meant(family, changes, says):
    with pytest.raises(CheckpointError, match=says) as caught:
        build(Build(Config({**family, **changes})))
    told(caught.value)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        (LLAMA, {"max_position_embeddings": None, "rms_norm_eps": None, "rope_scaling": None, "rope_theta": 10000}),
        (LLAMA, {"rope_scaling": {}}),
        (LLAMA, {"rope_scaling": LLAMA3}),
        (LLAMA, {"rope_parameters": {**YARN, "rope_type": "yarn", "mscale": 1, "mscale_all_dim": 0}}),
        (LLAMA, {"num_attention_heads": 6, "num_key_value_heads": 3}),
        (V3, {"num_experts_per_tok": 4}),
        (V3, {"num_experts_per_tok": 8, "n_group": 1, "topk_group": 1}),
        (V3, {"n_routed_experts": 4, "n_group": None, "topk_group": None, "q_lora_rank": None}),
        (V3, {"n_group": 1, "topk_group": 1, "n_routed_experts": 1, "num_experts_per_tok": 1}),
    ],
)
def test_a_config_that_can(family, changes):
    build(Build(Config({**family, **changes}), mtp=True))


@pytest.mark.parametrize("family", [LLAMA, V3])
def test_experts_are_not_divided_yet(family):
    with pytest.raises(UnsupportedModelError, match="ep_size = 2") as caught:
        Build(Config(family), Placement(ep_size=2))
    told(caught.value)
    Build(Config(family), Placement(ep_size=1))


# ------------------------------------------------------------------ arguments


@pytest.mark.parametrize("model", [None, 5, 1.5, [LLAMA], object(), Config, b"demo"])
def test_what_is_no_model(model):
    for ask in (LLM, as_config):
        with pytest.raises(UsageError, match="is no model") as caught:
            ask(model)
        told(caught.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        *(
            ({name: value}, f"{name} = {re.escape(repr(value))}.*integers of")
            for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "kv_cache_bytes", "max_waiting")
            for value in ("12", 2.5, 1e6, float("nan"), True, [3])
        ),
        ({"kv_cache_bytes": 1e6}, "kv_cache_bytes=1000000"),
        ({"max_num_seqs": None}, "max_num_seqs = None"),
        ({"max_num_seqs": 0}, "max_num_seqs = 0"),
        ({"max_model_len": -1}, "max_model_len = -1"),
        ({"kv_cache_bytes": -1}, "kv_cache_bytes = -1"),
        ({"speculative_config": {"foo": 1}}, "names 'foo'.*method"),
        ({"speculative_config": {}}, "method = None"),
        ({"speculative_config": {"method": ["mtp"]}}, "method"),
        ({"speculative_config": {"method": "nothing"}}, "method"),
        *(
            ({"speculative_config": {"method": "ngram", "num_speculative_tokens": n}}, "num_speculative_tokens")
            for n in ("2", 2.5, None, 8)
        ),
        ({"speculative_config": "mtp"}, "speculative_config = 'mtp'"),
        ({"speculative_config": ["mtp"]}, "speculative"),
        ({"speculative_config": 3}, "speculative_config = 3"),
        ({"speculative_config": False}, "speculative_config = False"),
        ({"ops": ["linear=reference"]}, "ops = .*mapping"),
        ({"ops": []}, "ops"),
        ({"ops": "linear=reference"}, "ops"),
        ({"ops": {"linear": None}}, "'linear': None"),
        ({"ops": {1: "reference"}}, "ops names 1"),
        ({"device": 0}, "device = 0"),
        ({"device": None}, "device = None"),
        ({"dtype": ["float32"]}, "dtype"),
        ({"kv_cache_dtype": None}, "kv_cache_dtype"),
        ({"lock": 5}, "lock = 5"),
        ({"progress": True}, "progress"),
        ({"load_format": 5}, "load_format"),
    ],
)
def test_arguments_that_cannot_be_meant(options, says):
    with pytest.raises(UsageError, match=says) as caught:
        LLM("no such folder: the arguments are looked at first", **options)
    told(caught.value)


@pytest.fixture(scope="module")
def llm():
    with LLM(LLAMA, device=HOST, load_format="dummy", dtype="float32", kv_cache_bytes=1 << 20, max_num_seqs=4) as llm:
        yield llm


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda llm: llm.generate([1], {"max_tokens": 3}), r"params = \{'max_tokens': 3\}.*SamplingParams\(\*\*params"),
        (lambda llm: llm.generate([1], {}), "params"),
        (lambda llm: llm.generate([1], 3), "params = 3"),
        (lambda llm: llm.generate([1], "greedy"), "params"),
        (lambda llm: llm.generate([1], [{"max_tokens": 3}]), "params"),
        (lambda llm: llm.generate([1], SamplingParams), "params"),
        (lambda llm: llm.generate([b"abc"]), "b'abc' among the prompts is no prompt.*decode"),
        (lambda llm: llm.generate(b"abc"), "b'abc' is no prompt"),
        (lambda llm: llm.generate(bytearray(b"abc")), "no prompt"),
        (lambda llm: llm.generate({"prompt": "x"}), "no prompt"),
        (lambda llm: llm.generate([{"role": "user"}]), "no prompt"),
        (lambda llm: llm.generate({1, 2}), "no prompt"),
        (lambda llm: llm.generate([{1, 2}]), "no prompt"),
        (lambda llm: llm.generate(torch.tensor(5)), "no prompt"),
        (lambda llm: llm.logits([b"abc"]), "no prompt"),
        (lambda llm: next(llm.stream(["a", "b"])), "stream takes one prompt"),
        (lambda llm: next(llm.stream(["a"])), "stream takes one prompt"),
        (lambda llm: next(llm.stream([[1, 2]])), "stream takes one prompt"),
        (lambda llm: next(llm.stream(torch.tensor([[1, 2]]))), "stream takes one prompt"),
        (lambda llm: next(llm.stream(b"abc")), "no prompt"),
        (lambda llm: next(llm.stream(5)), "5 is no prompt"),
        (lambda llm: next(llm.stream(None)), "None is no prompt"),
        (lambda llm: next(llm.stream([1], {"max_tokens": 3})), "params"),
        (lambda llm: next(llm.stream([1], [SamplingParams()])), "params"),
    ],
)
def test_calls_that_cannot_be_meant(llm, ask, says):
    with pytest.raises(UsageError, match=says) as caught:
        ask(llm)
    told(caught.value)
    assert not llm.engine.busy


class Echo:
    """A tokenizer whose chat template takes anything."""

    def template(self, source=None):
        return Template("{{ messages | length }}", {})

    def encode(self, text, *, special=True):
        return [1, 2]


@pytest.mark.parametrize("messages", ["hi", ["hi"], {"role": "user", "content": "hi"}, None, 5, [[{"role": "user"}]]])
def test_conversations_that_are_none(llm, monkeypatch, messages):
    monkeypatch.setattr(llm._inputs, "_tokenizer", Echo())
    for ask in (llm.chat, llm.stream_chat):
        with pytest.raises(UsageError, match="messages") as caught:
            ask(messages)
        told(caught.value)
        with pytest.raises(UsageError, match="params"):
            ask([{"role": "user", "content": "hi"}], {"max_tokens": 3})
    assert not llm.engine.busy


def test_calls_that_can(llm):
    greedy = SamplingParams(max_tokens=3, temperature=0)
    (want,) = llm.generate([1, 2, 3], greedy)
    for prompt in ((1, 2, 3), torch.tensor([1, 2, 3]), range(1, 4)):
        assert llm.generate(prompt, [greedy])[0].token_ids == want.token_ids
        assert [t for d in llm.stream(prompt, greedy) for t in d.token_ids] == want.token_ids
    many = llm.generate([(1, 2, 3), torch.tensor([1, 2, 3])], (greedy, greedy))
    assert [r.token_ids for r in many] == [want.token_ids] * 2


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([{"rol": "user", "content": "hi"}], r"Message 0 lacks 'role'.*write 'role' in place of 'rol'"),
        ([{"content": "hi"}], "Message 0 lacks 'role'.*give it a role"),
        ([{"role": "user", "content": "hi"}, {"role": "user"}], "Message 1 lacks 'content'.*give it a content"),
        ([{"role": None, "content": "hi"}], r"messages\[0\] has the role None.*'user'"),
    ],
)
def test_messages_that_lack_something(llm, monkeypatch, messages, says):
    monkeypatch.setattr(llm._inputs, "_tokenizer", Echo())
    for ask in (llm.chat, llm.stream_chat):
        with pytest.raises(UsageError, match=says) as caught:
            ask(messages)
        told(caught.value)
    assert not llm.engine.busy


def test_a_message_that_calls_tools_needs_no_content(llm, monkeypatch):
    monkeypatch.setattr(llm._inputs, "_tokenizer", Echo())
    monkeypatch.setattr(llm._inputs, "needs_detokenizer", lambda params: False)
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": []}]
    assert llm.chat(said, SamplingParams(max_tokens=2, ignore_eos=True)).finish_reason == "length"


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda llm: SamplingParams(max_token=5), "SamplingParams takes no max_token.*perhaps max_tokens was meant"),
        (lambda llm: LLM(LLAMA, max_modellen=3), "LLM takes no max_modellen.*perhaps max_model_len was meant"),
        (
            lambda llm: LLM(LLAMA, top_k=3),
            r"LLM takes no top_k.*generate, stream or chat: params=SamplingParams\(top_k=3",
        ),
        (lambda llm: llm.generate([1], max_tokens=3), r"generate takes no max_tokens.*pass params: params=Sampl"),
        (lambda llm: llm.generate(prompt=[1]), "generate takes no prompt.*perhaps prompts was meant"),
        (lambda llm: llm.stream([1], temperature=0), "stream takes no temperature"),
        (lambda llm: llm.chat([{"role": "user", "content": "x"}], n=1), "chat takes no n"),
        (lambda llm: llm.embed([1], normalise=True), "embed takes no normalise.*perhaps normalize was meant"),
        (lambda llm: llm.logits([1], whatever=1), "logits takes no whatever"),
    ],
)
def test_keywords_that_nobody_takes(llm, ask, says):
    with pytest.raises(UsageError, match=says) as caught:
        ask(llm)
    told(caught.value)
    assert not llm.engine.busy


def test_an_engine_in_a_thread_has_no_address_and_says_so_without_raising():
    llm = AsyncLLM(LLAMA, device=HOST, load_format="dummy", dtype="float32", kv_cache_bytes=1 << 20, max_num_seqs=4)
    try:
        assert getattr(llm, "address", None) == ""
        with pytest.raises(UsageError, match="generate takes no max_tokens"):
            llm.generate([1], max_tokens=3)
    finally:
        asyncio.run(llm.shutdown())
