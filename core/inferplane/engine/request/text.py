"""Between text and tokens: the checkpoint's tokenizer, incremental decoding, stop strings."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

from inferplane.dialogue.template import Template
from inferplane.engine.request.fields import ReasoningSpan
from inferplane.engine.request.tokenizer_loading import load_tokenizer, no_vocabulary
from inferplane.errors import CapacityError, CheckpointError, UsageError, warn
from inferplane.files import AGAIN, file_size
from inferplane.hub.repository import has_vocabulary

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""What decoders write for bytes that are no character, or not yet."""
MAX_FILE_BYTES = 64 * 2**20
"""Maximum size of a tokenizer's file: twice the largest published one."""
_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
"""Names that transformers opens. They must be regular files, since reading a pipe would never end."""
PIECE_CHARACTERS = 2**14
"""Fewest characters of a text that are encoded at a time to find out whether it is too long. A step takes a few
milliseconds, and most texts that are much too long are so after one."""
TOKENS_PER_PIECE = 32
"""A piece has at least as many characters as so many of the longest token: it counts for less, by one of these."""
CHARACTERS_PER_TOKEN = 4
"""A text of at most this many characters per token of the limit is encoded at once: the limit allows that cost."""
CONTEXT_TOKENS = 6
"""Tokens of the prompt that generated ones are decoded with: enough to complete a character and to know of a space."""
CHARACTER_BYTES = 4
"""Maximum bytes of a character in UTF-8."""
MAX_HELD_CHARACTERS = 4 * CHARACTER_BYTES
"""Maximum number of replacement characters that are held back; of more, all but the last few become text."""
WINDOW_TOKENS, MIN_WINDOW_TOKENS = 32, 16
"""A window of more than `WINDOW_TOKENS` tokens is shortened to its last `MIN_WINDOW_TOKENS`."""
Part = Literal["begin", "thought", "answer"]
"""What of a text a token belongs to: what may yet begin a thought, the thought with its marks, or the answer."""


class Tokenizer:
    """A checkpoint's tokenizer and chat template, through transformers. Code inside a checkpoint is never run.

    Args:
        folder: holds `tokenizer.json` or what transformers needs instead; None: of a model given as a config.
        kind: `kind` of the folder's tokenizer in a process that has loaded it; "": transformers finds out.
        max_tokens: most tokens of a text, of which no more is encoded than it takes to know that it has more; None: no
            limit.

    `kind` is the class that transformers chose, with its module: another process can load the same tokenizer by it,
    without torch.

    Raises:
        UsageError: there is no folder.
        CheckpointError: there is no tokenizer that transformers can load without running the checkpoint's code.
    """

    def __init__(self, folder: str | Path | None, kind: str = "", max_tokens: int | None = None) -> None:
        if folder is None:
            raise UsageError("A model given as a config has no tokenizer.", remedy="pass prompts as token ids")
        folder = Path(folder)
        for name in _FILES:
            if os.path.lexists(folder / name) and file_size(folder / name) > MAX_FILE_BYTES:
                raise CheckpointError(f"{folder / name} has more than {MAX_FILE_BYTES} bytes.", remedy=AGAIN)
        if not has_vocabulary(folder):
            raise no_vocabulary(folder.name, folder, remedy="add its tokenizer.json, or pass prompts as token ids")
        try:
            self._inner, self.kind = load_tokenizer(folder, kind)
        except BaseException as error:  # a panic in the tokenizers library is no Exception
            if isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit)):
                raise
            raise CheckpointError(
                f"{folder} holds no tokenizer that can be loaded ({type(error).__name__}: {error}).",
                remedy="add its tokenizer.json, or pass prompts as token ids",
            ) from error
        self._inner.model_max_length = sys.maxsize  # admission says what is too long; transformers would warn on stderr
        self.folder, self.max_tokens = folder, max_tokens
        self.model_name = ""
        """What the user calls the model, for errors; "": they name the folder."""
        self._other_template: Template | None = None  # the last one that a caller brought

    def encode(self, text: str, *, special: bool = True, is_prompt: bool = True) -> list[int]:
        """Token ids of a text, with `special` between the model's special tokens; one that is no prompt has any length.

        Raises:
            UsageError: the text holds half a surrogate pair, which no encoding has.
            CapacityError: it certainly has more than `max_tokens` tokens. A text with a few more is encoded all the
                same: callers check lengths themselves.
        """
        try:
            limit = self.max_tokens if is_prompt else None
            if limit is not None and len(text) > max(PIECE_CHARACTERS, CHARACTERS_PER_TOKEN * limit):
                self._check_length(text, limit)
            return list(self._inner.encode(text, add_special_tokens=special))
        except TypeError as error:
            raise UsageError(f"The text cannot be encoded: {text[:80]!a}.", remedy="pass valid Unicode") from error

    def _check_length(self, text: str, max_tokens: int) -> None:
        """Raise CapacityError if a text has more than so many tokens; encodes it piece by piece until that is known.

        A cut may split a token, and move the borders of those beside it: each piece counts for less, by as many tokens
        as the longest token has characters.
        """
        at, count, size = 0, 0, max(PIECE_CHARACTERS, TOKENS_PER_PIECE * self._longest_token)
        while at < len(text) and count <= max_tokens:
            end = at + size
            space = text.rfind(" ", at + size // 2, end)
            end = space if space > 0 and end < len(text) else end  # words stay whole where there are any
            piece = self._inner.encode(text[at:end], add_special_tokens=False)
            count += max(0, len(piece) - self._longest_token)
            at = end
        if count > max_tokens:
            raise CapacityError(
                f"The prompt of {len(text)} characters has more than {max_tokens} tokens, the most of a sequence.",
                remedy="shorten the prompt",
            )

    @cached_property
    def _longest_token(self) -> int:
        """Most characters of a token, as the vocabulary spells it; that are no less than it has in a text."""
        return max(map(len, self._vocabulary), default=1)

    def decode(self, ids: Sequence[int], visible: frozenset[int] = frozenset()) -> str:
        """Text of token ids; special tokens are left out, except those that are `visible`, and spaces stay as the
        tokens have them.
        """
        if visible:
            hidden = self._special_ids - visible
            ids = [i for i in ids if i not in hidden]
        options = {"skip_special_tokens": not visible, "clean_up_tokenization_spaces": False}
        return str(self._inner.decode(list(ids), **options, spaces_between_special_tokens=False))

    def find_ids(self, names: Iterable[str]) -> frozenset[int]:
        """Ids of the tokens with these names; names that no token has are left out."""
        vocabulary = self._vocabulary
        return frozenset(vocabulary[name] for name in names if name in vocabulary)

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """Text -> id of the tokens that llguidance takes for special ones: it knows them by their form, too."""
        added = getattr(self._inner, "added_tokens_decoder", {})
        return {t.content: i for i, t in added.items() if t.special or (t.content[:1], t.content[-1:]) == ("<", ">")}

    @cached_property
    def _vocabulary(self) -> dict[str, int]:
        return dict(self._inner.get_vocab())

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        added = getattr(self._inner, "added_tokens_decoder", {})
        return frozenset(self._inner.all_special_ids) | {i for i, token in added.items() if token.special}

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation (`normalize_messages`), rendered by the checkpoint's own chat template, with the
        template's beginning of a reply.

        Raises:
            UsageError: the checkpoint has no chat template, or the template refuses the messages.
            CapacityError: as `encode`.
        """
        return self.encode(self.template().render(messages), special=False)

    def template(self, source: str | None = None) -> Template:
        """The checkpoint's chat template, or another one by its source.

        Raises:
            UsageError: the checkpoint has no chat template.
        """
        if source is not None:
            if self._other_template is None or self._other_template.source != source:
                self._other_template = Template(source, dict(self._inner.special_tokens_map))
            return self._other_template
        if self._template is None:
            raise UsageError(
                f"{self.model_name or self.folder} has no chat template.",
                remedy="pass one (chat_template= in Python, --chat-template FILE of `inferplane chat` and `serve`), or "
                "use generate with a prompt that you format yourself",
            )
        return self._template

    @cached_property
    def _template(self) -> Template | None:
        return Template.from_tokenizer(self._inner)

    @property
    def fast(self) -> Any:
        """transformers' tokenizer itself, of which `Grammars` takes the vocabulary."""
        return self._inner

    @property
    def own_end_ids(self) -> frozenset[int]:
        """The end-of-text token of the tokenizer's own settings; `end_ids` reads the folder's configs."""
        own = self._inner.eos_token_id
        return frozenset() if own is None else frozenset([own])


def end_ids(folder: Path) -> frozenset[int]:
    """Ids of the tokens that end a text, as a folder's generation_config.json and config.json name them (both count);
    empty if neither does. Warns about entries that are no token ids, or beyond the vocabulary, which would never end a
    text, and about a generation_config.json that cannot be read.

    Raises:
        CheckpointError: config.json cannot be read.
    """
    from inferplane.models.reading.json_object import read_object

    found: set[int] = set()
    vocab = None
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        if not os.path.lexists(path):
            continue
        try:
            entries = read_object(path)
        except CheckpointError as error:
            if name == "config.json":
                raise
            warn(f"{error.what} It is not used.")
            continue
        vocab = entries.get("vocab_size") if name == "config.json" else vocab
        value = entries.get("eos_token_id")
        ids = [] if value is None else value if isinstance(value, list) else [value]
        for i in ids:
            if type(i) is not int or i < 0 or (isinstance(vocab, int) and i >= vocab):
                there_is = f" (there are 0 to {vocab - 1})" if isinstance(vocab, int) else ""
                warn(f"{path}: eos_token_id holds {i!r}, which is no token id{there_is}; it ends no text.")
            else:
                found.add(i)
    return frozenset(found)


def _common_prefix_length(a: str, b: str) -> int:
    """How many characters two strings have in common from their beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


class Detokenizer:
    """Text of a growing list of tokens, piece by piece, never splitting a character.

    Some tokens decode differently after others (many tokenizers drop the space before a text's first word), and a
    character may need several tokens; so text is taken from decodings of a window over the last tokens, which begins
    in the prompt, and held back while it ends in replacement characters, which more bytes may yet complete. The window
    moves on and what is held back is bounded, so that a token costs the same after any others.

    Args:
        tokenizer: decodes.
        stop: strings that end the text; text that might begin one is held back. They count in the answer alone, behind
            the white space that follows a thought.
        prompt: the tokens before; only the last few are looked at, and they are no part of the text.
        visible: special tokens that stay in the text.
        span: of the thought, if it says what headers there are: stop strings do not count in these.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        prompt: Sequence[int] = (),
        visible: frozenset[int] = frozenset(),
        span: ReasoningSpan | None = None,
    ) -> None:
        self.stop, self.visible = tuple(stop), visible
        self._span = span if span is not None and span.header_begin else None
        self._text_of = partial(tokenizer.decode, visible=visible) if visible else tokenizer.decode
        first = max(0, len(prompt) - CONTEXT_TOKENS)
        while first and not self._text_of(prompt[first:]):  # special tokens only: a first word would lose its space
            first = max(0, 2 * first - len(prompt))
        for _ in range(3):  # back to where a character of up to four byte tokens begins
            if first and self._text_of(prompt[first:]).startswith(REPLACEMENT):
                first -= 1
        self.ids = list(prompt[first:])
        """The window's."""
        self.text = ""
        self.sent = 0
        self.stopped = False
        self._part: Part = "answer"
        self._answer_start = 0  # of `text`, where stop strings begin to count
        self._searched = 0  # no stop string ends before this
        self._is_after_thought = False  # and behind white space at most
        self._is_in_header = self._is_in_thought = False  # of a part of the answer
        self._seen = self._text_of(self.ids)  # of the window's text, what was taken or is the prompt's

    def push(self, ids: Sequence[int], part: Part = "answer") -> bool:
        """Append new tokens and decode them into `text`; returns whether the text now holds a stop string, before which
        it is then truncated. After that, further tokens are ignored.

        Args:
            ids: the tokens.
            part: what of the text they belong to.
        """
        self._part = part
        for one in ids:  # several at a time could skip the moment in which a character is whole
            if not self.stopped:
                self.ids.append(one)
                self._decode()
                if self.stop:
                    self._find_stop()
        return self.stopped

    def _decode(self, *, end: bool = False) -> None:
        """Decode the window and append the characters that are complete; with `end`, all that was held back too."""
        after = self._text_of(self.ids)
        begin, max_held = len(self._seen), MAX_HELD_CHARACTERS
        if not after.startswith(self._seen):
            begin = _common_prefix_length(self._seen, after)
            rest = len(self._seen[begin:].replace(REPLACEMENT, "?").encode())
            max_held += rest
            if after.startswith(REPLACEMENT * rest, begin):  # decoders may give up a run of bytes for one
                begin += rest
        settled = len(after) if end else len(after.rstrip(REPLACEMENT))
        if len(after) - settled > max_held:
            settled = len(after) - CHARACTER_BYTES
        if settled > begin:
            self.text += after[begin:settled]
            self._seen = after[:settled]
        if len(self.ids) > WINDOW_TOKENS:
            self._shorten_window(after)

    def _shorten_window(self, after: str) -> None:
        """Drop the window's first tokens, if the others decode to the same held-back text and to some text before it.

        Args:
            after: the decoded window.
        """
        held = after[len(self._seen) :] if after.startswith(self._seen) else after
        for count in range(MIN_WINDOW_TOKENS, MIN_WINDOW_TOKENS - CHARACTER_BYTES, -1):  # one begins with a character,
            now = self._text_of(self.ids[-count:])
            if after.endswith(now) and len(now) > len(held):
                break
        else:
            whole = now.lstrip(REPLACEMENT)  # or all of them within one
            if not (after.endswith(whole) and len(whole) > len(held)):
                some = self.ids[:CONTEXT_TOKENS] + self.ids[-CONTEXT_TOKENS:]
                if self._text_of(some) == after:  # the others are special ones, which have no text
                    self.ids = some
                return
        self.ids, self._seen = self.ids[-count:], now[: len(now) - len(held)]

    def _find_stop(self, *, end: bool = False) -> None:
        """If the answer holds a stop string, truncate `text` before the first one and set `stopped`."""
        if self._part == "thought":
            self._answer_start, self._is_after_thought = len(self.text), True
        if self._part == "thought" or (self._part == "begin" and not end):
            return
        if self._is_after_thought:
            self._answer_start = len(self.text) - len(self.text[self._answer_start :].lstrip())
            self._is_after_thought = self._answer_start == len(self.text)
        while self._is_behind_header():
            begins = self._find_all(self._span.header_begin) if self._span is not None else []
            upto = min(begins, default=len(self.text))
            found = [] if self._is_in_thought else self._find_all(self.stop, upto)
            self._searched = upto
            if found:
                self.text, self.stopped = self.text[: min(found)], True
            if found or not begins:
                return
            self._answer_start, self._is_in_header = upto, True

    def _is_behind_header(self) -> bool:
        """Whether the text goes on behind the header at which the search for stop strings is; true without one."""
        if self._span is None or not self._is_in_header:
            return True
        at = self.text.find(self._span.header_end, self._answer_start)
        if at >= 0:
            self._answer_start, self._is_in_header = at + len(self._span.header_end), False
            self._is_in_thought = self.text.endswith(tuple(self._span.begin), 0, self._answer_start)
        return at >= 0

    def _find_all(self, texts: Sequence[str], upto: int | None = None) -> list[int]:
        """Where each text is found first in the answer, as far as it was not searched before."""
        start = max(self._answer_start, self._searched - max(map(len, texts)))
        return [at for at in (self.text.find(one, start, upto) for one in texts) if at >= 0]

    def take(self, *, end: bool = False) -> str:
        """Text that is new since the last call and cannot be part of a stop string, to be sent to the caller. With
        `end`, after the last token, also what was held back.
        """
        if end and not self.stopped:
            self._decode(end=True)
            if self.stop:
                self._find_stop(end=True)
        upto = len(self.text)
        if self.stop and not end and not self.stopped:
            most = upto - self._answer_start
            hold = (n for s in self.stop for n in range(min(len(s) - 1, most), 0, -1) if self.text.endswith(s[:n]))
            upto = self.sent if self._part == "begin" else upto - max(hold, default=0)
        piece, self.sent = self.text[self.sent : upto], max(self.sent, upto)
        return piece
