"""What a request says of the model's thought: whether it thinks, how long, and what of the thought is answered.

The names are those of other servers: `include_reasoning`, `thinking_token_budget` (vLLM), `separate_reasoning`
(SGLang), `thinking_budget` (Qwen), `reasoning_max_tokens` (FastDeploy), `thinking` (Anthropic, DeepSeek, GLM).

Sources: https://docs.vllm.ai "Reasoning Outputs", https://docs.sglang.ai "Separate Reasoning",
https://www.alibabacloud.com/help/en/model-studio/deep-thinking, https://paddlepaddle.github.io/FastDeploy "Reasoning
Output", https://docs.anthropic.com "Extended thinking".
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from inferplane.dialogue.replies.forms import ReplyForm
from inferplane.engine.clients import chat
from inferplane.engine.request.fields import ReasoningSpan
from inferplane.serving.chat_template.fields import TemplateFields, Thinking
from inferplane.serving.errors import invalid
from inferplane.serving.wire import MAX_TOKENS

Budget = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
BUDGETS = ("thinking_token_budget", "thinking_budget", "reasoning_max_tokens")
"""Fields with one meaning: most tokens of the thought."""


class ThinkingFields(TemplateFields):
    """What is done with the thought."""

    include_reasoning: bool | None = Field(None, description="False: leave the thought out of the answer.")
    separate_reasoning: bool | None = Field(None, description="False: the thought is part of the content.")
    thinking_token_budget: Budget | None = Field(None, description="Most tokens of the thought; then it is ended.")
    thinking_budget: Budget | None = Field(None, description="As thinking_token_budget.")
    reasoning_max_tokens: Budget | None = Field(None, description="As thinking_token_budget.")

    def budget(self) -> tuple[int | None, str]:
        """Return the most tokens of the thought, None for no limit, and the field that says so.

        Raises:
            ApiError: 400, fields contradict each other.
        """
        given = {name: value for name in BUDGETS if (value := getattr(self, name)) is not None}
        if isinstance(self.thinking, Thinking) and self.thinking.budget_tokens is not None:
            given["thinking"] = self.thinking.budget_tokens
        if len(set(given.values())) > 1:
            raise invalid(f"{' and '.join(given)} mean the same, and differ; pass one.", list(given)[1])
        return next(((value, name) for name, value in given.items()), (None, BUDGETS[0]))


def make_span(
    form: ReplyForm, is_open: bool, budget: tuple[int | None, str], *, is_constrained: bool, has_calls: bool
) -> ReasoningSpan | None:
    """Return the thought's limits for the engine; None if the model is not known to think.

    Args:
        form: how the model writes.
        is_open: the prompt has begun the thought.
        budget: most tokens of it, and the field that says so.
        is_constrained: a constraint of the answer follows the thought.
        has_calls: calls in the model's own form may follow it.

    Raises:
        ApiError: 400, there is a budget, and no form of thoughts.
    """
    most, name = budget
    if form.reasoning is None and most is not None:
        message = f"{name}: This model is not known to think; the server's setting reasoning_parser names a form."
        raise invalid(message, name, "unsupported")
    return chat.make_span(form, is_open, most, is_constrained=is_constrained, has_calls=has_calls)


def list_visible_tokens(form: ReplyForm, has_calls: bool = False) -> tuple[str, ...]:
    """Return the special tokens that stay in the text: those of calls only where there may be calls."""
    if has_calls or form.uses_channels:
        return form.visible_tokens
    return (*form.reasoning.marks, *form.more_tokens) if form.reasoning is not None else form.more_tokens
