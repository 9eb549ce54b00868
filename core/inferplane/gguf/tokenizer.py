"""Writes the tokenizer of a GGUF file as the files that transformers reads: tokenizer.json and its settings, the chat
template among them, and generation_config.json with the tokens that end a text.

The keys are those of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. transformers' own conversion is the
reference, except where llama.cpp, for which the files are made, does otherwise:

- Digits and other splits: transformers splits as GPT-2 for each name of `tokenizer.ggml.pre` that it does not list
  (`smollm`, `starcoder`, `deepseek-llm`, `deepseek-v3`, ...); here each has its own pattern, or is refused.
- Special tokens with characters outside the byte alphabet (DeepSeek's): transformers spells them in bytes, and then
  finds them in no text; here they are found, as by llama.cpp.
- A byte-level file of the kind `llama-bpe` or `tekken` that does not state `add_bos_token` gets its first token.
- A SentencePiece file whose `add_space_prefix` is false gets no space in front, whatever its architecture.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inferplane.errors import CheckpointError
from inferplane.files import AGAIN
from inferplane.gguf.tokenizer_models import CONTROL, USER_DEFINED, Vocabulary, build_byte_level, build_pieces
from inferplane.gguf.tokenizer_splits import SPLITS

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BYTE_LEVEL, PIECES = "gpt2", "llama"
"""Kinds of vocabularies that are read, by their names in files."""
MAX_TOKENS = 2**20
MAX_MERGES = 2**21
MAX_TOKEN_CHARS = 2**10
"""Longest token: published ones have at most 256 characters, of spaces or dashes."""
MAX_TEMPLATE_CHARS = 2**20
END_TEXTS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>", "</s>"),
    *("<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>"),
)
"""Texts of tokens that end a text, whatever the file states; as llama.cpp knows them."""
_HARMONY_END, _HARMONY_RETURN = "<|end|>", "<|return|>"
_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "mask": "mask", "sep": "seperator"}
"""Roles of special tokens: name in transformers, name in GGUF (with its slip)."""
_DEFAULTS = {PIECES: {"bos": 1, "eos": 2, "unk": 0}}
"""Ids that llama.cpp takes where a file of a kind states none."""


def write_tokenizer(metadata: Mapping[str, Any], folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json.

    Args:
        metadata: of the file, with arrays as lists or numpy arrays.
        folder: exists.

    Raises:
        CheckpointError: the file has no tokenizer, one of a kind that is not read, or a damaged one.
        OSError: a file cannot be written.
    """
    source = _Entries(metadata)
    kind = source.text("model")
    builders = {BYTE_LEVEL: build_byte_level, PIECES: build_pieces}
    if kind not in builders:
        what = f"of the kind {kind!r}, which is not read" if kind else "missing"
        raise CheckpointError(
            f"The tokenizer is {what} (tokenizer.ggml.model).",
            there_is=f"{BYTE_LEVEL} (merges over bytes) and {PIECES} (SentencePiece)",
            remedy="pass the folder that the file was made from",
        )
    vocabulary = source.vocabulary(kind)
    roles = source.roles(kind, len(vocabulary.tokens))
    split = SPLITS.get(vocabulary.split)
    adds_bos = source.flag("add_bos_token", kind == PIECES or (split is not None and split.adds_bos))
    adds_eos = source.flag("add_eos_token", False)
    built = builders[kind](vocabulary)
    before = [vocabulary.tokens[roles["bos"]]] if adds_bos and "bos" in roles else []
    after = [vocabulary.tokens[roles["eos"]]] if adds_eos and "eos" in roles else []
    _put_around(built, before, after)
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    settings |= {f"{role}_token": vocabulary.tokens[at] for role, at in roles.items()}
    settings |= {"add_bos_token": bool(before), "add_eos_token": bool(after)}
    if template := source.template():
        settings["chat_template"] = template
    built.save(str(folder / "tokenizer.json"), pretty=False)
    _write(folder / "tokenizer_config.json", settings)
    generation: dict[str, Any] = {f"{role}_token_id": roles[role] for role in ("bos", "pad") if role in roles}
    if found := source.end_tokens(roles, vocabulary):
        generation["eos_token_id"] = found if len(found) > 1 else found[0]
    _write(folder / "generation_config.json", generation)


def _put_around(built: Tokenizer, before: Sequence[str], after: Sequence[str]) -> None:
    """Put tokens before and after each text."""
    from tokenizers import processors

    if not before and not after:
        return
    special = [(token, built.token_to_id(token)) for token in {*before, *after}]
    single = [*before, "$A", *after]
    pair = [*single, *(f"{token}:1" for token in before), "$B:1", *(f"{token}:1" for token in after)]
    built.post_processor = processors.TemplateProcessing(single, pair, special)


def _write(path: Path, entries: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(entries, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


class _Entries:
    """The entries of a file's metadata that state its tokenizer, each checked."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.metadata = metadata

    def get(self, key: str, prefix: str = "tokenizer.ggml.") -> Any:
        """An entry as it is; None if it is missing."""
        return self.metadata.get(f"{prefix}{key}")

    def text(self, key: str) -> str:
        """A string; empty if it is missing."""
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            raise _wrong(key, value)
        return value or ""

    def flag(self, key: str, default: bool) -> bool:
        """A truth value."""
        value = self.get(key)
        if value is not None and type(value) is not bool:
            raise _wrong(key, value)
        return default if value is None else value

    def number(self, key: str, most: int) -> int | None:
        """An id below `most`. Others count as not stated, as for llama.cpp: published files have -1 and 2**32 - 1."""
        value = self.get(key)
        if value is not None and type(value) is not int:
            raise _wrong(key, value)
        return value if value is not None and 0 <= value < most else None

    def strings(self, key: str, most: int) -> list[str] | None:
        """A list of strings; None if it is missing."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not 0 < len(value) <= most or not all(isinstance(x, str) for x in value):
            raise _wrong(key, value)
        return value

    def numbers(self, key: str, count: int, kinds: str) -> list[Any]:
        """A number for each token; empty if they are missing.

        Args:
            key: the entry's.
            count: number of tokens.
            kinds: kinds of numbers, as numpy names them.
        """
        value = self.get(key)
        if value is None:
            return []
        if getattr(getattr(value, "dtype", None), "kind", "") not in tuple(kinds) or len(value) < count:
            raise _wrong(key, value)
        return list(value[:count].tolist())

    def vocabulary(self, kind: str) -> Vocabulary:
        """All that is stated of the tokens."""
        tokens = self.strings("tokens", MAX_TOKENS)
        if tokens is None:
            raise CheckpointError("The tokenizer lacks tokenizer.ggml.tokens.", remedy=AGAIN)
        tokens = [token or f"[EMPTY_{at}]" for at, token in enumerate(tokens)]
        if (longest := max(tokens, key=len))[MAX_TOKEN_CHARS:]:
            what = f"The tokenizer's token {longest[:32]!r}... has {len(longest)} characters"
            raise CheckpointError(f"{what}, which is not plausible.", remedy=AGAIN)
        if len(set(tokens)) != len(tokens):
            ids = {token: at for at, token in enumerate(tokens)}
            double = next(token for at, token in enumerate(tokens) if ids[token] != at)
            raise CheckpointError(f"The tokenizer has the token {double[:64]!r} twice.", remedy=AGAIN)
        architecture = self.metadata.get("general.architecture")
        return Vocabulary(
            architecture=architecture if isinstance(architecture, str) else "",
            split=self.text("pre"),
            tokens=tokens,
            types=self.numbers("token_type", len(tokens), "iu"),
            scores=self.numbers("scores", len(tokens), "fi"),
            merges=self.strings("merges", MAX_MERGES),
            unknown=self.roles(kind, len(tokens)).get("unk"),
            space_prefix=self.flag("add_space_prefix", kind == PIECES),
        )

    def roles(self, kind: str, count: int) -> dict[str, int]:
        """The id of the token of each role that has one."""
        found = {role: self.number(f"{name}_token_id", count) for role, name in _ROLES.items()}
        missing = {role: at for role, at in _DEFAULTS.get(kind, {}).items() if at < count}
        return missing | {role: at for role, at in found.items() if at is not None}

    def end_tokens(self, roles: Mapping[str, int], vocabulary: Vocabulary) -> list[int]:
        """The ids of tokens that end a text: those that are stated first, then those with a known text."""
        count = len(vocabulary.tokens)
        stated = [roles.get("eos"), self.number("eot_token_id", count), self.number("eom_token_id", count)]
        special = {at for at, kind in enumerate(vocabulary.types) if kind in (CONTROL, USER_DEFINED)}
        known = [at for at in sorted(special) if vocabulary.tokens[at] in END_TEXTS]
        known = [at for at in known if vocabulary.tokens[at] != "</s>" or vocabulary.types[at] == CONTROL]  # HTML's
        if any(vocabulary.tokens[at] == _HARMONY_RETURN for at in known):  # there `<|end|>` ends a message only
            known = [at for at in known if vocabulary.tokens[at] != _HARMONY_END]
        return list(dict.fromkeys([*(at for at in stated if at is not None), *known]))

    def template(self) -> str:
        """The chat template; empty without one."""
        value = self.get("chat_template", "tokenizer.")
        if value is not None and (not isinstance(value, str) or len(value) > MAX_TEMPLATE_CHARS):
            raise _wrong("chat_template", value)
        return value or ""


def _wrong(key: str, value: Any) -> CheckpointError:
    """The error for an entry that is not what it has to be."""
    words = " ".join(str(value)[:64].split())
    return CheckpointError(f"The tokenizer has {words!r} for {key}, which is not plausible.", remedy=AGAIN)
