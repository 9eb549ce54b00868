"""Builds tokenizers of the library `tokenizers` from the vocabulary of a GGUF file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from inferplane.errors import CheckpointError
from inferplane.files import AGAIN
from inferplane.gguf.tokenizer_splits import SPLITS

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONTROL, USER_DEFINED = 3, 4
"""Types of tokens: those that stand for no text, and those of a text that is always one token."""
MAX_PIECE_CHARS = 256
"""Longest token that is divided into two to find merges; the longest ones of SentencePiece have 31 characters."""
MAX_PIECES_CHARS = 2**23
"""Most characters of all tokens together, as each is divided at each of them: Gemma's 262,144 have two million."""
MAX_LOST_MERGES = 1 / 64
"""Largest part of the merges that may make no token."""
SPACE = "\u2581"
"""What SentencePiece writes for a space."""


@dataclass(frozen=True)
class Vocabulary:
    """What a GGUF file states of its tokens.

    Args:
        architecture: of the model.
        split: name of the way to split a text into words.
        tokens: by id.
        types: of the tokens, by id; empty: not stated.
        scores: of the tokens, by id; empty: not stated.
        merges: pairs with a space between them, the first one first; None: not stated.
        unknown: id of the token for what has none.
        space_prefix: whether a text begins with a space that is added.
    """

    architecture: str
    split: str
    tokens: Sequence[str]
    types: Sequence[int]
    scores: Sequence[float]
    merges: Sequence[str] | None
    unknown: int | None
    space_prefix: bool

    def of_type(self, kind: int) -> list[str]:
        """The tokens of a type, by id."""
        return [token for token, own in zip(self.tokens, self.types, strict=False) if own == kind]


def build_byte_level(vocabulary: Vocabulary) -> Tokenizer:
    """Build the tokenizer of a vocabulary over bytes (`gpt2`).

    Raises:
        CheckpointError: there are no merges, one is none, or the way to split has no pattern here.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    split = SPLITS.get(vocabulary.split)
    if split is None:
        what = f"splits texts as {vocabulary.split!r}" if vocabulary.split else "does not state how it splits texts"
        raise CheckpointError(
            f"The tokenizer {what}, and for that there is no pattern (tokenizer.ggml.pre).",
            there_is=", ".join(sorted(SPLITS)),
            remedy="make the file again with a newer llama.cpp, or pass the folder that it was made from",
        )
    if vocabulary.merges is None:
        raise CheckpointError("The tokenizer lacks tokenizer.ggml.merges.", remedy=AGAIN)
    ids = {token: at for at, token in enumerate(vocabulary.tokens)}
    model = models.BPE(ids, _pairs(vocabulary.merges, ids), ignore_merges=split.ignores_merges)
    built = Tokenizer(model)
    words = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    built.pre_tokenizer = pre_tokenizers.Sequence([*words, to_bytes])
    built.decoder = decoders.ByteLevel()
    _add_tokens(built, vocabulary, vocabulary.of_type(USER_DEFINED))
    return built


def build_pieces(vocabulary: Vocabulary) -> Tokenizer:
    """Build the tokenizer of a vocabulary of SentencePiece (`llama`). Such a file has scores and no merges: those are
    all pairs of tokens that make a token, in the order of its score.

    Raises:
        CheckpointError: a token is too long, or there are neither merges nor scores.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokens = list(vocabulary.tokens)
    gemma = vocabulary.architecture.startswith("gemma")
    if gemma:  # its files have such tokens with real spaces
        tokens = [SPACE * len(token) if " " in token and not token.strip() else token for token in tokens]
    ids = {token: at for at, token in enumerate(tokens)}
    if vocabulary.merges is not None:
        merges = _pairs(vocabulary.merges, ids)
    else:
        # Gemma's scores do not follow the order in which its tokens were merged; their ids do.
        merges = _merges_of([-float(at) for at in range(len(tokens))] if gemma else vocabulary.scores, ids)
    unknown = None if vocabulary.unknown is None else tokens[vocabulary.unknown]
    built = Tokenizer(models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    to_spaces = normalizers.Replace(" ", SPACE)
    decoding: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if not vocabulary.space_prefix:
        built.normalizer = to_spaces
    else:
        decoding.append(decoders.Strip(" ", left=1))
        if vocabulary.architecture == "phi3":  # its tokenizer.json adds one after each special token, too
            built.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), to_spaces])
        else:
            built.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, "first", split=False)
    built.decoder = decoders.Sequence(decoding)
    _add_tokens(built, vocabulary, [token for token in vocabulary.of_type(USER_DEFINED) if token in ids])
    return built


def _add_tokens(built: Tokenizer, vocabulary: Vocabulary, plain: Sequence[str]) -> None:
    """Let special tokens, and `plain` ones, be found in a text before it is split."""
    from tokenizers import AddedToken

    special = vocabulary.of_type(CONTROL)
    built.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    built.add_tokens([AddedToken(token, normalized=False, special=False) for token in plain])


def _pairs(merges: Sequence[str], ids: dict[str, int]) -> list[tuple[str, str]]:
    """The merges as pairs of tokens that make a token, as the library demands.

    A few published merges make none: of tokens that are written with real spaces, and are found before texts are split.
    """
    pairs = [(first, second) for first, _, second in (merge.partition(" ") for merge in merges)]
    found = [pair for pair in pairs if {*pair, "".join(pair)} <= ids.keys()]
    if len(pairs) - len(found) > len(pairs) * MAX_LOST_MERGES:
        what = f"Of the tokenizer's {len(pairs)} merges, {len(pairs) - len(found)} make no token of two"
        raise CheckpointError(f"{what}, which is not plausible.", remedy=AGAIN)
    return found


def _merges_of(scores: Sequence[float], ids: dict[str, int]) -> list[tuple[str, str]]:
    """All pairs of tokens that make a token: that with the highest score first, and of a token's pairs the one with the
    longest first part.

    Args:
        scores: of the tokens, by id.
        ids: the tokens' ids, in their order.
    """
    if len(scores) < len(ids):
        raise CheckpointError("The tokenizer lacks tokenizer.ggml.scores.", remedy=AGAIN)
    longest, total = max(map(len, ids), default=0), sum(map(len, ids))
    if longest > MAX_PIECE_CHARS or total > MAX_PIECES_CHARS:
        what = f"The tokenizer's longest token has {longest} characters, and all have {total}"
        raise CheckpointError(f"{what}, which is not plausible.", remedy=AGAIN)
    found: list[tuple[float, int, int, tuple[str, str]]] = []
    for token, score in zip(ids, scores, strict=False):
        for at in range(1, len(token)):
            first, second = token[:at], token[at:]
            if first in ids and second in ids:
                found.append((-score, -at, at - len(token), (first, second)))
    found.sort(key=lambda entry: entry[:3])
    return [pair for *_, pair in found]
