"""How byte-level vocabularies split a text into words before they merge, by the names that llama.cpp gives them.

A name stands for the patterns of a published tokenizer.json; where llama.cpp writes one otherwise, because its regular
expressions know less, the published one is taken. A wrong pattern is a silent wrong answer, so there is no default for
a name that is not listed.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WordSplit:
    """A way to split.

    Args:
        patterns: regular expressions in Oniguruma's syntax. The first isolates its matches; each further one does so
            within the pieces that are left.
        ignores_merges: a word that is a token as it is becomes that token, whatever the merges give.
        adds_bos: a text begins with the first token, unless the file states otherwise.
    """

    patterns: tuple[str, ...]
    ignores_merges: bool = False
    adds_bos: bool = False


_SHORT_FORMS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"\s+(?!\S)|\s+"
_LINES = rf"\s*[\r\n]+|{_BLANKS}"
_GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_BLANKS}"
_DIGITS_OF_3 = "[0-9][0-9][0-9]"
_CJK_COARSE = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
"""Letters with case as DeepSeek's first vocabularies list them."""


def _match_words(digits: str, letters: str = r"\p{L}", after_symbols: str = r"[\r\n]*") -> str:
    """The pattern that began with GPT-4's vocabulary.

    Args:
        digits: the pattern of a number.
        letters: what a word is made of, in a class.
        after_symbols: what may follow symbols.
    """
    word = f"[{letters}]" if letters != r"\p{L}" else letters
    symbols = rf" ?[^\s{letters}\p{{N}}]+{after_symbols}"
    return rf"{_SHORT_FORMS}|[^\r\n\p{{L}}\p{{N}}]?{word}+|{digits}|{symbols}|{_LINES}"


def _match_capitals(digits: str, short_forms: str, but: str = "", after_symbols: str = r"[\r\n/]*") -> str:
    """The pattern of GPT-4o, in which a capital begins a word.

    Args:
        digits: the pattern of a number.
        short_forms: what may follow a word.
        but: added to the classes of letters, to take some out.
        after_symbols: what may follow symbols.
    """
    before, upper = r"[^\r\n\p{L}\p{N}]?", rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]"
    lower = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]"
    words = rf"{before}{upper}*{lower}+{short_forms}|{before}{upper}+{lower}*{short_forms}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+{after_symbols}|{_LINES}"


_OPTIONAL = f"{_SHORT_FORMS}?"
_OF_GPT4O = _match_capitals(r"\p{N}{1,3}", _OPTIONAL)
_DEEPSEEK_WORDS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES}"
)

_DEFAULT = WordSplit((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", _DIGITS_OF_3))
_OF_GPT2 = WordSplit((_GPT2,))
_SINGLE_DIGITS = WordSplit((r"\p{N}", _GPT2))
_LLAMA3 = WordSplit((_match_words(r"\p{N}{1,3}"),), ignores_merges=True, adds_bos=True)
_LLAMA3_MERGED = WordSplit(_LLAMA3.patterns)
_QWEN2 = WordSplit((_match_words(r"\p{N}"),))
_GPT4O = WordSplit((_OF_GPT4O,))
_DEEPSEEK3 = WordSplit((r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK_WORDS))
_COMMAND_A = WordSplit((r"\d{1,3}(?=(?:\d{3})*\b)", _OF_GPT4O))
_BAILING = WordSplit(
    (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
        rf"|\s*[\r\n]|{_BLANKS}",
    )
)

SPLITS: dict[str, WordSplit] = {
    "default": _DEFAULT,
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "gigachat"), _OF_GPT2),
    **dict.fromkeys(("a.x-4.0", "mellum", "exaone4"), _OF_GPT2),
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm", "codeshell"), _SINGLE_DIGITS),
    **dict.fromkeys(("exaone", "minerva-7b", "mellum2"), _SINGLE_DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral"), _LLAMA3),
    **dict.fromkeys(("midm-2.0", "lfm2"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _LLAMA3_MERGED),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez"), _QWEN2),
    **dict.fromkeys(("stablelm2", "hunyuan", "solar-open", "grok-2"), _QWEN2),
    "qwen35": WordSplit((_match_words(r"\p{N}", r"\p{L}\p{M}"),)),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _GPT4O),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), _COMMAND_A),
    "tekken": WordSplit((_match_capitals(r"\p{N}", ""),), ignores_merges=True, adds_bos=True),
    "kimi-k2": WordSplit((r"\p{Han}+|" + _match_capitals(r"\p{N}{1,3}", _OPTIONAL, r"&&[^\p{Han}]", r"[\r\n]*"),)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _DEEPSEEK3),
    "deepseek-llm": WordSplit(
        (
            *(r"[\r\n]", rf"\s?[{_CASED}]+", "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"),
            *(r"\s+$", _CJK_COARSE, r"\p{N}+"),
        )
    ),
    "deepseek-coder": WordSplit((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_COARSE, r"\p{N}")),
    "falcon": WordSplit((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, _DIGITS_OF_3)),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _BAILING),
    "seed-coder": WordSplit(
        (rf"{_SHORT_FORMS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_LINES}",)
    ),
    "exaone-moe": WordSplit(
        (
            rf"{_SHORT_FORMS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|{_BLANKS}",
        )
    ),
    "minicpm5": WordSplit((r"\p{N}{1,3}", _match_words(r"\p{N}+")), ignores_merges=True),
}
"""Splits by the value of `tokenizer.ggml.pre`. Source: llama.cpp, src/llama-vocab.cpp."""
