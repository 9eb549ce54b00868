"""Makes the conversations of a load: random texts, shared prefixes, or a file in ShareGPT's form or as JSON lines."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import msgspec

from inferplane.cli.verbs.bench.length_distribution import Lengths
from inferplane.cli.verbs.bench.serve.prompts import TextSource
from inferplane.cli.verbs.bench.serve.records import LoadConversation, LoadRequest, Prompt
from inferplane.errors import UsageError

RANDOM = "random"
MAX_PROMPT_TOKENS, MAX_ENTRY_TOKENS = 1024, 2048
"""Limits of the entries of a ShareGPT file that are used: of the prompt, and of the prompt with the recorded answer.
`vllm bench serve` and the source system's benchmark have the same."""
USERS, ASSISTANTS = ("human", "user"), ("gpt", "assistant", "chatgpt", "bing", "bard", "model")
MAX_TOKENS, MAX_THINK_S = 2**31, 1e9
"""Limits of what a file may ask for."""
FORM = '{"prompt": TEXT or token ids, "output_len": 64}, {"messages": [...]} or {"conversation": [...]}, one a line'


@dataclass(frozen=True)
class DatasetOptions:
    """What a dataset is made of.

    Args:
        path: of a file; None: random texts.
        inputs: tokens of random prompts, without a shared prefix.
        outputs: tokens to generate; None: as the file says, else 128.
        prefix_groups: number of prefixes that random prompts share.
        prefix_tokens: tokens of each prefix.
        conversation: requests of a random conversation.
        whole_conversations: play every message of a file's conversations, not the first alone.
        think: mean seconds before each further request of a conversation (exponential); 0: none.
    """

    path: Path | None
    inputs: Lengths
    outputs: Lengths | None
    prefix_groups: int = 0
    prefix_tokens: int = 0
    conversation: Lengths = Lengths("fixed", 1, 1)
    whole_conversations: bool = False
    think: float = 0.0


DEFAULT_OUTPUTS = Lengths("fixed", 128, 128)


class Dataset:
    """An endless sequence of conversations, of which levels of a sweep take one after the other.

    Equal options and seeds give equal conversations. A file begins again when all its entries are used: `repeats`.

    Args:
        options: what it is made of.
        texts: makes and counts texts.
        seed: of its order and its lengths.
        enough: most conversations of a ShareGPT file that are needed; None: all of it.

    Raises:
        UsageError: the file cannot be read, or holds no entry that can be used.
    """

    def __init__(self, options: DatasetOptions, texts: TextSource, seed: int, enough: int | None = None) -> None:
        self._options, self._texts, self._enough = options, texts, enough
        self._source = random.Random(f"dataset {seed}")
        self.left_out = 0
        self.repeats = 0
        self.entries: list[LoadConversation] = []
        if options.path is not None:
            self.entries = self._read(options.path)
        self._conversations = self._repeat() if options.path is not None else self._make_random()

    @property
    def has_token_ids(self) -> bool:
        """Whether a prompt is token ids."""
        return any(not isinstance(one.prompt, str) for each in self.entries for one in each.requests)

    def take(self) -> LoadConversation:
        """Return the next conversation."""
        return next(self._conversations)

    def _repeat(self) -> Iterator[LoadConversation]:
        for self.repeats in count():
            yield from self.entries

    def _make_random(self) -> Iterator[LoadConversation]:
        options, source = self._options, self._source
        prefixes = [self._texts.make(options.prefix_tokens) + " " for _ in range(options.prefix_groups)]
        outputs = options.outputs or DEFAULT_OUTPUTS
        while True:
            prefix = source.choice(prefixes) if prefixes else ""
            requests = []
            for number in range(options.conversation.draw(source)):
                text = (prefix if number == 0 else "") + self._texts.make(options.inputs.draw(source))
                think = self._think(number)
                requests.append(LoadRequest(_user(text), output_tokens=outputs.draw(source), think_s=think))
            if len(requests) == 1:
                requests = [replace(requests[0], messages=(), prompt=requests[0].messages[0]["content"])]
            yield LoadConversation(requests)

    def _think(self, number: int) -> float:
        mean = self._options.think
        return self._source.expovariate(1 / mean) if mean and number else 0.0

    # -- files

    def _read(self, path: Path) -> list[LoadConversation]:
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            words = error.strerror if isinstance(error, OSError) else error
            raise UsageError(f"Dataset {path} cannot be read: {words}.", remedy="pass a file of UTF-8 text") from error
        if not text.strip():
            raise UsageError(f"Dataset {path} is empty.", remedy=FORM)
        found = self._read_sharegpt(path, text) if text.lstrip().startswith("[") else self._read_lines(path, text)
        if not found:
            raise UsageError(
                f"Dataset {path} holds no conversation that can be used ({self.left_out} left out).",
                there_is=f"prompts of at most {MAX_PROMPT_TOKENS} tokens, of {MAX_ENTRY_TOKENS} with their answers",
            )
        return found

    def _read_sharegpt(self, path: Path, text: str) -> list[LoadConversation]:
        """Read a list of conversations, or the source system's filtered list of `[prompt, tokens in, tokens out]`."""
        try:
            entries = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UsageError(
                f"Dataset {path} is no list in JSON: {error}.", remedy="see docs/cli.md, bench serve"
            ) from error
        found: list[LoadConversation] = []
        numbered = list(enumerate(entries))
        self._source.shuffle(numbered)
        for number, entry in numbered:
            if self._enough is not None and len(found) >= self._enough:
                break  # counting the tokens of a large file takes minutes
            _check_sendable(f"{path}: entry {number}", entry)
            if isinstance(entry, list) and len(entry) == 3 and isinstance(entry[0], str):
                outputs = self._options.outputs
                if type(entry[2]) is not int or entry[2] > MAX_TOKENS:
                    raise UsageError(
                        f"{path}: entry {number} has {entry[2]!r} for its tokens out.",
                        there_is=f"whole numbers to {MAX_TOKENS}",
                    )
                tokens = outputs.draw(self._source) if outputs else max(1, entry[2])
                found.append(LoadConversation([LoadRequest(prompt=entry[0], output_tokens=tokens)]))
                continue
            recorded = entry.get("conversations", entry.get("messages")) if isinstance(entry, dict) else None
            if not isinstance(recorded, list):
                raise UsageError(
                    f"{path}: entry {number} has no conversations.",
                    remedy='a list of {"conversations": [{"from": "human", "value": TEXT}, {"from": "gpt", ...}]}',
                )
            requests = self._exchanges([_speech(path, number, one) for one in recorded])
            if requests:
                found.append(LoadConversation(requests))
            else:
                self.left_out += 1
        return found

    def _exchanges(self, recorded: Sequence[tuple[str, str]]) -> list[LoadRequest]:
        """The requests of a recorded conversation; none if it cannot be used."""
        requests: list[LoadRequest] = []
        messages: list[dict[str, str]] = []
        tokens = 0
        for (role, text), (next_role, answer) in pairwise(recorded):
            if role in USERS or role == "system":
                messages.append({"role": "system" if role == "system" else "user", "content": text})
            if role not in USERS or next_role not in ASSISTANTS:
                continue
            prompt_tokens, answer_tokens = self._texts.count(text), self._texts.count(answer)
            tokens += prompt_tokens + answer_tokens
            if prompt_tokens > MAX_PROMPT_TOKENS or tokens > MAX_ENTRY_TOKENS or min(prompt_tokens, answer_tokens) < 2:
                break
            outputs = self._options.outputs
            output = outputs.draw(self._source) if outputs else answer_tokens
            requests.append(LoadRequest(tuple(messages), output_tokens=output, think_s=self._think(len(requests))))
            messages = []
            if not self._options.whole_conversations:
                break
        return requests

    def _read_lines(self, path: Path, text: str) -> list[LoadConversation]:
        found = []
        for number, line in enumerate(text.splitlines(), 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            if path.suffix not in (".jsonl", ".json") and not line.lstrip().startswith("{"):
                found.append(LoadConversation([self._request(where, {"prompt": line})]))
                continue
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UsageError(f"{where} is not JSON: {error}.", remedy=FORM) from error
            if not isinstance(entry, dict):
                raise UsageError(f"{where} is no object.", remedy=FORM)
            _check_sendable(where, entry)
            found.append(LoadConversation(self._line(where, entry)))
        return found

    def _line(self, where: str, entry: Mapping[str, Any]) -> list[LoadRequest]:
        parts = entry.get("conversation")
        if parts is not None:
            if not (isinstance(parts, list) and parts and all(isinstance(part, dict) for part in parts)):
                raise UsageError(f"{where}: conversation is no list of objects.", remedy=FORM)
            return [self._part(where, part, number) for number, part in enumerate(parts)]
        request = self._request(where, entry)
        if not (self._options.whole_conversations and request.messages):
            return [request]
        # The server's answers take the place of the recorded ones.
        requests: list[LoadRequest] = []
        messages: list[Mapping[str, Any]] = []
        for message in request.messages:
            if message["role"] != "assistant":
                messages.append(message)
            if message["role"] == "user":
                think = self._think(len(requests))
                requests.append(replace(request, messages=tuple(messages), think_s=think))
                messages = []
        return requests or [request]

    def _part(self, where: str, part: Mapping[str, Any], number: int) -> LoadRequest:
        request = self._request(where, part)
        think = part.get("think_s", self._think(number))
        if isinstance(think, bool) or not isinstance(think, (int, float)) or not 0 <= think <= MAX_THINK_S:
            raise UsageError(f"{where}: think_s = {think!r}.", there_is=f"seconds from 0 to {MAX_THINK_S:g}")
        if not request.messages:
            if not isinstance(request.prompt, str):
                raise UsageError(f"{where}: a conversation has token ids.", remedy="write its prompts as texts")
            request = replace(request, messages=_user(request.prompt), prompt="")
        return replace(request, think_s=float(think) if number else 0.0)

    def _request(self, where: str, entry: Mapping[str, Any]) -> LoadRequest:
        prompt: Prompt = entry.get("prompt", "")
        messages = entry.get("messages", ())
        is_listed = isinstance(prompt, list) and all(type(token) is int for token in prompt)
        if not (isinstance(prompt, str) or is_listed) or not (prompt or messages):
            raise UsageError(
                f"{where} has no prompt that is text or a list of token ids, and no messages.", remedy=FORM
            )
        if messages and not (
            isinstance(messages, list)
            and all(isinstance(one, dict) and isinstance(one.get("role"), str) and "content" in one for one in messages)
        ):
            raise UsageError(f"{where}: messages are no list of objects with role and content.", remedy=FORM)
        outputs = self._options.outputs
        tokens = next((entry[name] for name in ("output_len", "max_tokens", "output_tokens") if name in entry), None)
        if tokens is None or outputs is not None:
            tokens = (outputs or DEFAULT_OUTPUTS).draw(self._source)
        if type(tokens) is not int or not 1 <= tokens <= MAX_TOKENS:
            raise UsageError(f"{where}: output_len = {tokens!r}.", there_is=f"whole numbers from 1 to {MAX_TOKENS}")
        return LoadRequest(tuple(messages), "" if messages else prompt, tokens)


def _check_sendable(where: str, entry: object) -> None:
    """Refuse what JSON's reader takes and no request can carry, as half of a surrogate pair."""
    try:
        msgspec.json.encode(entry)
    except (ValueError, RecursionError, OverflowError) as error:
        raise UsageError(f"{where} cannot be sent: {error}.", remedy="correct it, or remove it") from error


def _user(text: str) -> tuple[Mapping[str, Any], ...]:
    return ({"role": "user", "content": text},)


def _speech(path: Path, number: int, recorded: Any) -> tuple[str, str]:
    role = recorded.get("from", recorded.get("role")) if isinstance(recorded, dict) else None
    text = recorded.get("value", recorded.get("content")) if isinstance(recorded, dict) else None
    if not (isinstance(role, str) and isinstance(text, str)):
        raise UsageError(
            f"{path}: entry {number} has a message without from and value, or role and content.",
            remedy="correct it, or remove it",
        )
    return role, text
