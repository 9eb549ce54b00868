"""The rules of calls while they are generated, as requests ask for them: `inferplane.dialogue.replies.call_rules`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inferplane.dialogue.replies import call_rules
from inferplane.dialogue.replies.forms import ReplyForm
from inferplane.engine.request.fields import StructuralTag
from inferplane.serving.chat.tools import ToolPlan
from inferplane.serving.errors import TOO_COMPLEX, invalid


def tag_calls(
    form: ReplyForm, plan: ToolPlan, special_tokens: Mapping[str, int], unenforced: set[str] | None = None
) -> tuple[StructuralTag, ...]:
    """Return the rule that a call follows once its mark is written: it is one of a tool that there is, with arguments
    that fit. There is none for a form without a mark, and none that cannot be written.

    Args:
        form: how the model writes calls.
        plan: the tools of mode "auto".
        special_tokens: text -> id, of the tokenizer's special tokens.
        unenforced: gets the keywords of schemas that have no effect.

    Raises:
        ApiError: 400, a function is strict, and the rule cannot be written.
    """
    own = form.tools[0] if form.tools else None
    if own is None or not own.trigger:
        return ()
    grammar = call_rules.make_grammar(own, plan, special_tokens, unenforced, is_triggered=True)
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


def demand_calls(
    form: ReplyForm, plan: ToolPlan, special_tokens: Mapping[str, int], unenforced: set[str] | None = None
) -> dict[str, Any] | None:
    """Return the constraint of demanded calls in the form of the family, as a field of `SamplingParams`; None if they
    have to be in generic JSON, or are the text of a custom tool. Arguments as of `tag_calls`.
    """
    if plan.named in plan.custom and not (form.uses_channels and plan.custom[plan.named] is None):
        return None  # a text without a header is no call in channels
    return call_rules.demand_calls(form, plan, special_tokens, unenforced)
