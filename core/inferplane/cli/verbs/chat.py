"""Hold a conversation with a model in the checkpoint's own chat template.

At a terminal /help lists commands, Ctrl-C only stops a reply, and Ctrl-D leaves. Otherwise each line of standard input
is one message.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any, cast

from inferplane.cli.arguments import PROGRAM, Parser, add_examples, add_generating, add_model, as_text, suggest
from inferplane.cli.screen import Screen
from inferplane.cli.signals import Interrupt
from inferplane.errors import InferplaneError, UsageError

if TYPE_CHECKING:
    from inferplane.engine import LLM, Delta, SamplingParams, Timings
    from inferplane.engine.request.text import Tokenizer

MAX_TOKENS = 512
COMMANDS = {
    "/help": "this list",
    "/think": "on, off, or N: think for at most N tokens",
    "/reset": "forget the conversation",
    "/exit": "leave; so does Ctrl-D",
}
ALIASES = {"/bye": "/exit", "/quit": "/exit", "/clear": "/reset", "/?": "/help"}
"""Commands of other programs."""
PROMPT = "> "


def add_arguments(parser: Parser) -> None:
    """Options of `chat`."""
    parser.usage = f"{parser.prog} [MODEL] [options]"
    add_model(parser)
    parser.add_argument("--system", metavar="TEXT", help="the system prompt, before the first message")
    words = "a file with a Jinja template in place of the checkpoint's chat template"
    parser.add_argument("--chat-template", metavar="FILE", help=words)
    add_generating(parser, max_tokens=MAX_TOKENS)
    add_examples(parser, "path/to/model --device {X} --system 'Be brief.'")


def run(args: argparse.Namespace, screen: Screen) -> int:
    """Load the model, then answer messages until the input ends."""
    from inferplane.cli.model_loading import open_model
    from inferplane.dialogue.template_files import read_template

    template = None if args.chat_template is None else read_template(args.chat_template)
    terminal = sys.stdin.isatty()
    llm, params = open_model(args, screen)
    with llm, Interrupt(patient=terminal) as interrupt:
        conversation = Conversation(llm, params, args, interrupt, template)
        plain = template is None and is_completion_template(llm.tokenizer)
        if terminal:
            screen.print_remark(f"{args.model} on {llm.device}; /help lists commands, Ctrl-D leaves")
        if plain:
            screen.note(
                f"{args.model} is a completion model, not a chat model: its template only joins the turns, and it "
                f"continues them as text. `{PROGRAM} generate` is made for it"
            )
        _answer_messages(conversation, screen, terminal=terminal)
    return 0


class Conversation:
    """The messages so far, and the model that answers them.

    Args:
        llm: the model.
        params: sampling parameters.
        args: the command's options.
        interrupt: stops a reply on Ctrl-C.
        template: source of a chat template in place of the checkpoint's; None: the checkpoint's.
    """

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        args: argparse.Namespace,
        interrupt: Interrupt,
        template: str | None = None,
    ) -> None:
        self._template = template
        self.llm, self.params, self._max_tokens = llm, params, args.max_tokens
        self.interrupt = interrupt
        self.drawn_seed = params.seed if args.seed is None else None
        self.thinking: dict[str, Any] = {}
        self._system = [{"role": "system", "content": args.system}] if args.system else []
        self.reset()

    def reset(self) -> None:
        """Forget all but the system prompt."""
        self.messages = [*self._system]

    def reply(self, words: str, screen: Screen) -> tuple[Timings | None, str | None]:
        """Stream the reply to `words`; both become part of the conversation, also if Ctrl-C stops the reply.

        Raises:
            InferplaneError: the message cannot be answered; the conversation stays as it was.
        """
        self.messages.append({"role": "user", "content": as_text(words)})
        try:
            message, timings, reason = self._stream(screen)
        except BaseException:
            self.messages.pop()
            raise
        self.messages.append(message)
        return timings, reason

    def set_thinking(self, words: str) -> str:
        """Turn the model's thought on or off, or limit its tokens; returns what holds from now on.

        Raises:
            UsageError: these are no such words, or the model's template cannot do that.
        """
        from inferplane.engine.clients.chat_options import find_switches

        if words not in ("on", "off") and not words.isdecimal():
            found = f"{words!r} is none" if words else "there is none"
            what = f"/think needs on, off or a number of tokens: {found}."
            raise UsageError(what, remedy="/think off, or /think 200")
        plan = self.llm.plan_chat([{"role": "user", "content": "word"}], self.params, chat_template=self._template)
        does_think = plan.form.reasoning is not None
        is_switch = words in ("on", "off")
        has_switch = is_switch and bool(find_switches(self.llm.tokenizer.template(self._template)))
        if not does_think and not has_switch:
            if words == "off":
                return "this model is not known to think: there is nothing to turn off"
            raise UsageError(f"/think {words}: this model is not known to think.", remedy="go on without /think")
        if is_switch and not has_switch:
            what = f"/think {words}: the model's chat template cannot turn the thought on or off."
            raise UsageError(what, remedy="/think N limits it to N tokens")
        self.thinking = {"thinking": words == "on"} if is_switch else {"thinking_token_budget": int(words)}
        return f"the model thinks for at most {words} tokens" if words.isdecimal() else f"thinking is {words}"

    def _stream(self, screen: Screen) -> tuple[dict[str, Any], Timings | None, str | None]:
        from inferplane.cli.sampling_defaults import limit_max_tokens
        from inferplane.engine.clients.chat import ChatReader

        plan = self.llm.plan_chat(self.messages, self.params, chat_template=self._template, **self.thinking)
        params = limit_max_tokens(plan.params, self._max_tokens, len(plan.prompt), self.llm.runner.max_model_len)
        text, thought, timings, reason = "", "", None, None
        reader, replies = ChatReader(plan), cast("Generator[Delta]", self.llm.stream(plan.prompt, params))
        # Closing the stream frees the blocks of a stopped reply.
        with self.interrupt.at_second(), closing(replies) as stream:
            for delta in stream:
                piece = reader.read(delta)
                if piece.reasoning:
                    screen.stream(piece.reasoning, style="dim")
                if piece.text and thought and not text:
                    screen.stream("\n\n")
                text, thought = text + piece.text, thought + piece.reasoning
                timings, reason = delta.timings, delta.finish_reason
                screen.stream(piece.text)
                if self.interrupt.seen and reason is None:
                    rest = reader.end()
                    text, thought = text + rest.text, thought + rest.reasoning
                    break
        message = {"role": "assistant", "content": text}
        return {**message, "reasoning_content": thought} if thought else message, timings, reason


def _answer_messages(conversation: Conversation, screen: Screen, *, terminal: bool) -> None:
    read = _reader(terminal, screen)
    while True:
        try:
            with conversation.interrupt.at_once():
                line = read()
        except EOFError:
            if terminal:
                screen.stream("\n")
            return
        except KeyboardInterrupt:
            if not terminal:
                raise
            screen.stream("\n")
            screen.print_remark("/exit or Ctrl-D leaves")
            continue
        try:
            if line.startswith("/"):
                if not _command(line.strip(), conversation, screen):
                    return
            elif line.strip():
                _answer_message(line.strip(), conversation, screen)
        except InferplaneError as error:
            if not terminal:
                raise
            screen.error(error)
        except KeyboardInterrupt:
            if not terminal:
                raise
            screen.stream("\n")
            screen.print_remark("stopped")


def _answer_message(words: str, conversation: Conversation, screen: Screen) -> None:
    from inferplane.cli.model_loading import summary_line

    timings, reason = conversation.reply(words, screen)
    screen.stream("\n")
    if timings is None:
        screen.print_remark("stopped")
    else:
        screen.print_remark(summary_line(timings, conversation.llm.device, reason, conversation.drawn_seed))


def _command(words: str, conversation: Conversation, screen: Screen) -> bool:
    """Run a command; False for the one that leaves.

    Raises:
        UsageError: there is no such command.
    """
    words = ALIASES.get(words, words)
    name, _, rest = words.partition(" ")
    if words == "/exit":
        return False
    if name == "/think":
        screen.print_remark(conversation.set_thinking(rest.strip()))
        return True
    if words == "/reset":
        conversation.reset()
        screen.print_remark("the conversation begins anew")
    elif words == "/help":
        for name, meaning in COMMANDS.items():
            screen.print_remark(f"{name:<8} {meaning}")
        screen.print_remark("Ctrl-C   stop the reply")
        screen.print_remark("a line that begins with a space is sent even if a / follows")
    else:
        remedy = suggest(words, COMMANDS, "begin the line with a space to send it as it is")
        raise UsageError(f"There is no command {words!r}.", there_is=", ".join(COMMANDS), remedy=remedy)
    return True


def is_completion_template(tokenizer: Tokenizer) -> bool:
    """Whether the chat template renders user and model messages alike: then the model is made for completion.

    Raises:
        UsageError: there is no chat template.
    """
    mine = tokenizer.chat([{"role": "user", "content": "word"}])
    try:
        return mine == tokenizer.chat([{"role": "assistant", "content": "word"}])
    except UsageError:  # a template may refuse a conversation that starts with the model
        return False


def _reader(terminal: bool, screen: Screen) -> Callable[[], str]:
    """Make a function that reads one line and raises EOFError at the end."""
    if not terminal:
        return _next_line
    shown, prompt = sys.stdout.isatty(), PROMPT
    if shown:
        with suppress(ImportError):
            import readline  # noqa: F401 - gives input() line editing and history
    else:
        prompt = ""  # a file gets only the text of the model

    def ask() -> str:
        if not shown:
            screen.err.print(PROMPT, end="")
        return input(prompt)

    return ask


def _next_line() -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.removesuffix("\n")
