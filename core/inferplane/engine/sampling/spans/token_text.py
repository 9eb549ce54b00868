"""Single tokens as bytes, which label log-probabilities.

A token may hold part of a character, so that its text does not identify it; its bytes do. Byte-level vocabularies spell
bytes as characters (GPT-2's table), others write a byte as `<0x0A>` and a space as U+2581.
"""

from __future__ import annotations

import re
from codecs import IncrementalDecoder
from functools import lru_cache
from typing import Any

_BYTE = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")
SPACE = "\u2581"


@lru_cache(maxsize=1)
def byte_letters() -> dict[str, int]:
    """Letter -> byte in byte-level vocabularies: printable Latin-1 stands for itself, others come from U+0100 on.

    Source: the encoder of GPT-2, https://github.com/openai/gpt-2, src/encoder.py.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(b): b for b in plain}
    others = [b for b in range(256) if b not in set(plain)]
    return letters | {chr(256 + i): b for i, b in enumerate(others)}


class TokenText:
    """Bytes and a printable name of each token id.

    Args:
        tokenizer: a fast tokenizer of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._added = {i: t.content for i, t in added.items()}
        self._special = {i for i, t in added.items() if t.special}
        vocabulary = tokenizer.get_vocab()
        self._byte_level = "\u0120" in "".join(t[:1] for t in vocabulary)  # how byte-level ones spell a space
        self._known: dict[int, bytes] = {}
        self._names: dict[int, str] = {}

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes that a token adds to a text; for a special token, those of its name."""
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._spell(token)
        return found

    def name_of(self, token: int) -> str:
        """Return a token's text; if it is not whole characters, its bytes as `bytes:\\xe2\\x82`."""
        found = self._names.get(token)
        if found is None:
            raw = self.bytes_of(token)
            try:
                found = raw.decode()
            except UnicodeDecodeError:
                found = "bytes:" + "".join(f"\\x{b:02x}" for b in raw)
            self._names[token] = found
        return found

    def count_characters(self, token: int, decoder: IncrementalDecoder, prompt: str | None, at: int) -> int:
        """Return how many characters a token adds to a text.

        Args:
            token: its id.
            decoder: of UTF-8, which keeps the bytes of an incomplete character from token to token.
            prompt: which the token is part of; None: it is generated, so that a special one has no text.
            at: where in the prompt the token begins.
        """
        if token in self._added:
            name = self._added[token]
            shown = token not in self._special if prompt is None else prompt.startswith(name, at)
            return len(name) if shown else 0
        piece = decoder.decode(self.bytes_of(token))
        # Tokenizers put a space before a text's first word.
        begins = prompt is not None and at == 0 and piece.startswith(" ") and not prompt.startswith(" ")
        return len(piece) - begins

    def _spell(self, token: int) -> bytes:
        if token in self._added:
            return str(self._added[token]).encode()
        spelled = self._tokenizer.convert_ids_to_tokens(token)
        if not isinstance(spelled, str):  # an embedding row that the tokenizer does not use
            return f"<{token}>".encode()
        if self._byte_level:
            letters = byte_letters()
            if all(c in letters for c in spelled):
                return bytes(letters[c] for c in spelled)
            return spelled.encode()
        byte = _BYTE.match(spelled)
        return bytes([int(byte[1], 16)]) if byte else spelled.replace(SPACE, " ").encode()
