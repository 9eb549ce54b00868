"""Constraints of parts of a text: the thought before an answer, with a limit of its own, and grammars from triggers on.

Each wraps other constraints, and is one itself, so that whatever chooses tokens needs to know of none.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from inferplane.engine.request.constraint import Constraint, GrammarConstraint, Mask, mask_of, mask_without
from inferplane.engine.sampling.spans.marks import SPACE, MarkedTokens, MarkFinder, is_inside_character
from inferplane.errors import UsageError

MAX_ROLLBACK = 256
"""Most tokens that can be undone: those of a step, its drafts included, are far fewer."""


S = TypeVar("S")


class ModelFacts(NamedTuple):
    """What constraints of spans need to know of a model.

    Args:
        tokens: as bytes.
        end_ids: tokens that end a text.
        words: length of a mask.
    """

    tokens: MarkedTokens
    end_ids: frozenset[int]
    words: int


class ThoughtMarks(NamedTuple):
    """The marks around a thought, ready to be found.

    Args:
        begin, end: the marks.
        begin_tokens: a beginning of a mark that begins the thought -> the token with which the tokenizer goes on.
        forced: tokens of the text that ends the thought after `max_tokens`.
        is_open: the prompt has begun the thought.
        max_tokens: most tokens of the thought; None: any number.
    """

    begin: MarkFinder
    end: MarkFinder
    begin_tokens: Mapping[bytes, int]
    forced: Sequence[int]
    is_open: bool
    max_tokens: int | None


class SpanConstraint(Constraint, Generic[S]):
    """A constraint whose state is a place in a text; a place is never changed.

    Args:
        place: where the text begins.
    """

    def __init__(self, place: S) -> None:
        self._place = place
        self._past: deque[tuple[S, Constraint | None]] = deque(maxlen=MAX_ROLLBACK)

    @abstractmethod
    def _step(self, token: int) -> tuple[S, Constraint | None]:
        """The place after a token that is allowed, and the constraint inside this one that has advanced by it."""

    def advance(self, token: int) -> None:
        before = self._place
        self._place, inner = self._step(token)
        self._past.append((before, inner))

    def rollback(self, count: int) -> None:
        if count > len(self._past):
            raise UsageError(f"{count} tokens back.", there_is=f"{len(self._past)} tokens that can be undone")
        for _ in range(count):
            self._place, inner = self._past.pop()
            if inner is not None:
                inner.rollback(1)


class _Tagged(NamedTuple):
    """A place in a text with structural tags.

    Args:
        tail: the end of the free text, in which a trigger may have begun.
        part: the grammar of the tag around the place; None: the text is free.
    """

    tail: bytes = b""
    part: GrammarConstraint | None = None


class StructuralTagConstraint(SpanConstraint[_Tagged]):
    """Free text, in which a trigger begins a part that belongs to a grammar; after it, the text is free again.

    A token that completes a trigger and goes on with more than white space is not allowed: the grammar would not see
    what follows.

    Args:
        triggers: of the tags.
        grammars: of the tags, at their initial states.
        facts: of the model.
    """

    def __init__(self, triggers: MarkFinder, grammars: Sequence[GrammarConstraint], facts: ModelFacts) -> None:
        super().__init__(_Tagged())
        self._triggers, self._grammars, self._facts = triggers, grammars, facts

    @property
    def ended(self) -> bool:
        return self._place.part is not None and self._place.part.ended

    @property
    def complete(self) -> bool:
        return self._place.part is None or self._place.part.complete

    def mask(self) -> Mask | None:
        part = self._place.part
        if part is not None and not part.complete:
            return part.mask()
        forbidden = self._triggers.running_over(self._place.tail)
        return mask_without(forbidden, self._facts.words) if forbidden else None

    def is_allowed(self, token: int) -> bool:
        part = self._place.part
        if part is not None and not part.complete:
            return part.is_allowed(token)
        return not self.ended and token not in self._triggers.running_over(self._place.tail)

    def _step(self, token: int) -> tuple[_Tagged, Constraint | None]:
        tail, part = self._place
        is_end = part is not None and part.complete and token in self._facts.end_ids
        if part is not None and not is_end and part.is_allowed(token):
            part.advance(token)
            return self._place, part
        text = tail + self._facts.tokens.bytes_of(token)
        found = self._triggers.find(text)
        if found is None:
            return _Tagged(self._triggers.tail(text)), None
        return _Tagged(b"", self._grammars[found[0]].copy()), None

    def copy(self) -> StructuralTagConstraint:
        found = StructuralTagConstraint(self._triggers, self._grammars, self._facts)
        part = self._place.part
        found._place = self._place._replace(part=part.copy() if part is not None else None)
        return found


class _Thought(NamedTuple):
    """A place in a text with a thought.

    Args:
        phase: "begin": a thought may begin here; "thought"; "forced": its end is being forced; "answer".
        tail: in "begin", the text so far; in "thought", the end of the text, in which an end mark may have begun.
        inner: the constraint of the answer, as far as it has come; None: the answer is free, or, in "begin", the text
            is none that the constraint allows.
        tokens: number of tokens so far, those of an answer excepted.
        inside: number of tokens of the thought after the mark that begins it; in "forced", of the forced text so far.
    """

    phase: str
    tail: bytes
    inner: Constraint | None
    tokens: int = 0
    inside: int = 0


class ReasoningConstraint(SpanConstraint[_Thought]):
    """A thought, then an answer, which may have a constraint of its own. It counts the tokens of the thought, and ends
    it if it has a limit.

    If the answer has a constraint, tokens that complete the mark of the end and go on with more than white space are
    not allowed; and if an empty answer does not satisfy it, no token that ends the text is allowed in the thought.

    Where a thought may begin, the text may be one that the constraint allows, or the mark as the tokenizer writes it.

    Args:
        marks: around the thought, the limit, and what is forced.
        facts: of the model.
        answer: the constraint of the answer, at its initial state; None: it is free.
    """

    def __init__(self, marks: ThoughtMarks, facts: ModelFacts, answer: Constraint | None) -> None:
        super().__init__(_Thought("begin", b"", answer.copy() if answer is not None and not marks.is_open else None))
        self._marks, self._facts, self._answer = marks, facts, answer
        self._bans_end = answer is not None and not answer.complete
        if marks.is_open:
            self._place = self._think(b"", 0, 0)

    @property
    def ended(self) -> bool:
        return self._place.inner is not None and self._place.inner.ended

    @property
    def complete(self) -> bool:
        inner = self._place.inner if self._place.phase == "answer" else self._answer
        return inner is None or inner.complete

    @property
    def reasoning_tokens(self) -> int:
        return 0 if self._place.phase == "begin" else self._place.tokens

    @property
    def can_begin_thought(self) -> bool:
        return self._place.phase == "begin"

    def is_free(self, count: int) -> bool:
        phase, _, inner, _, inside = self._place
        if phase == "answer":
            return inner is None or inner.is_free(count)
        limit = self._marks.max_tokens
        return self._answer is None and phase != "forced" and (limit is None or inside + count <= limit)

    def mask(self) -> Mask | None:
        phase, tail, inner, _, inside = self._place
        words = self._facts.words
        if phase == "answer":
            return inner.mask() if inner is not None else None
        if phase == "forced":
            return mask_of([self._marks.forced[inside]], words)
        if self._answer is None:
            return None
        if phase == "thought":
            forbidden = self._forbidden(tail)
            return mask_without(forbidden, words) if forbidden else None
        allowed = inner.mask() if inner is not None else mask_of([], words)
        following = self._marks.begin_tokens.get(tail)
        return allowed if allowed is None or following is None else mask_of([following], words, allowed)

    def is_allowed(self, token: int) -> bool:
        phase, tail, inner, _, inside = self._place
        if phase == "answer":
            return inner is None or inner.is_allowed(token)
        if phase == "forced":
            return token == self._marks.forced[inside]
        if self._answer is None:
            return True
        if phase == "thought":
            return token not in self._forbidden(tail)
        return token == self._marks.begin_tokens.get(tail) or (inner is not None and inner.is_allowed(token))

    def _forbidden(self, tail: bytes) -> frozenset[int]:
        """Tokens that may not come in a thought before a constraint."""
        return self._marks.end.running_over(tail) | (self._facts.end_ids if self._bans_end else frozenset())

    def _step(self, token: int) -> tuple[_Thought, Constraint | None]:
        phase, tail, inner, count, inside = self._place
        if phase == "answer":
            if inner is not None:
                inner.advance(token)
            return self._place, inner
        if phase == "forced":
            is_over = inside + 1 == len(self._marks.forced)
            return _Thought("answer" if is_over else "forced", b"", inner, count + 1, inside + 1), None
        text = tail + self._facts.tokens.bytes_of(token)
        if phase == "thought":
            return self._think(text, count + 1, inside + 1), None
        begun = text.lstrip(SPACE)
        found = self._marks.begin.find(begun)
        if found is not None and found[1] == 0:
            return self._think(found[2], count + 1, 0), None
        may_begin = self._marks.begin.can_begin(begun)
        if inner is not None and inner.is_allowed(token):
            inner.advance(token)
        else:
            inner = None
        place = _Thought("begin", text, inner, count + 1) if may_begin else _Thought("answer", b"", inner)
        return place, inner

    def _think(self, text: bytes, count: int, inside: int) -> _Thought:
        """The place in, or after, a thought whose end is this text."""
        if self._marks.end.find(text) is not None:
            return _Thought("answer", b"", self._answer, count)
        limit = self._marks.max_tokens
        if limit is not None and inside >= limit and not is_inside_character(text):
            return _Thought("forced", b"", self._answer, count)
        return _Thought("thought", self._marks.end.tail(text), self._answer, count, inside)

    def copy(self) -> ReasoningConstraint:
        answer, inner = self._answer.copy() if self._answer is not None else None, self._place.inner
        found = ReasoningConstraint(self._marks, self._facts, answer)
        if inner is not None:
            inner = answer if inner is self._answer else inner.copy()
        found._place, found._bans_end = self._place._replace(inner=inner), self._bans_end
        return found
