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
    plan = ToolPlan("required", {"f": schema}, strict=frozenset({"f"} if is_strict else ()))
    assert (demand_calls(NAMED[name], plan, {}) is not None) == has_rule


@pytest.mark.parametrize(("schema", "left_out"), [(PLAIN, set()), (PATTERN, {"pattern"}), (OPEN, {"parameters"})])
def test_a_call_that_has_begun_follows_a_rule_that_its_form_can_hold(schema, left_out):
    assert tag_calls(NAMED["glm45"], ToolPlan("auto", {"f": schema}), {}, found := set())
    assert found == left_out


def test_a_function_with_other_arguments_takes_the_rule_from_no_other():
    tools = {"f": PATTERN, "g": OPEN}
    assert tag_calls(NAMED["glm45"], ToolPlan("auto", tools, strict=frozenset("h")), {}, found := set())
    assert found == {"pattern", "parameters"}
    for strict in "fg":
        with pytest.raises(ApiError, match="Strict functions"):
            tag_calls(NAMED["glm45"], ToolPlan("auto", tools, strict=frozenset(strict)), {})
    assert tag_calls(NAMED["glm45"], ToolPlan("auto", {**tools, "f": PLAIN}, strict=frozenset("f")), {})


def test_strict_functions_that_a_rule_cannot_hold_are_refused():
    with pytest.raises(ApiError, match="Strict functions"):
        tag_calls(NAMED["glm45"], ToolPlan("auto", {"f": PATTERN}, strict=frozenset("f")), {})
