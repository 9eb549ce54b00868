"""Writes the folder of the scripted model, as a checkpoint has it, but without weights (`--load-format dummy`)."""

from __future__ import annotations

import json
from pathlib import Path

from tests.clients.scripted.tokens import END, END_OF_TEXT, texts, tokenizer

TEMPLATE = Path(__file__).with_name("chat_template.jinja")
ARGUMENTS = ("--load-format", "dummy", "--dtype", "float32", "--served-model-name", "scripted")


def write_folder(folder: Path) -> Path:
    """Write the files that the server reads, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = {text: number for number, text in enumerate(texts())}
    config = {
        "architectures": ["ScriptedForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": len(texts()),
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "eos_token_id": ids[END.encode()],
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
        "chat_template": TEMPLATE.read_text(encoding="utf-8"),
    }
    for name, content in (("config", config), ("tokenizer", tokenizer()), ("tokenizer_config", settings)):
        (folder / f"{name}.json").write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    return folder
