"""Conversations: from messages to a prompt and its parameters, and from a text to a thought, an answer and calls."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from reprlib import repr as short
from typing import Any

import msgspec

from inferplane.dialogue.continuation import mark_last, truncate_at_mark
from inferplane.dialogue.messages import normalize_messages
from inferplane.dialogue.replies.call_rules import CallRules, demand_calls, make_grammar, read_generic, read_rules
from inferplane.dialogue.replies.calls import BareCall
from inferplane.dialogue.replies.catalog import FORMS, find_form
from inferplane.dialogue.replies.events import Arguments, CallStart, Event, Reasoning
from inferplane.dialogue.replies.forms import ReasoningForm, ReplyForm
from inferplane.dialogue.replies.harmony import CHANNEL, MESSAGE, START
from inferplane.dialogue.replies.opening import is_reasoning_open, is_reasoning_over
from inferplane.dialogue.replies.parser import ReplyParser
from inferplane.dialogue.tools import CallIds, join_calls
from inferplane.engine.clients.chat_options import ChatOptions, template_variables
from inferplane.engine.request.arguments import as_sampling_params, as_sampling_params_list
from inferplane.engine.request.fields import ReasoningSpan, StructuralTag
from inferplane.engine.request.other_engines import advice
from inferplane.engine.request.params import SamplingParams, unknown_keyword
from inferplane.engine.request.results import Delta, Result
from inferplane.engine.request.text import Tokenizer
from inferplane.errors import InferplaneError, UsageError, warn

_ASYNC_OPTIONS = ("index", "priority", "tenant")
"""Arguments of `AsyncLLM.generate` that `AsyncLLM.chat` takes, too."""


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
        rules: the calls that the reply may have.
        reasoning_is_open: the prompt has begun the thought.
        num_earlier_calls: calls in the conversation.
        is_bare: the reply, or what follows its thought, is the arguments of the named function, without marks.
        has_optional_tags: `params` have structural tags without which the reply is better than an error.
    """

    prompt: list[int]
    params: SamplingParams
    form: ReplyForm
    rules: CallRules
    reasoning_is_open: bool = False
    num_earlier_calls: int = 0
    is_bare: bool = False
    has_optional_tags: bool = False

    def without_refused_tags(self, compile: Callable[[SamplingParams], object]) -> ChatPlan:
        """The plan itself; without its optional tags if the engine cannot enforce them, so that `compile` refuses."""
        if self.has_optional_tags:
            try:
                compile(self.params)
            except UsageError:
                return replace(self, params=self.params.without_grammars, has_optional_tags=False)
        return self

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
        rules, form = plan.rules, plan.form
        has_parts = form.reasoning is not None or rules.tools or form.uses_channels
        mode: Any = "none" if plan.is_bare else rules.mode
        options = {"reasoning_is_open": plan.reasoning_is_open, "mode": mode, "max_calls": rules.max_calls}
        self._parser = ReplyParser(form, rules.tools, **options) if has_parts else None
        self._bare = BareCall(rules.named) if plan.is_bare else None
        id_form = plan.form.tools[0].id_form if plan.form.tools else ""
        self._ids = CallIds(id_form, plan.num_earlier_calls)

    def feed(self, text: str) -> ChatDelta:
        """Add text; returns the parts that are certain, as a piece without tokens."""
        if self._parser is None:
            return ChatDelta(text, [])
        events = self._parser.feed(text)
        return self._join(events if self._bare is None else list(self._bare.read(events)))

    def end(self) -> ChatDelta:
        """End the reply; returns the remaining parts."""
        if self._parser is None:
            return ChatDelta("", [])
        events = self._parser.end()
        return self._join(events if self._bare is None else [*self._bare.read(events), *self._bare.end()])

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
        rules, unenforced = read_rules(shown, options.tool_choice)
        mark = uuid.uuid4().hex if options.continue_final_message else ""
        text = template.render(mark_last(conversation, mark), shown, template_variables(template, form, options))
        text = truncate_at_mark(text, mark)
        is_open = is_reasoning_open(form, text, conversation, bool(mark))
        own = None
        if rules.is_forced:
            if params.constraint is not None:
                what = f"SamplingParams({params.constraint[0]}=...) and tool_choice = {short(options.tool_choice)}."
                raise UsageError(what, there_is="one rule for the text", remedy="leave one of them out")
            dropped = set(unenforced)
            if template.supports_tools:  # else JSON is described to the model
                own = demand_calls(form, rules, self.tokenizer.special_tokens, dropped)
            params = replace(params, **(own or rules.constraint()))
            if dropped := dropped if own else set(unenforced):
                warn(f"Keywords of the tools' schemas have no effect on the text: {', '.join(sorted(dropped))}.")
        has_optional_tags = False
        if rules.mode == "auto" and not params.needs_grammar:
            params = _tag_calls(params, form, rules, self.tokenizer.special_tokens)
            has_optional_tags = params.needs_grammar and not rules.is_strict
        is_generic = rules.is_forced and own is None
        if options.thinking_token_budget is not None and form.reasoning is None:
            raise UsageError(
                f"thinking_token_budget = {options.thinking_token_budget}: this model is not known to think.",
                there_is=f"a chat template without the marks of a thought; replies are read as {form.name!r}",
                remedy="pass SamplingParams(reasoning=...) with the marks that it writes",
            )
        if is_generic:
            form, is_open = read_generic(form, is_open)
        if not (params.needs_grammar and is_reasoning_over(form, text)) and params.reasoning is None:
            is_constrained = bool(params.constraint) and own is None
            has_calls = bool(own) or rules.mode == "auto"
            budget = options.thinking_token_budget
            span = make_span(form, is_open, budget, is_constrained=is_constrained, has_calls=has_calls)
            params = replace(params, reasoning=span)
        visible = form.visible_tokens if rules.tools or form.uses_channels else _marks_of(form)
        params = replace(params, visible_tokens=tuple(dict.fromkeys((*params.visible_tokens, *visible))))
        num_calls = sum(len(message.get("tool_calls") or ()) for message in conversation)
        ids = self.tokenizer.encode(text, special=False)
        is_bare = is_generic and rules.mode == "named"
        return ChatPlan(ids, params, form, rules, is_open, num_calls, is_bare, has_optional_tags)


def _tag_calls(
    params: SamplingParams, form: ReplyForm, rules: CallRules, special_tokens: Mapping[str, int]
) -> SamplingParams:
    """Parameters with the rule that a call follows once its mark is written: it is one of a tool that there is, with
    arguments that fit. There is none for a form without a mark, and none that cannot be written.

    Raises:
        UsageError: a function is strict, and the rule cannot be written.
    """
    own = form.tools[0] if form.tools else None
    if own is None or not own.trigger or find_spec("llguidance") is None:
        return params
    grammar = make_grammar(own, rules, special_tokens, is_triggered=True)
    if not grammar and rules.is_strict:
        raise UsageError(
            "Strict functions cannot be enforced: no rule in the model's form fits their schemas in 64 KiB.",
            remedy="leave strict out, or shorten the schemas",
        )
    return replace(params, structural_tags=(StructuralTag(own.trigger, grammar),)) if grammar else params


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
    tried = [plan.params, plan.params.without_grammars] if plan.has_optional_tags else [plan.params]
    for i, one in enumerate(tried, 1):
        begun = False
        try:
            async with aclosing(llm.generate(plan.prompt, one, request_id, **options)) as pieces:
                async for piece in pieces:
                    begun = True
                    yield reader.read(piece)
            return
        except UsageError:
            if begun or i == len(tried):
                raise
