"""Thoughts, their limits, and structural tags: masks, drafts and going back, against a reference without any state."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llguidance", reason="not run: the extra `constrained` is not installed")

from tokenizers import AddedToken

from inferplane.engine.request.params import SamplingParams
from inferplane.engine.sampling.grammars import Grammars
from inferplane.engine.sampling.spans.constraints import MAX_ROLLBACK, ModelFacts
from inferplane.engine.sampling.spans.marks import MarkedTokens
from inferplane.engine.sampling.spans.start import start_constraint
from inferplane.engine.sampling.spans.token_text import TokenText
from inferplane.errors import UsageError
from tests.e2e.tiny_tokenizers import byte_level

END = 1
ADDED = ("<think>", "</think>", "<call>", "nk>{", "ll>  ", "ll>5", "a</think>b", "x</call>", "k>", "<t", ">\n")
SPACE = b" \t\r\n"
TEXT_MARKS = {"begin": "Thought:", "end": ("Answer:", "Done.")}
NUMBERS = 'start: /[0-9]{1,3}/ | /[ab]+/ "</call>"'
TAG = {"trigger": "<call>", "grammar": NUMBERS}


class Model:
    """A tokenizer with its grammars, whose tokens are all distinct as bytes, but for the special ones."""

    def __init__(self) -> None:
        from transformers import PreTrainedTokenizerFast

        made = byte_level()
        made.add_tokens([AddedToken(name, special=False, normalized=False) for name in ADDED])
        self.fast = PreTrainedTokenizerFast(tokenizer_object=made)
        self.vocab = len(self.fast) + 3
        self.bytes_of = TokenText(self.fast).bytes_of
        self.tokens = MarkedTokens(self.bytes_of, self.encode, self.vocab)
        self.facts = ModelFacts(self.tokens, frozenset([END]), -(-self.vocab // 32))
        self.grammars = Grammars(made, self.vocab, [END])

    def encode(self, text: str) -> list[int]:
        return list(self.fast.encode(text, add_special_tokens=False))

    def start(self, **params: Any) -> Any:
        made = SamplingParams(**params)
        return start_constraint(made, self.facts, self.grammars if made.needs_grammar else None)

    def written(self, ids: list[int]) -> bytes:
        return b"".join(map(self.bytes_of, ids))


@pytest.fixture(scope="module")
def model():
    made = Model()
    yield made
    made.grammars.close()


class Reference:
    """What may follow a history, found by reading it from its beginning each time."""

    def __init__(self, model: Model, params: dict[str, Any]) -> None:
        self.model, self.params = model, SamplingParams(**params)
        self.span, self.is_tagged = self.params.reasoning, bool(self.params.structural_tags)

    def allowed(self, history: list[int]) -> set[int]:
        if self.span is None:
            return self._answer(history)
        ids: list[int] = []
        at = 0
        if not self.span.is_open:
            begin = next((n for n in range(1, len(history) + 1) if self._begins(history[:n])), None)
            if begin is None:
                allowed = self._answer(history) if self._may_answer(history) else set()
                text = self.model.written(history)
                for mark in self.span.begin:
                    known = self.model.encode(mark)
                    for n, token in enumerate(known):
                        if self.model.written(known[:n]) == text:
                            allowed = allowed | {token}
                return allowed
            at = begin
            head = self.model.written(history[:begin]).lstrip(SPACE)
            first = next(mark for mark in self.span.begin if head.startswith(mark.encode()))
            text = head[len(first.encode()) :]
        else:
            text = b""
        while not self._ends(text):
            inside = at - (0 if self.span.is_open else begin)
            limit = self.span.max_tokens
            if limit is not None and inside >= limit and _is_whole(text):
                forced = self.model.encode(self.span.forced_end)
                done = len(history) - at
                if done < len(forced):
                    assert history[at:] == forced[:done]
                    return {forced[done]}
                at += len(forced)
                break
            if at == len(history):
                return {t for t in range(self.model.vocab) if self._may_think(text, t)}
            text += self.model.bytes_of(history[at])
            at += 1
        ids = history[at:]
        return self._answer(ids)

    def _begins(self, ids: list[int]) -> bool:
        text = self.model.written(ids).lstrip(SPACE)
        return any(text.startswith(mark.encode()) for mark in self.span.begin)

    def _ends(self, text: bytes) -> bool:
        return any(mark.encode() in text for mark in self.span.end)

    def _may_think(self, text: bytes, token: int) -> bool:
        if self.params.constraint is None and not self.is_tagged:
            return True
        if token == END and self.params.constraint is not None:
            return False
        return not _runs_over(text + self.model.bytes_of(token), self.span.end)

    def _may_answer(self, ids: list[int]) -> bool:
        return all(token in self._answer(ids[:i]) for i, token in enumerate(ids))

    def _answer(self, ids: list[int]) -> set[int]:
        if self.is_tagged:
            return self._tagged(ids)
        if self.params.constraint is None:
            return set(range(self.model.vocab))
        grammar = self.model.grammars.start(self.params)
        grammar.accept(ids)
        return bits(grammar.mask(), self.model.vocab)

    def _tagged(self, ids: list[int]) -> set[int]:
        text, at = b"", 0
        triggers = [tag.trigger for tag in self.params.structural_tags]
        while True:
            found = (
                min((text.find(t.encode()), i) for i, t in enumerate(triggers) if t.encode() in text)
                if any(t.encode() in text for t in triggers)
                else None
            )
            if found is None:
                if at == len(ids):
                    free = range(self.model.vocab)
                    return {t for t in free if not _runs_over(text + self.model.bytes_of(t), triggers)}
                text += self.model.bytes_of(ids[at])
                at += 1
                continue
            tag = self.params.structural_tags[found[1]]
            grammar = self.model.grammars.start(SamplingParams(grammar=tag.grammar))
            while at < len(ids) and grammar.is_allowed(ids[at]) and not (grammar.complete and ids[at] == END):
                grammar.accept([ids[at]])
                at += 1
                if bits(grammar.mask(), self.model.vocab) == {END}:
                    break
            if at == len(ids) and not grammar.complete:
                return bits(grammar.mask(), self.model.vocab)
            text = b""


def _runs_over(text: bytes, marks: Any) -> bool:
    return any(mark.encode() in text and text.partition(mark.encode())[2].strip(SPACE) != b"" for mark in marks)


def _is_whole(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return error.reason != "unexpected end of data"
    return True


def bits(mask: np.ndarray | None, vocab: int) -> set[int]:
    if mask is None:
        return set(range(vocab))
    return {i for i in range(vocab) if int(mask[i // 32]) >> i % 32 & 1}


THINK = {"begin": "<think>", "end": "</think>"}
CASES = {
    "an open thought, then a constraint": {"reasoning": {**THINK, "is_open": True}, "regex": "[0-9]{2,4}"},
    "a thought that may begin": {"reasoning": THINK, "regex": "[0-9<th]+"},
    "marks that are text": {"reasoning": TEXT_MARKS, "regex": "(Tho|Answer)[a-z]*"},
    "a limit": {"reasoning": {**THINK, "max_tokens": 4, "forced_end": " so\n</think>\n"}},
    "a limit of nothing": {"reasoning": {**THINK, "is_open": True, "max_tokens": 0}, "regex": "(ab)+"},
    "a limit, then a constraint": {
        "reasoning": {**TEXT_MARKS, "is_open": True, "max_tokens": 5, "forced_end": "Done. Answer:"},
        "json_schema": {"type": "integer"},
    },
    "tags": {"structural_tags": [TAG, {"trigger": "<t>", "grammar": 'start: "1"+ "2"?'}]},
    "a thought, then tags": {"reasoning": {**THINK, "is_open": True, "max_tokens": 6}, "structural_tags": [TAG]},
    "a thought that may begin, then tags": {"reasoning": THINK, "structural_tags": [TAG]},
}


@pytest.mark.parametrize("case", CASES)
def test_histories_at_random(model, case):
    """Each mask is the reference's, with drafts and without, and after going back."""
    params, r = CASES[case], random.Random(case)
    reference = Reference(model, params)
    pieces = [
        *ADDED,
        "<",
        "t",
        "think>",
        "</",
        "thi",
        "Thought",
        ":",
        "Answer:",
        "Done",
        ".",
        "é",
        "12",
        "ab",
        "</call>",
    ]
    likely = [i for piece in pieces for i in model.encode(piece)]
    likely += [model.encode("🚀")[0], model.encode("🚀")[1]]
    scripts = ["Thought:Done.Tho", " \n<think>", "\n<think></think>", "Thought: é Answer:", "<call>7</call>", "<th"]
    marks = ["<think>", "</think>", "<call>", "Thought:", "Answer:", "7</call>", "<t>11"]
    known: dict[tuple[int, ...], set[int]] = {}

    def expected(ids: list[int]) -> set[int]:
        return known.setdefault(tuple(ids), reference.allowed(ids)) if tuple(ids) not in known else known[tuple(ids)]

    seen = set()
    for _ in range(12):
        constraint, history = model.start(**params), []
        for token in model.encode(r.choice(["", *scripts])):
            if token in expected(history):
                constraint.accept([token])
                history.append(token)
        for _ in range(14):
            drafts = [r.choice(likely) for _ in range(r.randint(0, 3))]
            if r.random() < 0.4:
                drafts = model.encode(r.choice(marks))
            masks = constraint.masks(drafts)
            assert len(masks) == 1 + len(drafts)
            before = list(history)
            for i, mask in enumerate(masks):
                allowed = expected(before)
                assert bits(mask, model.vocab) == allowed, (case, model.written(before))
                if i == len(drafts) or drafts[i] not in allowed or drafts[i] == END:
                    break
                before.append(drafts[i])
            choices = sorted(expected(history))
            near = [i for i in choices if i in likely] or choices
            if drafts and len(before) > len(history) and r.random() < 0.7:
                new = before[len(history) :]
            else:
                new = [r.choice(near if r.random() < 0.8 else choices)]
            constraint.accept(new)
            history += new
            seen.add(len(expected(history)))
            if constraint.ended or END in new:
                break
            if r.random() < 0.2:
                back = r.randint(0, len(history))
                constraint.rollback(back)
                history = history[: len(history) - back]
            wrong = set(range(model.vocab)) - expected(history)
            if wrong:
                with pytest.raises(UsageError, match="does not continue"):
                    constraint.accept([min(wrong)])
    assert len(seen) > 1, "the text was never at two different places"


def test_white_space_may_come_before_a_thought(model):
    constraint = model.start(reasoning=THINK)
    constraint.accept(model.encode(" \n<think>a"))
    assert constraint.reasoning_tokens == len(model.encode(" \n<think>a")) and constraint.complete
    constraint.accept(model.encode("</think>b"))
    assert constraint.reasoning_tokens == len(model.encode(" \n<think>a</think>"))


def test_an_answer_without_a_thought_has_none(model):
    constraint = model.start(reasoning=THINK)
    constraint.accept(model.encode(" \n<thin"))
    assert constraint.reasoning_tokens == 0 and constraint.is_free(1000)
    constraint.accept(model.encode("<think>a</think>"))
    assert constraint.reasoning_tokens == 0, "the text has begun otherwise"


def test_a_limit_waits_for_the_end_of_a_character(model):
    rocket = model.encode("🚀")
    assert len(rocket) == 3
    constraint = model.start(reasoning={**THINK, "is_open": True, "max_tokens": 2})
    assert constraint.is_free(2) and not constraint.is_free(3)
    for i, token in enumerate(rocket):
        assert constraint.masks() == [None], i
        constraint.accept([token])
    assert bits(constraint.masks()[0], model.vocab) == set(model.encode("</think>"))


def test_an_end_token_after_a_tag_is_free_text(model):
    """The sequence ends by its own rules, so that `ignore_eos` holds; but an end that the grammar names ends it."""
    constraint = model.start(structural_tags=[TAG])
    constraint.accept([*model.encode("<call>12"), END])
    assert not constraint.ended and constraint.complete and constraint.masks() == [None]
    constraint.accept(model.encode("<call>"))
    assert not constraint.complete and END not in bits(constraint.masks()[0], model.vocab)
    named = model.start(structural_tags=[{"trigger": "<call>", "grammar": 'start: "1" <[1]>'}])
    named.accept([*model.encode("<call>1"), END])
    assert named.ended
    named.rollback(1)
    assert not named.ended and bits(named.masks()[0], model.vocab) == {END}


def test_free_text_needs_no_masks(model):
    constraint = model.start(reasoning={**THINK, "is_open": True}, structural_tags=[TAG])
    words = model.encode("The quick brown fox")
    masks = constraint.masks(words)
    plain = [mask for mask in masks if mask is not None]
    assert len(masks) == len(words) + 1 and all(mask is plain[0] for mask in plain), "one mask, made once"
    counted = model.start(reasoning=THINK)
    assert counted.masks(words) == [None] * (len(words) + 1)


def test_marks_that_cannot_be_written(model):
    class Poor:
        """Words without an alphabet."""

        def encode(self, text: str) -> list[int]:
            return [5]

    facts = model.facts._replace(tokens=MarkedTokens(model.bytes_of, Poor().encode, model.vocab))
    limited = SamplingParams(reasoning={**THINK, "max_tokens": 5})
    with pytest.raises(UsageError, match=r"SamplingParams: reasoning: .* cannot write forced_end = '</think>'"):
        start_constraint(limited, facts, None)
    before = SamplingParams(reasoning=THINK, regex="a")
    with pytest.raises(UsageError, match=r"cannot write begin = '<think>'"):
        start_constraint(before, facts, model.grammars)
    counted = start_constraint(SamplingParams(reasoning=THINK), facts, None)
    counted.accept(model.encode("<think>c</think>d"))
    assert counted.reasoning_tokens == 3, "to find marks, none has to be written"


def test_only_the_last_tokens_can_be_undone(model):
    constraint = model.start(reasoning={**THINK, "is_open": True})
    words = model.encode("The quick brown fox jumps. ") * 60
    constraint.accept(words)
    constraint.rollback(MAX_ROLLBACK)
    assert constraint.reasoning_tokens == len(words) - MAX_ROLLBACK
    with pytest.raises(UsageError, match="can be undone"):
        constraint.rollback(1)
