"""The rules of calls while they are generated: once they have begun, or from the beginning if they are demanded.

They are in the form of the model's family, or in generic JSON where that is not known or its grammar is too long.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inferplane.dialogue.replies.forms import ReplyForm, ToolForm
from inferplane.dialogue.replies.grammar import make_call_grammar
from inferplane.engine.request.fields import MAX_GRAMMAR_BYTES, StructuralTag
from inferplane.serving.chat.tools import ToolPlan
from inferplane.serving.errors import TOO_COMPLEX, invalid

JSON_OPTIONS = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,40}"}
"""White space in arguments; without a limit some models write it for ever."""


def tag_calls(form: ReplyForm, plan: ToolPlan, special_tokens: Mapping[str, int]) -> tuple[StructuralTag, ...]:
    """Return the rule that a call follows once its mark is written: it is one of a tool that there is, with arguments
    that fit. There is none for a form without a mark, and none that cannot be written.

    Args:
        form: how the model writes calls.
        plan: the tools of mode "auto".
        special_tokens: text -> id, of the tokenizer's special tokens.

    Raises:
        ApiError: 400, a function is strict, and the rule cannot be written.
    """
    own = form.tools[0] if form.tools else None
    if own is None or not own.trigger:
        return ()
    grammar = _make_grammar(own, plan, special_tokens, is_triggered=True)
    if not grammar and plan.is_strict:
        message = (
            "tools: Strict functions cannot be enforced: no rule in the model's form fits their schemas in 64 KiB."
        )
        raise invalid(message, "tools", TOO_COMPLEX)
    return (StructuralTag(own.trigger, grammar),) if grammar else ()


def list_unenforced(form: ReplyForm, plan: ToolPlan) -> list[str]:
    """Return what has no effect of tools of mode "auto" whose calls follow no rule.

    Args:
        form: how the model writes calls.
        plan: the tools.
    """
    if plan.is_strict:
        return ["tools.strict"]
    return ["tools.parameters"] if form.tools and form.tools[0].trigger else []


def demand_calls(form: ReplyForm, plan: ToolPlan, special_tokens: Mapping[str, int]) -> dict[str, Any] | None:
    """Return the constraint of demanded calls in the form of the family, as a field of `SamplingParams`; None if they
    have to be in generic JSON, or are the text of a custom tool.

    Args:
        form: how the model writes calls.
        plan: the tools of mode "required" or "named".
        special_tokens: text -> id, of the tokenizer's special tokens.
    """
    own = form.tools[0] if form.tools else None
    if own is None or not own.template_marks:
        return None
    if plan.named in plan.custom and not (form.uses_channels and plan.custom[plan.named] is None):
        return None  # a text without a header is no call in channels
    grammar = _make_grammar(own, plan, special_tokens, is_triggered=False)
    return {"grammar": grammar} if grammar else None


def _make_grammar(form: ToolForm, plan: ToolPlan, special_tokens: Mapping[str, int], is_triggered: bool) -> str:
    """Return the grammar of calls; "" if it is too long, or the form cannot hold the calls to their schemas."""
    options: Any = {"max_calls": plan.max_calls, "is_triggered": is_triggered, "json_options": JSON_OPTIONS}
    options.update(max_bytes=MAX_GRAMMAR_BYTES["grammar"], unenforced=(unenforced := set[str]()))
    grammar = make_call_grammar(form, plan.tools, special_tokens, **options)
    return "" if plan.is_strict and unenforced else grammar
