"""What users pass: forms that are accepted, values that are refused with the rule."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from inferplane import SamplingParams
from inferplane.errors import UsageError


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
        ("timeout_s", (0, -1, True, "1", 10**400, Fraction(10**400), float("nan"))),
    ],
)
def test_values_out_of_range(name, values):
    for value in values:
        with pytest.raises(UsageError, match=f"SamplingParams: {name} = ") as caught:
            SamplingParams(**{name: value})
        assert caught.value.there_is or caught.value.remedy


def test_numbers_of_other_libraries_travel_as_ours():
    params = SamplingParams(temperature=np.float32(0.5), top_p=Fraction(1, 2), logit_bias={3: np.float64(2)})
    assert (params.temperature, params.top_p, params.logit_bias) == (0.5, 0.5, {3: 2.0})
    assert {type(x) for x in (params.temperature, params.top_p, params.logit_bias[3])} == {float}
