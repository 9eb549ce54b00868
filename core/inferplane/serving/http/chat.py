"""OpenAI's chat completions: from a conversation to a `GenerateCall`, from pieces to an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from inferplane.serving.admission import GenerateCall
from inferplane.serving.chat_template.fields import TemplateVariables, list_unread_keys
from inferplane.serving.chat_template.template import render_conversation
from inferplane.serving.errors import invalid
from inferplane.serving.generation import Generation, Piece
from inferplane.serving.http import constraints
from inferplane.serving.http.chat_wire import ChatRequest, NamedTool, Tool
from inferplane.serving.http.schemas import arguments_schema, relax
from inferplane.serving.http.tools import Call, ToolPlan, ToolReader, describe_tools, new_call_id
from inferplane.serving.rendering import GeneratedChoice, OpenAIRendering, finite_logprob

if TYPE_CHECKING:
    from inferplane.engine.request.results import TokenLogprob
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
    template = model.template.facts if model.template is not None else None
    variables = request.template_variables(template)
    tools = request.tools if plan.mode != "none" else None
    text = await render_messages(request.messages, tools, model, variables)
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
        ignored=[*ignored, *variables.ignored, *list_unread_keys(request.messages, template)],
    )


async def render_messages(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Tool] | None,
    model: ServedModel,
    variables: TemplateVariables | None = None,
) -> str:
    """Render a conversation with the model's template; tools become text if the template does not support them.

    Args:
        messages: of `normalize_messages`.
        tools: of the request.
        model: has the template.
        variables: for the template.

    Raises:
        ApiError: the template refuses the conversation in every form that is tried.
    """
    given = [t.given for t in tools or ()]
    needs_description = given and model.template is not None and not model.template.facts.supports_tools
    description = describe_tools(given) if needs_description else ""
    variables = variables or TemplateVariables({})
    text = await render_conversation(model, variables.mark_last(messages), given, description, variables.values)
    return variables.truncate_at_mark(text)


class ChatRendering(OpenAIRendering):
    """The answer to one `ChatRequest`.

    Args:
        request: the request.
        plan: what its tools mean.
        model: spells tokens.
        name: the model's name for the client.
        request_id: the answer's id.
    """

    def __init__(self, request: ChatRequest, plan: ToolPlan, model: ServedModel, name: str, request_id: str) -> None:
        super().__init__(request, model, name, f"chatcmpl-{request_id}", "chat.completion.chunk")
        self._request, self._plan = request, plan
        self._readers: dict[int, ToolReader] = {}
        self._named: set[int] = set()

    # -- a stream

    def opening(self, generation: Generation) -> bytes:
        chunks = []
        for i in range(generation.num_choices):
            self.count_so_far(generation, i)
            chunks.append(self._chunk(i, {"role": "assistant", "content": ""}))
        return b"".join(chunks)

    def piece(self, generation: Generation, piece: Piece) -> bytes:
        delta, index = piece.delta, piece.choice
        self.count_so_far(generation, index, len(delta.token_ids))
        reader = self._readers.setdefault(index, ToolReader(self._plan))
        content = reader.feed(delta.text)
        out = []
        if self._plan.mode == "named":
            out.append(self._arguments(index, delta.text))
        logprobs = self._logprobs(delta.logprobs)
        ids = delta.token_ids if self._request.return_token_ids else None
        if content and ids is None and logprobs is None and not self._includes_usage_so_far:
            out.append(self._frames.encode(index, content, lambda text: self._chunk(index, {"content": text})))
        elif content or ids or (logprobs and logprobs["content"]):
            out.append(self._chunk(index, {"content": content} if content else {}, logprobs, ids=ids))
        if delta.finish_reason is not None:
            out.append(self._end(index, reader, delta.finish_reason))
        return b"".join(out)

    def _arguments(self, index: int, text: str) -> bytes:
        """Return a piece of the arguments of the one requested call."""
        if index not in self._named:
            self._named.add(index)
            return self._chunk(index, {"tool_calls": [_format_streamed(0, Call(self._plan.named, text))]})
        if not text:
            return b""
        return self._chunk(index, {"tool_calls": [{"index": 0, "function": {"arguments": text}}]})

    def _end(self, index: int, reader: ToolReader, reason: str) -> bytes:
        rest, calls = reader.end()
        out = []
        if rest and self._plan.mode != "named":
            out.append(self._chunk(index, {"content": rest}))
        for i, call in enumerate(calls):
            out.append(self._chunk(index, {"tool_calls": [_format_streamed(i, call)]}))
        called = bool(calls) or self._plan.mode == "named"
        out.append(self._chunk(index, {}, reason=_reason(reason, called)))
        return b"".join(out)

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: Any = None, *, reason: str | None = None, ids: Any = None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        if ids is not None:
            choice["token_ids"] = ids
        return self.chunk(choice)

    # -- without a stream

    def full_response(self, generation: Generation, choices: Sequence[GeneratedChoice]) -> dict[str, Any]:
        found = [self._choice(i, choice) for i, choice in enumerate(choices)]
        return {**self._head, "object": "chat.completion", "choices": found, "usage": self.usage(generation)}

    def _choice(self, index: int, choice: GeneratedChoice) -> dict[str, Any]:
        reader = ToolReader(self._plan)
        content = reader.feed(choice.text)
        rest, calls = reader.end()
        if self._plan.mode == "named":
            calls, rest = [Call(self._plan.named, rest)], ""
        message: dict[str, Any] = {"role": "assistant", "content": content + rest, "refusal": None}
        if calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = [_full(call) for call in calls]
        shown: dict[str, Any] = {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": _reason(choice.finish_reason, bool(calls)),
        }
        if self._request.return_token_ids:
            shown["token_ids"] = choice.token_ids
        return shown

    # -- log-probabilities

    def _logprobs(self, tokens: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
        if not self._request.logprobs:
            return None
        shown = []
        for t in tokens or ():
            top = [self._token(i, p) for i, p in t.top]
            shown.append({**self._token(t.token_id, t.logprob), "top_logprobs": top})
        return {"content": shown}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        spelled = self._model.token_text
        if spelled is None:
            return {"token": str(token), "logprob": finite_logprob(logprob), "bytes": None}
        name, raw = spelled.name_of(token), list(spelled.bytes_of(token))
        return {"token": name, "logprob": finite_logprob(logprob), "bytes": raw}


def _full(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": new_call_id(), "type": "function", "function": function}


def _format_streamed(index: int, call: Call) -> dict[str, Any]:
    return {"index": index, **_full(call)}


def _reason(reason: str | None, called: bool) -> str | None:
    return "tool_calls" if called and reason == "stop" else reason
