"""What users pass: forms that are accepted, values that are refused with the rule."""

from __future__ import annotations

import warnings
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from inferplane import AsyncLLM, SamplingParams
from inferplane.engine.clients.options import OPTIONS, EngineOptions
from inferplane.engine.request.arguments import MAX_INTEGER, MIN_PRIORITY, as_integer
from inferplane.engine.request.fields import ReasoningSpan, StructuralTag
from inferplane.engine.request.history import History
from inferplane.engine.sampling.batch_rows import BatchRow
from inferplane.engine.sampling.sampler import Sampler
from inferplane.engine.speculate.config import SpeculativeConfig
from inferplane.errors import UsageError
from inferplane.ops import SampleTokens
from inferplane.types import HOST
from tests.unit.support.small import bound


def test_forms():
    assert SamplingParams(stop="a").stop == SamplingParams(stop=["a"]).stop == ("a",)
    assert SamplingParams(stop=None).stop == SamplingParams(stop=[]).stop == ()
    assert SamplingParams(stop_token_ids=5).stop_token_ids == SamplingParams(stop_token_ids=[5]).stop_token_ids == (5,)
    assert SamplingParams(stop_token_ids=None).stop_token_ids == ()
    assert SamplingParams(top_k=-1).top_k == 0
    assert hash(SamplingParams(stop=["a"])) == hash(SamplingParams(stop="a"))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_tokens", (0, -1, 2.5, None, "8", True)),
        ("temperature", (-0.1, float("inf"), float("nan"), None, "hot", True, Decimal("0.5"))),
        ("top_p", (0, 1.1, -1, float("nan"), None, True)),
        ("top_k", (-2, 1.5, None)),
        ("min_p", (-0.1, 1.1, float("nan"), None)),
        ("min_tokens", (-1, 17, None)),
        ("seed", (1.5, "a")),
        ("stop", ("", [""], ["a", ""], [3], [None])),
        ("stop_token_ids", ([1.5], ["a"], [-1])),
        ("ignore_eos", (1, "no", None)),
        ("logit_bias", ({5: True}, {5: "1"}, {"5": 1}, {5: 101})),
        ("reasoning", ("</think>", [], {"begin": "<think>"}, {"ends": "x"}, 3)),
        ("structural_tags", ("<a>", [{"trigger": "<a>"}], [3], 3, [{"trigger": "a", "grammar": 'start: "b"'}] * 2)),
        ("visible_tokens", ([""], [3], 3, ["a" * 257], ["a"] * 257)),
        ("timeout_s", (0, -1, True, "1", 10**400, Fraction(10**400), float("nan"))),
    ],
)
def test_values_out_of_range(name, values):
    for value in values:
        with pytest.raises(UsageError, match=f"SamplingParams: {name} = ") as caught:
            SamplingParams(**{name: value})
        assert caught.value.there_is or caught.value.remedy


def test_spans():
    span = ReasoningSpan(end="</think>", begin="<think>")
    assert span == ReasoningSpan(end=["</think>"], begin=("<think>",), forced_end="</think>")
    given = SamplingParams(reasoning={"end": "</think>", "begin": "<think>"}, visible_tokens="<call>")
    assert given.reasoning == span and given.visible_tokens == ("<call>",) and not given.needs_grammar
    tagged = SamplingParams(structural_tags=[{"trigger": "<call>", "grammar": 'start: "a"'}], reasoning=span)
    assert tagged.structural_tags == (StructuralTag("<call>", 'start: "a"'),) and tagged.needs_grammar
    assert tagged.without_grammars == SamplingParams(reasoning=span) and hash(tagged) != hash(given)
    with pytest.raises(UsageError, match="regex and structural_tags together"):
        SamplingParams(regex="a", structural_tags=tagged.structural_tags)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("end", {"end": ""}),
        ("end", {"end": [""]}),
        ("end", {"end": ["a"] * 9}),
        ("end", {"end": "a" * 257}),
        ("begin", {}),
        ("begin", {"begin": [3]}),
        ("is_open", {"is_open": 1}),
        ("max_tokens", {"is_open": True, "max_tokens": -1}),
        ("max_tokens", {"is_open": True, "max_tokens": True}),
        ("forced_end", {"is_open": True, "forced_end": "that is all"}),
        ("forced_end", {"is_open": True, "forced_end": 5}),
    ],
)
def test_spans_that_are_none(name, fields):
    with pytest.raises(UsageError, match=f"ReasoningSpan: {name} = "):
        ReasoningSpan(**{"end": "</think>", **fields})


@pytest.mark.parametrize(
    ("name", "fields"), [("trigger", {"trigger": ""}), ("grammar", {"grammar": ""}), ("grammar", {"grammar": None})]
)
def test_tags_that_are_none(name, fields):
    with pytest.raises(UsageError, match=f"StructuralTag: {name} = "):
        StructuralTag(**{"trigger": "<call>", "grammar": 'start: "a"', **fields})


def test_numbers_of_other_libraries_travel_as_ours():
    params = SamplingParams(temperature=np.float32(0.5), top_p=Fraction(1, 2), logit_bias={3: np.float64(2)})
    assert (params.temperature, params.top_p, params.logit_bias) == (0.5, 0.5, {3: 2.0})
    assert {type(x) for x in (params.temperature, params.top_p, params.logit_bias[3])} == {float}


@pytest.mark.parametrize("integer", [np.int64, np.int32, np.uint8, torch.tensor])
@pytest.mark.parametrize("name", ["max_tokens", "top_k", "seed", "min_tokens", "logprobs", "prompt_logprobs", "n"])
def test_integers_of_other_libraries_travel_as_ours(name, integer):
    found = getattr(SamplingParams(**{name: integer(5)}), name)
    assert found == 5 and type(found) is int


@pytest.mark.parametrize(
    "ids",
    [np.array([1, 2]), np.array([1, 2], np.uint8), [np.int64(1), np.int32(2)], torch.tensor([1, 2]), (1, np.int64(2))],
    ids=repr,
)
def test_ids_of_other_libraries_travel_as_ours(ids):
    params = SamplingParams(stop_token_ids=ids, logit_bias={i: 1 for i in ids})
    assert params.stop_token_ids == tuple(params.logit_bias) == (1, 2)
    assert {type(i) for i in (*params.stop_token_ids, *params.logit_bias)} == {int}
    assert SamplingParams(stop_token_ids=ids[1]).stop_token_ids == (2,)
    assert SamplingParams(top_k=np.int64(-1)).top_k == 0


@pytest.mark.parametrize("value", [np.True_, torch.tensor(True), np.float64(5), torch.tensor(5.0), np.array([5, 6])])
@pytest.mark.parametrize("name", ["max_tokens", "top_k", "seed", "n"])
def test_what_is_no_integer_of_another_library_is_refused(name, value):
    with pytest.raises(UsageError, match=f"SamplingParams: {name} = "):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs", "timeout_s"])
def test_what_there_is_reads_as_a_sentence(name):
    with pytest.raises(UsageError, match=r"There is: values (from 0 to 20|above 0 \(in seconds\)), or None\."):
        SamplingParams(**{name: -1})


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("max_model_len", 2**31 - 1),
        ("max_num_seqs", 2**31 - 1),
        ("max_num_batched_tokens", 2**31 - 1),
        ("max_waiting", 2**31 - 1),
        ("kv_cache_bytes", 2**63 - 1),
    ],
)
def test_options_have_a_largest_integer(name, most):
    assert getattr(EngineOptions(**{name: most}), name) == most
    for value in (most + 1, 2**63, 2**70, 10**30):
        with pytest.raises(UsageError, match=f"{name} = ") as caught:
            EngineOptions(**{name: value})
        assert caught.value.there_is.endswith(f" to {most}")


SWITCHES = [name for name, option in OPTIONS.items() if isinstance(option.default, bool)]


@pytest.mark.parametrize("name", SWITCHES)
def test_switches_are_true_or_false(name):
    for value in (True, False):
        assert getattr(EngineOptions(**{name: value}), name) is value
    for value in ("no", "false", "", 0, 1, None, np.bool_(False)):
        with pytest.raises(UsageError, match=f"{name} = ") as caught:
            EngineOptions(**{name: value})
        assert caught.value.there_is == "True and False" and caught.value.remedy
    assert {"enable_prefix_caching", "deterministic", "strict", "capture", "mtp"} == set(SWITCHES)


def test_switches_beside_the_options_are_true_or_false():
    with pytest.raises(UsageError, match="process = 'no'"):
        AsyncLLM("demo", process="no")
    with pytest.raises(UsageError, match="adaptive = 'off'"):
        SpeculativeConfig.of({"method": "ngram", "adaptive": "off"})


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("tensor_parallel_size", 0, ""),
        ("tensor_parallel_size", -1, ""),
        ("tensor_parallel_size", "2", "pass an int, as in tensor_parallel_size=2"),
        ("kv_cache_bytes", "1GB", f"pass an int, as in kv_cache_bytes={2**30}"),
        ("kv_cache_bytes", "512 MiB", f"pass an int, as in kv_cache_bytes={2**29}"),
        ("kv_cache_bytes", "much", "pass an int"),
        ("kv_cache_bytes", "9999999999GB", "pass an int"),
        ("max_model_len", 1.5, "pass an int"),
        ("max_model_len", 4096.0, "pass an int, as in max_model_len=4096"),
        ("max_model_len", "4096", "pass an int, as in max_model_len=4096"),
        ("max_model_len", "9" * 5000, "pass an int"),
        ("max_num_seqs", "0", "pass an int"),
        ("max_num_seqs", float("inf"), "pass an int"),
        ("max_num_seqs", "1GB", "pass an int"),
    ],
)
def test_a_remedy_is_what_was_meant_or_names_no_value(name, value, remedy):
    with pytest.raises(UsageError, match=f"{name} = ") as caught:
        EngineOptions(**{name: value})
    assert caught.value.remedy == remedy and caught.value.there_is
    if "=" in remedy:
        EngineOptions(**{name: int(remedy.partition("=")[2])})


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"max_batch": 2, "max_num_seqs": 2}, "max_batch and max_num_seqs"),
        ({"max_num_seqs": 2, "max_batch": 2}, "max_num_seqs and max_batch"),
        ({"enable_prefix_caching": True, "prefix_cache": False}, "enable_prefix_caching and prefix_cache"),
        ({"speculative": None, "speculative_config": None}, "speculative and speculative_config"),
    ],
)
def test_an_option_under_two_names_is_refused_with_both(given, names):
    with (
        pytest.warns(DeprecationWarning, match="is deprecated; use"),
        pytest.raises(UsageError, match=f"{names} are the same option"),
    ):
        EngineOptions.of(given)


BEYOND = (2**31, 2**63, 2**64, 10**30)
"""Whole numbers that some step of the way (int32, int64, a message) cannot hold."""


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_tokens", BEYOND),
        ("top_k", BEYOND),
        ("min_tokens", BEYOND),
        ("n", BEYOND),
        ("logprobs", BEYOND),
        ("prompt_logprobs", BEYOND),
        ("stop_token_ids", ([2**31], [2**63], [2**64])),
        ("logit_bias", ({2**31: 1}, {2**63: 1}, {5: 1e300}, {5: 10**30})),
        ("temperature", (1e7, 1e38, 1e300, 10**30, np.float64(1e300))),
        ("repetition_penalty", (1e-300, 5e-324, 1e-39, 1e7, 1e300, 10**30)),
        ("frequency_penalty", (1e300, -1e300, 10**30)),
        ("presence_penalty", (1e300, -1e300, 10**30)),
        ("top_p", (1e300, 10**30)),
        ("min_p", (1e300, 10**30)),
        ("timeout_s", (10**400,)),
    ],
)
def test_numbers_that_a_step_cannot_hold_are_refused(name, values):
    for value in values:
        with pytest.raises(UsageError, match=f"SamplingParams: {name} = "):
            SamplingParams(**{name: value})


def test_every_accepted_number_is_finite_where_it_is_used():
    """At the limits of what is accepted: greedy, scaled and penalized rows have finite inputs, without a warning."""
    extremes = [
        {"temperature": 1e6},
        {"temperature": 1e-300},
        {"top_k": 2**31 - 1},
        {"top_p": 5e-324},
        {"min_p": 5e-324},
        {"repetition_penalty": 1e-6},
        {"repetition_penalty": 1e6},
        {"seed": 2**63 - 1},
    ]
    logits = torch.linspace(-40, 40, 64).repeat(len(extremes), 1)
    rows = []
    for extreme in extremes:
        history = History([3, 9])
        history.extend([5])
        rows.append(BatchRow(SamplingParams(**extreme), 7, 0, history=history))
    sampler = Sampler(bound(SampleTokens()), 64, HOST)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = sampler.prepare(rows)
        assert sampler.process(logits, step).isfinite().all()
        tokens = sampler.sample(logits, step)
    assert ((tokens >= 0) & (tokens < 64)).all()
    assert tokens[3] == 63, "top_p 0 keeps the most likely token"


@pytest.mark.parametrize("value", [2**31, 2**63, 2**70])
def test_integers_beside_the_parameters_have_a_limit(value):
    for name, least in (("priority", MIN_PRIORITY), ("index", 0)):
        with pytest.raises(UsageError, match=f"{name} = "):
            as_integer(name, value, least, MAX_INTEGER)
