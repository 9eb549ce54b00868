"""Small tokenizers of the two kinds that checkpoints bring, trained on the spot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TEXT = (
    "The quick brown fox jumps over the lazy dog. def main(): return 0 # naïve café, Ünïcödé\n"
    "日本語のテキスト と emoji 🎉🚀👩‍💻 и немного кириллицы; 1234567890 != 42\n"
) * 4
SPECIALS = ["<bos>", "<eos>", "<pad>"]
CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)


def byte_level(vocab: int = 400) -> Any:
    """Pieces are bytes: every text has an encoding, a piece may hold part of a character (Llama 3, DeepSeek)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


def metaspace(vocab: int = 120) -> Any:
    """Pieces carry the space before a word as U+2581, unknown characters fall back to bytes (Llama 2, Mistral)."""
    from tokenizers import Tokenizer, decoders, models, normalizers, trainers

    def prepare(tokenizer: Any) -> Any:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        strip = decoders.Strip(content=" ", left=1)
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
        )
        return tokenizer

    trained = prepare(Tokenizer(models.BPE(unk_token="<unk>")))
    trained.train_from_iterator(
        ["The quick brown fox jumps over the lazy dog. Hello, world! " * 4],
        trainers.BpeTrainer(vocab_size=vocab, special_tokens=[*SPECIALS, "<unk>"], show_progress=False),
    )
    model = json.loads(trained.to_str())["model"]
    pieces = dict(model["vocab"])
    pieces |= {f"<0x{i:02X}>": len(pieces) + i for i in range(256)}
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in model["merges"]]
    tokenizer = prepare(Tokenizer(models.BPE(vocab=pieces, merges=merges, byte_fallback=True, unk_token="<unk>")))
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


def save(tokenizer: Any, folder: Path, *, chat_template: str | None = None, **options: Any) -> int:
    """Write what a checkpoint's folder holds of a tokenizer; returns its number of tokens."""
    from transformers import PreTrainedTokenizerFast

    named = dict(zip(("bos_token", "eos_token", "pad_token"), SPECIALS))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named, **options)
    fast.chat_template = chat_template
    fast.save_pretrained(folder)
    return len(fast)
