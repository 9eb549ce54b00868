"""What a request says of the model's thought: whether it thinks, how long, and what of the thought is answered.

The names are those of other servers: `include_reasoning`, `thinking_token_budget` (vLLM), `separate_reasoning`
(SGLang), `thinking_budget` (Qwen), `reasoning_max_tokens` (FastDeploy), `thinking` (Anthropic, DeepSeek, GLM).

Sources: https://docs.vllm.ai "Reasoning Outputs", https://docs.sglang.ai "Separate Reasoning",
https://www.alibabacloud.com/help/en/model-studio/deep-thinking, https://paddlepaddle.github.io/FastDeploy "Reasoning
Output", https://docs.anthropic.com "Extended thinking".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from inferplane.dialogue.replies.forms import ReasoningForm, ReplyForm
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
    form: ReplyForm, is_open: bool, budget: tuple[int | None, str], is_constrained: bool
) -> ReasoningSpan | None:
    """Return the thought's limits for the engine; None if the model is not known to think.

    Args:
        form: how the model writes.
        is_open: the prompt has begun the thought.
        budget: most tokens of it, and the field that says so.
        is_constrained: a constraint follows the thought.

    Raises:
        ApiError: 400, there is a budget, and no form of thoughts.
    """
    reasoning, (most, name) = form.reasoning, budget
    if reasoning is None:
        if most is not None:
            message = f"{name}: This model is not known to think; the server's setting reasoning_parser names a form."
            raise invalid(message, name, "unsupported")
        return None
    end_marks, begin_marks = reasoning.end_marks, reasoning.begin_marks
    if form.uses_channels and is_constrained:  # the answer is in a message of its own, after others
        end_marks, begin_marks, is_open = _answer_headers(reasoning), (), True
    return ReasoningSpan(
        end=end_marks, begin=begin_marks, is_open=is_open, max_tokens=most, forced_end=reasoning.forced_end
    )


def _answer_headers(reasoning: ReasoningForm) -> tuple[str, ...]:
    """The beginnings of gpt-oss's answer, with and without the type of its content."""
    begin = "<|channel|>" + reasoning.answer_begin.rpartition("<|channel|>")[2]
    return begin, begin.replace("<|message|>", " <|constrain|>json<|message|>")


def is_reasoning_over(form: ReplyForm, prompt: str) -> bool:
    """Return whether a rendered conversation has begun the reply with a whole thought, as one that is turned off."""
    text = prompt.rstrip()
    return form.reasoning is not None and any(text.endswith(mark.strip()) for mark in form.reasoning.end_marks)


def is_reasoning_open(form: ReplyForm, prompt: str, messages: Sequence[Mapping[str, Any]], continues: bool) -> bool:
    """Return whether the reply begins inside of a thought.

    Args:
        form: how the model writes.
        prompt: the rendered conversation.
        messages: of the conversation.
        continues: the reply continues the last message, which may be a thought.
    """
    if form.reasoning is None:
        return False
    if not continues:
        return form.reasoning.is_open_after(prompt)
    last = str(messages[-1].get("content") or "")
    begin = max(last.rfind(mark) for mark in form.reasoning.begin_marks)
    return begin >= 0 and begin > max(last.rfind(mark) for mark in form.reasoning.end_marks)
