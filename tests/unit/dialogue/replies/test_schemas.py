"""Grammars of calls to functions with schemas of all kinds: none hangs, grows without end, or forbids what is right."""

from __future__ import annotations

import pytest

from inferplane.dialogue.replies import tables
from inferplane.dialogue.replies.arguments import list_limits
from inferplane.dialogue.replies.grammar import make_call_grammar
from inferplane.dialogue.replies.values import TypeFinder
from inferplane.dialogue.schema_refs import find_referenced
from tests.unit.dialogue.replies.goldens import NAMED, parse, summarize
from tests.unit.dialogue.replies.test_grammar import accepts

A, NAME = {"$ref": "#/$defs/A"}, {"type": "string"}
ONE_BY_ONE = (tables.GLM_CALLS, tables.QWEN_CODER_CALLS, tables.DSML_CALLS, tables.LFM_CALLS)


def make(form, schema, **options):
    return make_call_grammar(form, {"f": schema}, **{"is_triggered": True, **options})


@pytest.mark.parametrize("keyword", ["anyOf", "oneOf", "allOf"])
def test_schemas_that_refer_to_themselves_many_times_are_looked_at_once(keyword):
    finder = TypeFinder({"properties": {"x": A}, "$defs": {"A": {keyword: [A] * 40}}})
    assert finder.find("x") is None
    chain = {str(i): {"anyOf": [{"$ref": f"#/$defs/{i + 1}"}] * 40} for i in range(20)} | {"20": NAME}
    finder = TypeFinder({"properties": {"x": {"$ref": "#/$defs/0"}}, "$defs": chain})
    assert finder.find("x") == {"string"}


@pytest.mark.parametrize("form", [tables.GLM_CALLS, tables.LFM_CALLS])
def test_a_grammar_has_the_definitions_that_are_reached_and_ends_where_it_is_too_long(form):
    numbers = {f"p{i}": {"type": "integer"} for i in range(50)}
    definitions = {f"d{i}": {"type": "integer", "description": "much " * 9} for i in range(500)}
    assert len(make(form, {"properties": numbers, "$defs": definitions})) < 20_000
    numbers["p7"] = {"$ref": "#/$defs/d3"}
    definitions["d3"] = {"allOf": [{"$ref": "#/$defs/d4"}, {"$ref": "#/$defs/d3"}]}
    grammar = make(form, {"properties": numbers, "$defs": definitions})
    assert '"d3"' in grammar and '"d4"' in grammar and '"d5"' not in grammar
    definitions["d3"] = {"allOf": [{"type": "integer"}, *({"$ref": f"#/$defs/d{i}"} for i in range(500))]}
    numbers = {f"p{i}": {"$ref": "#/$defs/d3"} for i in range(50)}
    assert make(form, {"properties": numbers, "$defs": definitions}, max_bytes=60_000) == ""


@pytest.mark.parametrize("required", [None, True, 5, "x", {"x": 1}, [["x"]]])
def test_what_is_no_list_demands_nothing(required):
    schema = {"properties": {"x": {"type": "integer"}, "y": {"type": "string", "enum": 5}}, "required": required}
    assert accepts(make(tables.GLM_CALLS, schema), "f</tool_call>")
    assert make(tables.LFM_CALLS, {**schema, "properties": {"x": {}}})


@pytest.mark.parametrize("form", ONE_BY_ONE)
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "object", "additionalProperties": True},
        {"properties": {}, "additionalProperties": NAME},
        {"properties": {}, "patternProperties": {"^a": NAME}},
        {"properties": {}, "anyOf": [{"properties": {"x": NAME}}]},
        {"properties": {}, "required": ["x"]},
        {"$ref": "#/$defs/no"},
        {"$ref": "#"},
        {**A, "properties": {"y": NAME}, "$defs": {"A": {"properties": {"x": NAME}}}},
    ],
)
def test_arguments_that_are_not_listed_have_no_grammar(form, schema):
    assert make(form, schema, is_triggered=False) == make(form, schema, strict="f") == ""


@pytest.mark.parametrize("form", ONE_BY_ONE)
def test_parts_that_are_not_there_have_no_grammar(form):
    schema = {"properties": {"x": {"type": "array", "items": {"$ref": "https://a.b/c"}}}}
    assert make(form, schema, is_triggered=False) == make(form, schema, strict="f") == ""


ANY_CALLS = {
    tables.GLM_CALLS: "NAME\n<arg_key>any key</arg_key>\n<arg_value>a <b>\n</arg_value>\n</tool_call>",
    tables.QWEN_CODER_CALLS: "\n<function=NAME>\n<parameter=any>\na <b>\n</parameter>\n</function>\n</tool_call>",
    tables.DSML_CALLS: (
        '\n<｜DSML｜invoke name="NAME">\n<｜DSML｜parameter name="any" string="true">a</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="other" string="false">{"a": [1]}</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>"
    ),
    tables.LFM_CALLS: '[NAME(any="a", other={"a": [1]})]<|tool_call_end|>',
}
"""What follows the mark of a call of a function whose arguments are not listed."""


@pytest.mark.parametrize("form", ONE_BY_ONE)
@pytest.mark.parametrize("schema", [{"type": "object"}, {"properties": {"x": NAME}, "allOf": [{}]}, {"$ref": "#"}])
def test_a_call_that_has_begun_takes_arguments_that_are_not_listed(form, schema):
    number = {"properties": {"n": {"type": "integer"}}, "required": ["n"]}
    grammar = make_call_grammar(form, {"g": number, "f": schema}, is_triggered=True, unenforced=(found := set()))
    assert found == {"parameters"} and accepts(grammar, ANY_CALLS[form].replace("NAME", "f"))
    for other in ("g", "h"):  # one that needs its number, and one that is not there
        assert not accepts(grammar, ANY_CALLS[form].replace("NAME", other))


GLM_CALL = "f\n<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"


def test_arguments_behind_a_reference():
    target = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    schema = {"type": "object", **A, "$defs": {"A": target}}
    grammar = make(tables.GLM_CALLS, schema)
    assert accepts(grammar, GLM_CALL.format("x", "5")) and not accepts(grammar, GLM_CALL.format("x", "five"))
    assert not accepts(grammar, "f\n</tool_call>")
    reply = "<tool_call>" + GLM_CALL.format("x", "5")
    assert summarize(parse(NAMED["glm45"], [reply], {"f": schema}), "glm45", reply).calls == (("f", {"x": 5}),)


@pytest.mark.parametrize("pointer", ["#/properties/q", "#/properties/%71", "#/$defs/a~1b", "#/properties/r/anyOf/0"])
def test_references_inside_of_an_argument(pointer):
    kids = {"type": "array", "items": {"$ref": pointer}}
    properties = {"q": {"type": "integer"}, "r": {"anyOf": [{"type": "integer"}]}, "kids": kids}
    grammar = make(tables.GLM_CALLS, {"properties": properties, "$defs": {"a/b": {"type": "integer"}}})
    assert accepts(grammar, GLM_CALL.format("kids", "[1, 2]"))
    assert not accepts(grammar, GLM_CALL.format("kids", '["a"]'))


def test_arguments_that_are_like_the_whole():
    schema = {"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#"}}}}
    schema["additionalProperties"] = False
    for form, text in (
        (tables.GLM_CALLS, GLM_CALL.format("kids", "{}")),
        (tables.LFM_CALLS, "[f(kids={})]<|tool_call_end|>"),
    ):
        grammar = make(form, schema)
        assert accepts(grammar, text.replace("{}", '[{"kids": []}]'))
        assert not accepts(grammar, text.replace("{}", '[{"kin": []}]'))


def test_what_a_reference_names():
    root = {"$defs": {"a b": [{"c": 1}]}}
    assert find_referenced("#", root) is root
    assert find_referenced("#/$defs/a%20b/0/c", root) == 1
    for wrong in ("#a", "b.json#/$defs", "#/$defs/a%20b/1", "#/$defs/a%20b/0/c/d", "#/$defs/a%20b/x", "#" + "/a" * 999):
        assert find_referenced(wrong, root) is None


@pytest.mark.parametrize("form", ONE_BY_ONE)
def test_an_argument_that_is_never_right_is_left_out(form):
    grammar = make(form, {"properties": {"x": {"type": "integer"}, "y": False}})
    assert '"y' not in grammar and "x" in grammar
    assert make(form, {"properties": {"y": False}, "required": ["y"]}, is_triggered=False) == ""


TEXT = {"type": "string"}
NULL = {"type": "null"}


@pytest.mark.parametrize(
    ("part", "right", "wrong"),
    [
        ({"const": "a b"}, ["a b"], ["a", "a b ", " a b", '"a b"']),
        ({"type": "string", "enum": ["a", "b"]}, ["a", "b"], ["c", " a", "a\n", "ab"]),
        ({"anyOf": [{"$ref": "#/$defs/Kind"}, NULL]}, ["a", "null"], ["b", "None"]),
        ({"$ref": "#/$defs/Kind"}, ["a"], ["null"]),
    ],
)
def test_an_argument_that_is_a_choice_is_one_of_the_texts(part, right, wrong):
    unenforced = set()
    schema = {"properties": {"x": part}, "required": ["x"], "$defs": {"Kind": {"enum": ["a"]}}}
    grammar = make(tables.GLM_CALLS, schema, unenforced=unenforced)
    assert not unenforced
    assert [accepts(grammar, GLM_CALL.format("x", text)) for text in right] == [True] * len(right)
    assert [accepts(grammar, GLM_CALL.format("x", text)) for text in wrong] == [False] * len(wrong)


def test_one_line_end_at_each_side_of_a_choice_is_padding_where_a_form_has_it():
    grammar = make(tables.QWEN_CODER_CALLS, {"properties": {"x": {"enum": ["a"]}}})
    call = "\n<function=f>\n<parameter=x>{}</parameter>\n</function>\n</tool_call>"
    assert accepts(grammar, call.format("a")) and accepts(grammar, call.format("\na\n"))
    assert not accepts(grammar, call.format("\n\na")) and not accepts(grammar, call.format(" a"))


@pytest.mark.parametrize(
    ("part", "keywords"),
    [
        ({**TEXT, "pattern": "^a", "minLength": 1, "description": "x"}, {"pattern", "minLength"}),
        ({"anyOf": [{**TEXT, "format": "date"}, NULL]}, {"format"}),
        ({"anyOf": [{"$ref": "#/$defs/Kind"}, TEXT]}, {"maxLength"}),
        ({"type": ["string", "integer"], "minimum": 1}, {"minimum"}),
        ({"type": ["string", "null"], "title": "x", "default": None}, set()),
        ({"type": "integer", "minimum": 1}, set()),
        ({}, set()),
    ],
)
def test_keywords_that_have_no_effect_on_texts_are_named(part, keywords):
    unenforced = set()
    schema = {"properties": {"x": part}, "$defs": {"Kind": {**TEXT, "maxLength": 9}}}
    for form in (tables.GLM_CALLS, tables.LFM_CALLS):
        assert make(form, schema, unenforced=unenforced)
        assert unenforced == (keywords if form is tables.GLM_CALLS else set())
        unenforced.clear()


def test_choices_count_as_what_they_add_to_a_grammar():
    kind = {"anyOf": [{"enum": ["word" * 9]}] * 200}
    schema = {"properties": {f"p{i}": {"$ref": "#/$defs/Kind"} for i in range(200)}, "$defs": {"Kind": kind}}
    assert make(tables.GLM_CALLS, schema, max_bytes=60_000) == ""


def test_spellings_of_a_reference_are_one():
    names = ["ab", "%61b", "a%62", "%61%62"]
    root = {"$defs": {"ab": {"anyOf": [{**TEXT, "maxLength": 5}] * 9}}}
    followed = set()
    found = [list_limits({"$ref": f"#/$defs/{name}"}, root, followed) for name in names]
    assert found == [{"maxLength"}, set(), set(), set()] and len(followed) == 1
