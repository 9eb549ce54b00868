"""From a conversation in OpenAI's form to a `GenerateCall`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from inferplane.serving.admission import GenerateCall
from inferplane.serving.chat.request import ChatRequest, NamedTool, Tool
from inferplane.serving.chat.tools import ToolPlan, describe_tools
from inferplane.serving.chat_template.fields import TemplateVariables, list_unread_keys
from inferplane.serving.chat_template.template import ChatTemplate, render_conversation
from inferplane.serving.constraints import fields as constraints
from inferplane.serving.constraints.schemas import arguments_schema, relax
from inferplane.serving.errors import invalid

if TYPE_CHECKING:
    from inferplane.serving.model import ServedModel

WORDS = {**constraints.WORDS, "prompt": "messages", "logprobs": "top_logprobs"}


def plan_tools(request: ChatRequest) -> ToolPlan:
    """Return what the tools of a request mean; raise ApiError 400 if `tool_choice` names a missing tool, or the
    arguments of one are no object.
    """
    tools, dropped = {}, set[str]()
    for function in (t.function for t in request.tools or ()):
        schema = arguments_schema(function.name, function.parameters)
        tools[function.name] = schema if function.strict else relax(schema, dropped)
    parallel = request.parallel_tool_calls is not False
    choice = request.tool_choice
    if isinstance(choice, NamedTool):
        if choice.function.name not in tools:
            raise invalid(f"tool_choice names {choice.function.name!r}, which is none of the tools.", "tool_choice")
        return ToolPlan("named", tools, choice.function.name, parallel, tuple(sorted(dropped)))
    if not tools and choice == "required":
        raise invalid("tool_choice is 'required', and there are no tools.", "tool_choice")
    if not tools or choice == "none":
        return ToolPlan()
    if choice == "required":
        return ToolPlan("required", tools, "", parallel, tuple(sorted(dropped)))
    return ToolPlan("auto", tools, parallel=parallel)


async def build_call(request: ChatRequest, model: ServedModel, plan: ToolPlan) -> GenerateCall:
    """Return the call that a request makes.

    Raises:
        ApiError: fields contradict each other, or the model's template refuses the conversation.
    """
    sampling = request.sampling_fields()
    if request.top_logprobs and not request.logprobs:
        raise invalid("top_logprobs needs logprobs = true.", "top_logprobs")
    if request.logprobs:
        sampling["logprobs"] = request.top_logprobs or 0
    words = {**WORDS, "max_tokens": "max_completion_tokens" if request.max_completion_tokens else "max_tokens"}
    constraint, ignored = request.constraint()
    sampling.update(constraint)
    if plan.mode in ("required", "named"):
        found = next((name for name in ("json_schema", "regex", "grammar") if name in sampling), None)
        if found is not None:
            name = WORDS.get(found, found)
            raise invalid(f"{name} and a tool_choice that demands a call exclude each other.", name)
        sampling["json_schema"], words["json_schema"] = plan.schema(), "tools"
        ignored = [f"tools.{keyword}" for keyword in plan.not_enforced]
    async with model.use_template(request.chat_template) as template:
        facts = template.facts if template is not None else None
        variables = request.template_variables(facts)
        tools = request.tools if plan.mode != "none" else None
        text = await render_messages(request.messages, tools, template, variables)
    return GenerateCall(
        prompts=[text],
        sampling=sampling,
        max_tokens=request.max_completion_tokens or request.max_tokens,
        n=request.n or 1,
        timeout_s=request.timeout,
        special=bool(request.add_special_tokens),
        operation="chat",
        model=request.model or "",
        words=words,
        ignored=[*ignored, *variables.ignored, *list_unread_keys(request.messages, facts)],
    )


async def render_messages(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Tool] | None,
    template: ChatTemplate | None,
    variables: TemplateVariables | None = None,
) -> str:
    """Render a conversation with a template; tools become text if the template does not support them.

    Args:
        messages: of `normalize_messages`.
        tools: of the request.
        template: the model's, or the request's.
        variables: for the template.

    Raises:
        ApiError: the template refuses the conversation in every form that is tried.
    """
    given = [t.given for t in tools or ()]
    needs_description = given and template is not None and not template.facts.supports_tools
    description = describe_tools(given) if needs_description else ""
    variables = variables or TemplateVariables({})
    text = await render_conversation(template, variables.mark_last(messages), given, description, variables.values)
    return variables.truncate_at_mark(text)
