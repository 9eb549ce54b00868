"""Conversations: from messages to a prompt and its parameters, and from a text to a thought, an answer and calls."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, fields, replace
from reprlib import repr as short
from typing import Any

import msgspec

from inferplane.dialogue.continuation import mark_last, truncate_at_mark
from inferplane.dialogue.messages import normalize_messages
from inferplane.dialogue.replies.catalog import FORMS, find_form
from inferplane.dialogue.replies.events import Arguments, CallStart, Event, Reasoning
from inferplane.dialogue.replies.forms import ReasoningForm, ReplyForm
from inferplane.dialogue.replies.harmony import CHANNEL, MESSAGE, START
from inferplane.dialogue.replies.opening import is_reasoning_open, is_reasoning_over
from inferplane.dialogue.replies.parser import ReplyParser
from inferplane.dialogue.tools import CallIds, join_calls
from inferplane.engine.clients.chat_options import ChatOptions, template_variables
from inferplane.engine.request.arguments import as_sampling_params, as_sampling_params_list
from inferplane.engine.request.fields import ReasoningSpan
from inferplane.engine.request.other_engines import advice
from inferplane.engine.request.params import SamplingParams, unknown_keyword
from inferplane.engine.request.results import Delta, Result
from inferplane.engine.request.text import Tokenizer
from inferplane.errors import InferplaneError, UsageError

_ASYNC_OPTIONS = ("index", "priority", "tenant")
"""Arguments of `AsyncLLM.generate` that `AsyncLLM.chat` takes, too."""
_TOOL_FORM = '{"type": "function", "function": {"name": ..., "parameters": {...}}}'


class ChatDelta(Delta, frozen=True, array_like=True):
    """A piece of a reply: `text` is of the answer alone, `reasoning` of the thought. `tool_calls` are pieces of calls
    in the form of OpenAI's streams: the first of a call has its id and the name, all have its index and a piece of its
    arguments.
    """

    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = msgspec.field(default_factory=list)


@dataclass(frozen=True)
class ChatResult(Result):
    """What `chat` returns for one conversation: a `Result` whose text is the answer alone.

    Args:
        reasoning: the thought before the answer.
        tool_calls: calls in OpenAI's form: `{"id": ..., "type": "function", "function": {"name": ..., "arguments":
            "{...}"}}`.
    """

    reasoning: str = ""
    tool_calls: tuple[dict[str, Any], ...] = ()

    @property
    def message(self) -> dict[str, Any]:
        """The reply as a message, to be added to the conversation."""
        found: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            found["reasoning_content"] = self.reasoning
        if self.tool_calls:
            found["tool_calls"] = list(self.tool_calls)
        return found


@dataclass(frozen=True)
class ChatPlan:
    """A conversation, ready to be generated from.

    Args:
        prompt: token ids.
        params: how to sample.
        form: how the model writes thoughts and calls.
        tools: name -> JSON schema of the parameters, of the functions that may be called.
        reasoning_is_open: the prompt has begun the thought.
        num_earlier_calls: calls in the conversation.
    """

    prompt: list[int]
    params: SamplingParams
    form: ReplyForm
    tools: Mapping[str, Mapping[str, Any]]
    reasoning_is_open: bool = False
    num_earlier_calls: int = 0

    def finish(self, result: Result) -> ChatResult:
        """The result of the conversation from that of its prompt."""
        reader = ChatReader(self)
        parts = [reader.feed(result.text), reader.end()]
        calls = join_calls(call for part in parts for call in part.tool_calls)
        given = {field.name: getattr(result, field.name) for field in fields(Result)}
        given["text"] = "".join(part.text for part in parts)
        if len(result.samples) > 1:
            given["samples"] = tuple(self.finish(replace(sample, samples=())) for sample in result.samples)
        reasoning = "".join(part.reasoning for part in parts)
        return ChatResult(**given, reasoning=reasoning, tool_calls=tuple(calls))


class ChatReader:
    """Tells the parts of one reply apart, as it comes.

    Args:
        plan: of its conversation.
    """

    def __init__(self, plan: ChatPlan) -> None:
        self._plan = plan
        has_parts = plan.form.reasoning is not None or plan.tools or plan.form.uses_channels
        mode: Any = "auto" if plan.tools else "none"
        options = {"reasoning_is_open": plan.reasoning_is_open, "mode": mode}
        self._parser = ReplyParser(plan.form, plan.tools, **options) if has_parts else None
        id_form = plan.form.tools[0].id_form if plan.form.tools else ""
        self._ids = CallIds(id_form, plan.num_earlier_calls)

    def feed(self, text: str) -> ChatDelta:
        """Add text; returns the parts that are certain, as a piece without tokens."""
        return ChatDelta(text, []) if self._parser is None else self._join(self._parser.feed(text))

    def end(self) -> ChatDelta:
        """End the reply; returns the remaining parts."""
        return ChatDelta("", []) if self._parser is None else self._join(self._parser.end())

    def read(self, piece: Delta) -> ChatDelta:
        """A piece of the stream, with its text separated; the last one has all that remains."""
        found = self.feed(piece.text)
        given = {name: getattr(piece, name) for name in Delta.__struct_fields__}
        given.update(text=found.text, reasoning=found.reasoning, tool_calls=found.tool_calls)
        if piece.finish_reason is not None:
            rest = self.end()
            given["text"] += rest.text
            given["reasoning"] += rest.reasoning
            given["tool_calls"] = [*found.tool_calls, *rest.tool_calls]
        return ChatDelta(**given)

    def _join(self, events: Sequence[Event]) -> ChatDelta:
        text, reasoning, calls = "", "", list[dict[str, Any]]()
        for event in events:
            if isinstance(event, Reasoning):
                reasoning += event.text
            elif isinstance(event, CallStart):
                own = self._ids.choose(event.id, event.name, event.index)
                function = {"name": event.name, "arguments": ""}
                calls.append({"index": event.index, "id": own, "type": "function", "function": function})
            elif isinstance(event, Arguments):
                calls.append({"index": event.index, "function": {"arguments": event.text}})
            else:
                text += event.text
        return ChatDelta(text, [], reasoning=reasoning, tool_calls=calls)


@dataclass(frozen=True)
class ChatModel:
    """What a conversation needs of a model.

    Args:
        tokenizer: its tokenizer, with the chat template.
        model_type: of its config.
        forms: forms of replies that plugins have registered.
    """

    tokenizer: Tokenizer
    model_type: str = ""
    forms: Sequence[ReplyForm] = ()

    def plan(self, messages: Any, params: Any, options: ChatOptions) -> ChatPlan:
        """The prompt and the parameters of a conversation.

        Raises:
            UsageError: there is no chat template, or it refuses the messages, or these are not valid; an option has no
                effect on this model.
        """
        params = as_sampling_params(params)
        if are_conversations(messages):
            what = f"messages = a list of conversations ({len(messages)})."
            raise UsageError(what, there_is="one conversation", remedy="pass one; LLM.chat takes several at once")
        conversation = normalize_messages(messages)
        template = self.tokenizer.template(options.chat_template)
        form = find_form(template.all_sources, self.model_type, (*self.forms, *FORMS))
        shown = list(options.tools or ()) if options.tool_choice != "none" else []
        tools = _read_tools(shown)
        mark = uuid.uuid4().hex if options.continue_final_message else ""
        text = template.render(mark_last(conversation, mark), shown, template_variables(template, form, options))
        text = truncate_at_mark(text, mark)
        is_open = is_reasoning_open(form, text, conversation, bool(mark))
        if not (params.needs_grammar and is_reasoning_over(form, text)) and params.reasoning is None:
            budget, is_constrained = options.thinking_token_budget, bool(params.constraint)
            span = make_span(form, is_open, budget, is_constrained=is_constrained, has_calls=bool(tools))
            params = replace(params, reasoning=span)
        if options.thinking_token_budget is not None and form.reasoning is None:
            raise UsageError(
                f"thinking_token_budget = {options.thinking_token_budget}: this model is not known to think.",
                there_is=f"a chat template without the marks of a thought; replies are read as {form.name!r}",
                remedy="pass SamplingParams(reasoning=...) with the marks that it writes",
            )
        visible = form.visible_tokens if tools or form.uses_channels else _marks_of(form)
        params = replace(params, visible_tokens=tuple(dict.fromkeys((*params.visible_tokens, *visible))))
        num_calls = sum(len(message.get("tool_calls") or ()) for message in conversation)
        ids = self.tokenizer.encode(text, special=False)
        return ChatPlan(ids, params, form, tools, is_open, num_calls)


def make_span(
    form: ReplyForm,
    is_open: bool,
    max_tokens: int | None = None,
    *,
    is_constrained: bool = False,
    has_calls: bool = False,
) -> ReasoningSpan | None:
    """The marks of a model's thought for the engine; None if it is not known to think.

    Args:
        form: how the model writes.
        is_open: the prompt has begun the thought.
        max_tokens: most tokens of it; None: any number.
        is_constrained: a constraint of the answer follows the thought.
        has_calls: calls in the model's own form may follow it.
    """
    reasoning = form.reasoning
    if reasoning is None:
        return None
    end_marks, begin_marks, forced_end = reasoning.end_marks, reasoning.begin_marks, reasoning.forced_end
    if form.uses_channels and is_constrained:  # the answer is in a message of its own, after others
        end_marks, begin_marks = _answer_headers(reasoning), ()
        if max_tokens == 0 and not is_open:  # no message has begun that could be ended
            forced_end = end_marks[0]
        is_open = True
    elif form.uses_channels and has_calls:  # which are in messages of their own, that begin with their headers
        forced_end = reasoning.end
    return ReasoningSpan(
        end=end_marks,
        begin=begin_marks,
        is_open=is_open,
        max_tokens=max_tokens,
        forced_end=forced_end,
        header_begin=(START, CHANNEL) if form.uses_channels else (),
        header_end=MESSAGE if form.uses_channels else "",
    )


def _answer_headers(reasoning: ReasoningForm) -> tuple[str, ...]:
    """The beginnings of gpt-oss's answer, with and without the type of its content."""
    begin = "<|channel|>" + reasoning.answer_begin.rpartition("<|channel|>")[2]
    return begin, begin.replace("<|message|>", " <|constrain|>json<|message|>")


def _marks_of(form: ReplyForm) -> tuple[str, ...]:
    return (*form.reasoning.marks, *form.more_tokens) if form.reasoning is not None else form.more_tokens


def _read_tools(tools: Sequence[Any]) -> dict[str, Mapping[str, Any]]:
    """Name -> JSON schema of the parameters; UsageError for what is no function in OpenAI's form."""
    found: dict[str, Mapping[str, Any]] = {}
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
            raise UsageError(f"tools[{i}] = {short(tool)}.", there_is=f"functions as {_TOOL_FORM}")
        schema = function.get("parameters")
        if schema is not None and not isinstance(schema, Mapping):
            raise UsageError(f"tools[{i}].function.parameters = {short(schema)}.", there_is="JSON schemas as mappings")
        found[name] = schema or {}
    return found


def plan_each(plan: Callable[[Any, SamplingParams], ChatPlan], messages: Any, params: Any) -> list[ChatPlan]:
    """Plans of one conversation or several.

    Args:
        plan: of one conversation with its parameters.
        messages: a conversation, or a list of them.
        params: one for all, or one per conversation.

    Raises:
        InferplaneError: that of `plan`, with the number of its conversation if there is a list of them.
    """
    several = are_conversations(messages)
    conversations = messages if several else [messages]
    each, plans = as_sampling_params_list(params, len(conversations), "conversation"), list[ChatPlan]()
    for i, (one, chosen) in enumerate(zip(conversations, each), 1):
        try:
            plans.append(plan(one, chosen))
        except InferplaneError as error:
            if several:
                error.add_subject(f"Conversation {i} of {len(conversations)}")
            raise
    return plans


def are_conversations(messages: Any) -> bool:
    """Whether messages are a list of conversations, and not one."""
    return isinstance(messages, Sequence) and bool(messages) and isinstance(messages[0], (list, tuple))


async def stream_reply(
    llm: Any, messages: Any, params: SamplingParams | None = None, request_id: Any = None, **options: Any
) -> AsyncIterator[ChatDelta]:
    """The reply to a conversation, which the checkpoint's own chat template turns into a prompt.

    Args:
        llm: the `AsyncLLM`.
        messages: as for `LLM.chat`.
        params: how to sample.
        request_id: for `abort`; unique among live requests. None: one of its own.
        options: those of `LLM.chat`, and the other arguments of `AsyncLLM.generate`.

    Raises:
        UsageError: no chat template, or it refuses the messages, or these are not valid. Otherwise as `generate`.
    """
    own = {field.name: options.pop(field.name) for field in fields(ChatOptions) if field.name in options}
    for name, value in options.items():
        if name not in _ASYNC_OPTIONS:
            known = [
                "messages",
                "params",
                "request_id",
                *_ASYNC_OPTIONS,
                *(field.name for field in fields(ChatOptions)),
            ]
            raise unknown_keyword("AsyncLLM.chat", name, value, known, advice(name))
    chosen, info = ChatOptions(**own), llm.info

    def make_plan() -> ChatPlan:
        return ChatModel(llm.tokenizer, info.model_type, info.reply_forms).plan(messages, params, chosen)

    plan = await asyncio.to_thread(make_plan)
    reader = ChatReader(plan)
    async with aclosing(llm.generate(plan.prompt, plan.params, request_id, **options)) as pieces:
        async for piece in pieces:
            yield reader.read(piece)
