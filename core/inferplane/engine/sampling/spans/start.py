"""Makes the constraint of a sequence: of its answer or the tags in it, and of the thought before it."""

from __future__ import annotations

from collections.abc import Sequence

from inferplane.engine.request.constraint import Constraint
from inferplane.engine.request.fields import ReasoningSpan, StructuralTag
from inferplane.engine.request.params import SamplingParams
from inferplane.engine.sampling.grammars import Grammars
from inferplane.engine.sampling.spans.constraints import (
    ModelFacts,
    ReasoningConstraint,
    StructuralTagConstraint,
    ThoughtMarks,
)
from inferplane.engine.sampling.spans.marks import MarkFinder
from inferplane.errors import UsageError


def start_constraint(params: SamplingParams, facts: ModelFacts, grammars: Grammars | None) -> Constraint | None:
    """The initial state of what constrains a sequence's text, or counts its thought; None without either.

    Args:
        params: of the request.
        facts: of the model.
        grammars: of the model; None where `params.needs_grammar` is false.

    Raises:
        UsageError: a grammar is not valid, not supported, or too complex; the tokenizer cannot write a mark.
    """
    answer: Constraint | None = None
    if grammars is not None:
        tags: Sequence[StructuralTag] = params.structural_tags
        answer = _start_tags(tags, facts, grammars) if tags else grammars.start(params)
    if params.reasoning is None:
        return answer
    return ReasoningConstraint(_make_marks(params.reasoning, facts, answer), facts, answer)


def _start_tags(tags: Sequence[StructuralTag], facts: ModelFacts, grammars: Grammars) -> StructuralTagConstraint:
    started = []
    for tag in tags:
        name = f"SamplingParams: structural_tags: the grammar after {tag.trigger!r}"
        started.append(grammars.start_grammar("grammar", tag.grammar, name))
    triggers = MarkFinder([tag.trigger for tag in tags], facts.tokens, may_run_over=False)
    return StructuralTagConstraint(triggers, started, facts)


def _make_marks(span: ReasoningSpan, facts: ModelFacts, answer: Constraint | None) -> ThoughtMarks:
    """The marks of a span. Only what has to be written, or may have to be, needs a tokenizer that can write it."""
    tokens = facts.tokens
    forced = _encode(span.forced_end, facts) if span.max_tokens is not None else []
    if span.max_tokens is not None and not forced:
        raise _not_writable("forced_end", span.forced_end)
    begin_tokens: dict[bytes, int] = {}
    if answer is not None and not span.is_open:
        for mark in span.begin:
            text = b""
            for token in _encode(mark, facts):
                begin_tokens.setdefault(text, token)
                text += tokens.bytes_of(token)
        if not begin_tokens:
            raise _not_writable("begin", span.begin[0])
    begin = MarkFinder(span.begin, tokens, may_run_over=True)
    end = MarkFinder(span.end, tokens, may_run_over=answer is None)
    return ThoughtMarks(begin, end, begin_tokens, forced, span.is_open, span.max_tokens)


def _encode(text: str, facts: ModelFacts) -> list[int]:
    """The tokens that write a text, up to white space before it; none if the tokenizer cannot write it."""
    ids = list(facts.tokens.encode(text))
    written = b"".join(map(facts.tokens.bytes_of, ids))
    return ids if written.lstrip() == text.encode().lstrip() else []


def _not_writable(name: str, mark: str) -> UsageError:
    return UsageError(
        f"SamplingParams: reasoning: the model's tokenizer cannot write {name} = {mark!r}.",
        remedy="use marks that the model itself writes, as its chat template has them",
    )
