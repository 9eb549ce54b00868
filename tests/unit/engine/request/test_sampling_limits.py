"""What may be asked of sampling: limits, forms, and one clear error for each."""

import json

import pytest

from inferplane.engine.request.params import GREEDY, SamplingParams
from inferplane.errors import UsageError


@pytest.mark.parametrize(
    "wrong",
    [
        {"repetition_penalty": 0},
        {"repetition_penalty": float("inf")},
        {"repetition_penalty": float("nan")},
        {"frequency_penalty": 2.1},
        {"presence_penalty": -2.1},
        {"presence_penalty": "much"},
        {"logit_bias": {1: 101}},
        {"logit_bias": {-1: 1}},
        {"logit_bias": {"1": 1}},
        {"logit_bias": {1: float("nan")}},
        {"logit_bias": {1: None}},
        {"logit_bias": dict.fromkeys(range(1025), 1.0)},
        {"logit_bias": [1, 2]},
        {"logprobs": 21},
        {"logprobs": -1},
        {"logprobs": True},
        {"prompt_logprobs": 2.5},
        {"n": 0},
        {"n": 129},
        {"stop": ["x"] * 17},
        {"stop": "x" * 257},
        {"stop_token_ids": range(1025)},
        {"stop_token_ids": [-1]},
        {"json_schema": "{"},
        {"json_schema": "3"},
        {"json_schema": 3},
        {"json_schema": False},
        {"json_schema": {"enum": [{1, 2}]}},
        {"json_schema": {"enum": ["x" * 70_000]}},
        {"json_schema": "[" * 60_000},
        {"json_schema": {"const": float("nan")}},
        {"regex": ""},
        {"regex": "x" * 4097},
        {"regex": 3},
        {"grammar": "x" * 65537},
        {"timeout_s": 0},
        {"timeout_s": float("nan")},
        {"seed": 1.5},
        {"seed": 2**63},
        {"seed": -(2**63) - 1},
    ],
)
def test_out_of_range(wrong):
    (name,) = wrong
    with pytest.raises(UsageError) as caught:
        SamplingParams(**wrong)
    assert str(caught.value).startswith(f"SamplingParams: {name} = ") and len(str(caught.value)) < 400


def test_limits_belong_to_the_range():
    SamplingParams(stop=["x" * 256] * 16, logit_bias=dict.fromkeys(range(1024), -100), n=128, logprobs=20)
    SamplingParams(prompt_logprobs=0, regex="é" * 2048, seed=2**63 - 1, timeout_s=1e-3)
    SamplingParams(seed=-(2**63))


def test_one_constraint():
    with pytest.raises(UsageError, match="json_schema and regex"):
        SamplingParams(json_schema={}, regex="a")
    assert SamplingParams(regex="a").constraint == ("regex", "a") and GREEDY.constraint is None


def test_a_schema_is_kept_as_text_in_its_own_order():
    p = SamplingParams(json_schema={"type": "object", "properties": {"b": {}, "a": {}}})
    assert list(json.loads(p.json_schema)["properties"]) == ["b", "a"]
    assert SamplingParams(json_schema=p.json_schema) == p and hash(p) == hash(SamplingParams(json_schema=p.json_schema))
    assert SamplingParams(json_schema=True) == SamplingParams(json_schema="true") == SamplingParams(json_schema={})
    assert SamplingParams(json_schema={}).constraint == ("json_schema", "{}"), "an empty schema is one, too"


def test_ids_are_checked_against_a_model():
    SamplingParams(logit_bias={9: 1}, stop_token_ids=[9]).check_ids(10)
    for wrong in ({"logit_bias": {10: 1}}, {"stop_token_ids": [3, 10]}):
        with pytest.raises(UsageError, match="token 10"):
            SamplingParams(**wrong).check_ids(10)


def test_what_a_row_needs():
    assert not GREEDY.penalizes and not GREEDY.filters
    for one in ({"repetition_penalty": 1.1}, {"frequency_penalty": 0.1}, {"presence_penalty": -0.1}):
        assert SamplingParams(**one).penalizes
    for one in ({"top_k": 1}, {"top_p": 0.9}, {"min_p": 0.1}):
        assert SamplingParams(**one).filters
