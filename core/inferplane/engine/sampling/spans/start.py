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
    tokens = facts.tokens
    begins = [_encode(mark, facts) for mark in span.begin]
    forced = _encode(span.forced_end, facts)
    if not any(mark.encode() in b"".join(map(tokens.bytes_of, forced)) for mark in span.end):
        raise _not_writable("forced_end", span.forced_end)
    if begins and not any(begins):
        raise _not_writable("begin", span.begin[0])
    begin_tokens: dict[bytes, int] = {}
    for ids in begins:
        text = b""
        for token in ids:
            begin_tokens.setdefault(text, token)
            text += tokens.bytes_of(token)
    return ThoughtMarks(
        MarkFinder(span.begin, tokens, may_run_over=True),
        MarkFinder(span.end, tokens, may_run_over=answer is None),
        begin_tokens,
        forced,
        span.is_open,
        span.max_tokens,
    )


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
