"""The rules of calls, as the form of a model allows them."""

from __future__ import annotations

import pytest

from inferplane.serving.chat.call_rules import demand_calls, tag_calls
from inferplane.serving.chat.tools import ToolPlan
from inferplane.serving.errors import ApiError
from tests.unit.dialogue.replies.goldens import NAMED

PLAIN = {"type": "object", "properties": {"a": {"type": "string"}}}
PATTERN = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^a+$"}}}
OPEN = {"type": "object", "additionalProperties": True}


@pytest.mark.parametrize(
    ("name", "schema", "is_strict", "has_rule"),
    [
        ("glm45", PLAIN, True, True),
        ("glm45", PATTERN, False, True),
        ("glm45", PATTERN, True, False),
        ("glm45", OPEN, False, False),
        ("qwen3", PATTERN, True, True),
        ("qwen3", OPEN, True, True),
    ],
)
def test_a_demanded_call_is_in_the_form_that_holds_it_to_its_schema(name, schema, is_strict, has_rule):
    plan = ToolPlan("required", {"f": schema}, is_strict=is_strict)
    assert (demand_calls(NAMED[name], plan, {}) is not None) == has_rule


@pytest.mark.parametrize(("schema", "has_rule"), [(PLAIN, True), (PATTERN, True), (OPEN, False)])
def test_a_call_that_has_begun_follows_a_rule_that_its_form_can_hold(schema, has_rule):
    assert bool(tag_calls(NAMED["glm45"], ToolPlan("auto", {"f": schema}), {})) == has_rule


def test_strict_functions_that_a_rule_cannot_hold_are_refused():
    with pytest.raises(ApiError, match="Strict functions"):
        tag_calls(NAMED["glm45"], ToolPlan("auto", {"f": PATTERN}, is_strict=True), {})
