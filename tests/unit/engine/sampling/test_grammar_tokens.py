"""Text that looks like added tokens, under constraints: it is written, and every allowed token is accepted."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("llguidance", reason="not run: the extra `constrained` is not installed")

from tokenizers import Tokenizer, decoders, models, normalizers
from tokenizers.trainers import BpeTrainer

from inferplane.engine.request.params import SamplingParams
from inferplane.engine.sampling.grammars import Grammars
from inferplane.errors import UsageError
from tests.unit.support.constrained import END, FOLDER, allowed

ADDED = ("<think>", "</think>", "<tool_call>", "[INST]", "plainword", "<｜end é｜>", "<a b>")


def byte_level() -> str:
    return (FOLDER / "tokenizer.json").read_text()


def sentencepiece() -> str:
    """A tokenizer in the manner of Llama 2: spaces as U+2581, bytes as tokens."""
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    spaces = decoders.Replace("▁", " ")
    made.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = BpeTrainer(vocab_size=400, special_tokens=["<unk>", "</s>", *byte_tokens], show_progress=False)
    made.train_from_iterator(["hello world think tool call <a> b </a>", "the quick brown fox jumps"] * 20, trainer)
    data = json.loads(made.to_str())
    data["added_tokens"] = data["added_tokens"][:2]
    return json.dumps(data)


def with_added(text: str, *, special: bool) -> str:
    data = json.loads(text)
    first = max(*data["model"]["vocab"].values(), *(t["id"] for t in data["added_tokens"])) + 1
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": special}
    data["added_tokens"] += [{"id": first + i, "content": name, **flags} for i, name in enumerate(ADDED)]
    return json.dumps(data)


@pytest.fixture(scope="module", params=["byte level", "sentencepiece"])
def kinds(request):
    source = byte_level() if request.param == "byte level" else sentencepiece()
    texts = [with_added(source, special=special) for special in (False, True)]
    found = [Grammars(text, Tokenizer.from_str(text).get_vocab_size() + 5, {END}) for text in texts]
    yield list(zip(texts, found))
    for one in found:
        one.close()


def write(compiled: Grammars, text: str, params: SamplingParams, choose) -> str:
    """The text that a sequence writes; fails if a token that is allowed is refused."""
    constraint, ids = compiled.start(params), []
    while not constraint.ended:
        token = choose(sorted(allowed(constraint.masks()[0])))
        constraint.accept([token])
        ids.append(token)
        assert len(ids) < 200
    tokens = compiled._tokenizer
    return b"".join(tokens.decode_bytes([i]) for i in ids[:-1]).decode()


NAMES = (*ADDED, "<|eos|>", "</s>", "x <think> y", "<think><think>", "a<tool_call>{}</tool_call>")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("choose", [min, max], ids=["lowest", "highest"])
def test_text_that_looks_like_an_added_token_is_written(kinds, name, choose):
    for text, compiled in kinds:
        schema = SamplingParams(json_schema={"enum": [name]})
        assert json.loads(write(compiled, text, schema, choose)) == name
        const = {
            "type": "object",
            "properties": {"k": {"const": name}},
            "required": ["k"],
            "additionalProperties": False,
        }
        assert json.loads(write(compiled, text, SamplingParams(json_schema=const), choose)) == {"k": name}
        literal = f"start: {json.dumps(name, ensure_ascii=False)}"
        assert write(compiled, text, SamplingParams(grammar=literal), choose) == name
        pattern = "".join(c if c.isalnum() or c == " " else rf"\{c}" if c.isascii() else c for c in name)
        pattern = pattern.replace(r"\<", "<").replace(r"\>", ">")
        assert write(compiled, text, SamplingParams(regex=pattern), choose) == name


def test_one_of_several_such_texts_is_written(kinds):
    for text, compiled in kinds:
        for choose in (min, max):
            assert json.loads(write(compiled, text, SamplingParams(json_schema={"enum": list(NAMES)}), choose)) in NAMES


def test_every_token_of_a_mask_is_accepted_and_none_is_special(kinds):
    """In a state where all text is allowed, too."""
    for text, compiled in kinds:
        specials = {t["id"] for t in json.loads(text)["added_tokens"] if t["special"]} - {END}
        for params in (SamplingParams(regex="(?s:.*)"), SamplingParams(json_schema={"type": "string"})):
            found = compiled.start(params)
            tokens = allowed(found.masks()[0])
            assert tokens - {END} and not tokens & specials
            for token in sorted(tokens):
                found.accept([token])
                found.rollback(1)


def test_a_grammar_may_name_an_added_token(kinds):
    for text, compiled in kinds:
        (token,) = [t["id"] for t in json.loads(text)["added_tokens"] if t["content"] == "<think>"]
        found = compiled.start(SamplingParams(grammar='start: <think> "a"'))
        assert allowed(found.masks()[0]) == {token}
        found.accept([token])
        with pytest.raises(UsageError, match="is refused"):
            compiled.start(SamplingParams(grammar="start: <nothing>"))
