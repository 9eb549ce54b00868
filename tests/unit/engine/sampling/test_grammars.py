"""Constraints: what may come, drafts, going back, ends, refusals and limits."""

import builtins
import random
import re
import threading
import time

import numpy as np
import pytest

from inferplane.engine.request.params import SamplingParams
from inferplane.engine.sampling.grammars import Grammars
from inferplane.errors import UsageError, install_hint
from inferplane.serving.errors import from_engine
from tests.unit.support.constrained import END, V, allowed, grammars, ids_of, text_of, tokenizer, write

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
SLOW = {"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{i}}}c"} for i in range(20)]}
DEEP = {
    "$defs": {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(1000)} | {"d1000": {}},
    "$ref": "#/$defs/d0",
}


def test_without_the_extra(monkeypatch):
    real = builtins.__import__

    def missing(name, *args, **kwargs):
        if name.partition(".")[0] == "llguidance":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(UsageError, match=re.escape(install_hint("constrained"))):
        Grammars(tokenizer(), V, {END})


@pytest.fixture(scope="module")
def compiled():
    pytest.importorskip("llguidance", reason="not run: the extra `constrained` is not installed")
    made = grammars()
    yield made
    made.close()


def start(compiled, **constraint):
    return compiled.start(SamplingParams(**constraint))


def test_no_constraint(compiled):
    assert start(compiled) is None


def test_only_what_fits_may_come(compiled):
    c = start(compiled, regex="(yes|no|maybe)")
    first = allowed(c.masks()[0])
    assert first == {i for i in range(3, 4096) if any(w.startswith(text_of([i])) for w in ("yes", "no", "maybe"))}
    assert not c.complete and not c.ended
    c.accept(ids_of("yes"))
    assert c.complete and allowed(c.masks()[0]) == {END}
    with pytest.raises(UsageError, match="does not continue"):
        c.accept(ids_of("x"))
    c.accept([END])
    assert c.ended and c.complete and allowed(c.masks()[0]) == {END}


def test_masks_have_a_bit_for_every_logit(compiled):
    masks = start(compiled, regex=".*").masks()
    assert len(masks) == 1 and masks[0].dtype == np.int32 and masks[0].shape == (-(-V // 32),)
    assert END in allowed(masks[0]) and not allowed(masks[0]) & ({0, 2} | set(range(4096, V))), "not what is padding"


def test_the_end_may_come_when_the_text_is_complete(compiled):
    c = start(compiled, regex="[ab]+")
    assert END not in allowed(c.masks()[0])
    with pytest.raises(UsageError):
        c.accept([END])
    c.accept(ids_of("ab"))
    assert END in allowed(c.masks()[0]) and len(allowed(c.masks()[0])) > 1
    c.accept([END])
    assert c.ended


@pytest.mark.parametrize(
    ("grammar", "before"),
    [("start: <|eos|>", ""), ("start: <[1]>", ""), ('start: "a" <|eos|>', "a"), ('start: <[1]> | "b"', "")],
)
def test_an_end_token_that_the_grammar_names_ends_the_text(compiled, grammar, before):
    c = start(compiled, grammar=grammar)
    c.accept(ids_of(before))
    assert END in allowed(c.masks()[0])
    c.accept([END])
    assert c.ended and c.complete
    c.rollback(1)
    assert not c.ended and END in allowed(c.masks()[0])
    with pytest.raises(UsageError):
        c.accept(ids_of("z"))


def test_drafts_are_looked_at_and_left(compiled):
    c, text = start(compiled, json_schema=OBJECT), ids_of('{"a": 12}')
    before = c.masks()
    masks = c.masks([*text, END])
    assert len(masks) == len(text) + 2 and np.array_equal(c.masks(), before)
    for i, token in enumerate(text):
        assert token in allowed(masks[i]) and np.array_equal(c.masks()[0], masks[i])
        c.accept([token])
    assert allowed(masks[len(text)]) == {END} and not c.ended
    for regex, words in (("abc|abd", "abc"), ("[ab]+", "ab")):  # the end is forced, and may come
        c, ids = start(compiled, regex=regex), [i for letter in words for i in ids_of(letter)]
        c.accept(ids[:1])
        there = c.masks()
        assert END in allowed(c.masks([*ids[1:], END, END])[len(ids) - 1])
        assert np.array_equal(c.masks(), there)
        c.accept([*ids[1:], END])
        assert c.ended
    c = start(compiled, json_schema=OBJECT)
    masks = c.masks([text[0], 2000, *text[1:]])
    assert 2000 not in allowed(masks[1]) and set(masks[2:]) == {None}, "nothing is said of what follows a wrong draft"
    assert np.array_equal(c.masks(), before)


def test_going_back(compiled):
    r = random.Random(4)
    text = [*ids_of('{"a": -120}'), END]
    trail = start(compiled, json_schema=OBJECT)
    masks = []
    for token in text:
        masks.append(trail.masks()[0])
        trail.accept([token])
    c, at = start(compiled, json_schema=OBJECT), 0
    for _ in range(60):
        ahead = r.randint(0, len(text) - at)
        c.accept(text[at : at + ahead])
        back = r.randint(0, at + ahead)
        c.rollback(back)
        at += ahead - back
        if at < len(text):
            assert np.array_equal(c.masks()[0], masks[at]) and not c.ended
        assert c.ended == (at == len(text))


def test_sequences_of_one_constraint_are_independent(compiled):
    a, b = start(compiled, regex="abc|abd"), start(compiled, regex="abc|abd")
    a.accept(ids_of("abc"))
    assert a.complete and not b.complete
    b.accept(ids_of("abd"))
    assert b.complete


def test_regular_expressions_and_grammars(compiled):
    regex = r"(Mon|Tues)day, [0-3]\d\.(0[1-9]|1[0-2])\. (é|日本){1,3}"
    arithmetic = 'start: sum\nsum: term ("+" term)*\nterm: NUMBER | "(" sum ")"\nNUMBER: /[0-9]{1,3}/\n'
    texts = write([*(start(compiled, regex=regex) for _ in range(5)), start(compiled, grammar=arithmetic)], 300)
    assert all(re.fullmatch(regex, t) for t in texts[:5])
    if texts[5] is not None:
        assert isinstance(eval(re.sub(r"\b0+(?=\d)", "", texts[5]), {}), int)


def test_white_space_is_bounded(compiled):
    c, space = start(compiled, json_schema=OBJECT), ids_of(" ")
    c.accept(ids_of("{"))
    count = 0
    while space[0] in allowed(c.masks()[0]):
        c.accept(space)
        count += 1
    assert count == 40
    c.accept(ids_of('"a"'))


@pytest.mark.parametrize(
    "wrong",
    [
        {"regex": "(a"},
        {"regex": "(?=a)b"},
        {"regex": "(" * 2000 + "a" + ")" * 2000},
        {"grammar": "start: missing"},
        {"grammar": "start: " + "(" * 30_000 + '"a"' + ")" * 30_000},
        {"grammar": "no grammar at all"},
        {"json_schema": {"type": "no such type"}},
        {"json_schema": {"not": {"type": "string"}}},
        {"json_schema": {"oneOf": [{"type": "integer"}, {"type": "number"}]}},
        {"json_schema": {"type": "array", "uniqueItems": True}},
        {"json_schema": {"$ref": "https://example.org/schema.json"}},
        {"json_schema": {"$ref": "#"}},
        {"json_schema": {"type": "integer", "minimum": 5, "maximum": 4}},
        {"json_schema": {"x-guidance": {"lenient": True}, "not": {}}},
    ],
)
def test_refused(compiled, wrong):
    with pytest.raises(UsageError, match="is refused") as caught:
        start(compiled, **wrong)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-around, including look-ahead and look-behind, is not supported"),
        ({"regex": "a" * 3000 + "(b"}, "unclosed group"),
        ({"grammar": "start: /a(b/"}, "unclosed group"),
        ({"grammar": "start: missing"}, 'unknown name: "missing"'),
        ({"json_schema": {"type": "string", "pattern": "a("}}, "unclosed group"),
        ({"json_schema": {"type": "no such type"}}, "Invalid type: no such type"),
        ({"json_schema": {"$ref": "#"}}, "no text fits it"),
    ],
)
def test_the_reason_of_a_refusal_reaches_the_client(compiled, wrong, reason):
    (name,) = wrong
    with pytest.raises(UsageError) as caught:
        start(compiled, **wrong)
    answer = from_engine(caught.value, {}, wrong)
    assert (answer.status, answer.param) == (400, name)
    assert "Rust" in caught.value.remedy if name == "regex" else "llguidance's docs/" in caught.value.remedy
    assert name == "grammar" or not re.search(r"refused: at \d", str(caught.value))
    assert answer.message.startswith(f"The {name} is refused: ") and answer.message.endswith(f"{reason}.")


@pytest.mark.parametrize(
    "evil",
    [
        {"regex": "(a+)+b"},
        {"regex": "(?:a?){500}a{500}"},
        {"regex": "((a{0,100}){0,100}){0,100}"},
        {"regex": "(.*a.{30}){30}"},
        {"json_schema": {"enum": [f"v{i}" for i in range(6000)]}},
        {"json_schema": {"type": "string", "maxLength": 2_000_000}},
        {"json_schema": {"anyOf": [{"properties": {f"p{i}": {}}, "required": [f"q{i}"]} for i in range(200)]}},
        {"grammar": 'start: start start | "a" | '},
        {"grammar": "start: a0\n" + "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(60)) + '\na60: "x"\n'},
    ],
)
def test_evil_constraints_are_followed_or_refused_soon(compiled, evil):
    began = time.monotonic()
    try:
        c = start(compiled, **evil)
        for _ in range(3):
            c.accept(sorted(allowed(c.masks()[0]))[:1])
    except UsageError:
        pass
    assert time.monotonic() - began < 5


def test_what_hangs_or_crashes_the_compiler_is_refused(monkeypatch):
    """llguidance 1.9 needs minutes for one of these and overflows its stack on the other; we live on."""
    pytest.importorskip("llguidance", reason="not run: the extra `constrained` is not installed")
    compiled = grammars(compile_s=0.5)
    began = time.monotonic()
    with pytest.raises(UsageError, match=r"longer than 0\.5 seconds"):
        start(compiled, json_schema=SLOW)
    assert time.monotonic() - began < 30, "of minutes; a busy machine stretches the half second"
    with monkeypatch.context() as patch:
        patch.delattr(Grammars, "_compile")  # it is remembered, not compiled again
        with pytest.raises(UsageError, match="longer than"):
            start(compiled, json_schema=SLOW)
    with pytest.raises(UsageError, match="too deeply nested"):
        start(compiled, json_schema=DEEP)
    assert start(compiled, regex="a") is not None, "the next one is served"
    compiled.close()
    assert start(compiled, regex="ab") is not None, "after close, too"
    compiled.close()


def test_constraints_are_compiled_once_by_many_threads(compiled, monkeypatch):
    made, real = [], compiled._compile
    monkeypatch.setattr(compiled, "_compile", lambda *a: made.append(a) or real(*a))
    found = []
    threads = [threading.Thread(target=lambda: found.append(start(compiled, regex="once+"))) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(made) == 1 and len(found) == 8 == len({id(c) for c in found})


def test_what_is_remembered_is_bounded(compiled, monkeypatch):
    monkeypatch.setattr("inferplane.engine.sampling.grammars.MAX_CACHED", 64)
    compiled._cache.clear()
    for i in range(70):
        start(compiled, regex=f"a{{{i + 1}}}")
    assert len(compiled._cache) == 64


def test_tokenizers_of_every_form(compiled):
    from transformers import PreTrainedTokenizerFast

    for form in (tokenizer(), PreTrainedTokenizerFast(tokenizer_object=tokenizer()), tokenizer().to_str()):
        assert Grammars(form, V, {END})._tokenizer.vocab_size == V
    for wrong, match in (((object(), V, {END}), "fast tokenizer"), ((tokenizer(), V, set()), "end-of-text")):
        with pytest.raises(UsageError, match=match):
            Grammars(*wrong)
    with pytest.raises(UsageError, match="tokenizer"):
        Grammars(tokenizer(), 100, {END})


def test_several_end_tokens():
    pytest.importorskip("llguidance", reason="not run: the extra `constrained` is not installed")
    compiled = Grammars(tokenizer(), V, {END, 2, V + 7})
    for end in (END, 2):
        c = start(compiled, regex="a")
        c.accept(ids_of("a"))
        assert allowed(c.masks()[0]) == {END, 2}
        c.accept([end])
        assert c.ended
    compiled.close()
