"""Every tokenizer encodes as its tokenizer.json does, whatever class its settings name; others say what they lack."""

from __future__ import annotations

import base64
import json
import os

import pytest

from inferplane.engine.request import tokenizer_loading
from inferplane.engine.request.text import PIECE_CHARACTERS, Tokenizer
from inferplane.errors import CapacityError, CheckpointError
from tests.e2e.tiny_tokenizers import CHAT, SPECIALS, TEXT, byte_level, metaspace, save

tokenizers = pytest.importorskip("tokenizers")
decoders, models, normalizers = tokenizers.decoders, tokenizers.models, tokenizers.normalizers
pre_tokenizers, processors, trainers = tokenizers.pre_tokenizers, tokenizers.processors, tokenizers.trainers

WITH_BOS = processors.TemplateProcessing(single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", 0)])
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+"


def trained(model, trainer, normalizer=None, pre=None, decoder=None, post=None, **options):
    made = tokenizers.Tokenizer(model)
    for name, part in (("normalizer", normalizer), ("pre_tokenizer", pre), ("decoder", decoder)):
        if part is not None:
            setattr(made, name, part)
    made.train_from_iterator([TEXT], trainer(special_tokens=[*SPECIALS, "<unk>"], show_progress=False, **options))
    if post is not None:
        made.post_processor = post
    return made


def bytes_bpe(pre, normalizer=None, post=None):
    options = {"vocab_size": 420, "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    return trained(models.BPE(), trainers.BpeTrainer, normalizer, pre, decoders.ByteLevel(), post, **options)


def prefixed():
    return bytes_bpe(pre_tokenizers.ByteLevel(add_prefix_space=True))


def split_words():
    split = pre_tokenizers.Split(tokenizers.Regex(SPLIT), "isolated")
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return bytes_bpe(pre_tokenizers.Sequence([split, whole]), post=WITH_BOS)


def digits_nfc():
    parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    return bytes_bpe(pre_tokenizers.Sequence(parts), normalizers.NFC())


def with_bos():
    made = metaspace()
    made.post_processor = WITH_BOS
    return made


def spaces(scheme, split):
    pre = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=split)
    return trained(models.BPE(unk_token="<unk>"), trainers.BpeTrainer, None, pre, decoders.Metaspace(), vocab_size=300)


def spaces_first():
    return spaces("first", True)


def spaces_never():
    return spaces("never", False)


def replaced():
    made = json.loads(metaspace().to_str())
    made["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    made["pre_tokenizer"] = {
        "type": "Split",
        "pattern": {"String": " "},
        "behavior": "MergedWithPrevious",
        "invert": False,
    }
    return tokenizers.Tokenizer.from_str(json.dumps(made))


def word_pieces():
    return trained(
        models.WordPiece(unk_token="<unk>"),
        trainers.WordPieceTrainer,
        normalizers.BertNormalizer(lowercase=True),
        pre_tokenizers.BertPreTokenizer(),
        decoders.WordPiece(),
        vocab_size=200,
    )


def unigram():
    pre = pre_tokenizers.Metaspace("▁", prepend_scheme="always")
    return trained(
        models.Unigram(), trainers.UnigramTrainer, normalizers.NFKC(), pre, decoders.Metaspace(), unk_token="<unk>"
    )


KINDS = (
    byte_level,
    prefixed,
    split_words,
    digits_nfc,
    metaspace,
    with_bos,
    spaces_first,
    spaces_never,
    replaced,
    word_pieces,
    unigram,
)
CLASSES = ("PreTrainedTokenizerFast", "LlamaTokenizerFast", "LlamaTokenizer", "Qwen2TokenizerFast", "GPT2TokenizerFast")
TEXTS = (
    "",
    "Hello world",
    "  two  spaces   and a tail ",
    "def f(x):\n    return x + 1\n\n\n# end\r\n",
    "\t\ttabs\tand\u00a0odd\u2003spaces",
    "naïve café Ünïcödé e\u0301 ﬁ Ａ ²",
    "日本語のテキスト と 한국어, Русский, العربية",
    "🎉🚀👩‍💻 1234567890 3.14 != 42",
    "<bos>Hello<eos> x <pad>y  <unk>z <eos>",
    "don't U.S.A. \x00 <0x0A> ▁under▁score Ġ",
)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_ids_are_those_of_the_file(make, name, tmp_path):
    save(make(), tmp_path, chat_template=CHAT)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": name}))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    written = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    found = Tokenizer(tmp_path)
    for loaded in (found, Tokenizer(tmp_path, found.kind)):
        for text in TEXTS:
            assert loaded.encode(text) == written.encode(text).ids, text
            assert loaded.encode(text, special=False) == written.encode(text, add_special_tokens=False).ids, text
        ids = written.encode(TEXTS[1]).ids
        assert loaded.decode(ids).strip() == written.decode(ids).strip()
        assert loaded.fast.chat_template == CHAT
        assert [loaded.fast.bos_token, loaded.fast.eos_token, loaded.fast.pad_token] == SPECIALS
        assert loaded.own_end_ids == {written.token_to_id("<eos>")}


# ------------------------------------------------------------------ what a class would lose


def changed(edit):
    """The tokenizer.json of `qwen` with a change that a class of transformers does not read."""
    made = json.loads(qwen().to_str())
    edit(made)
    return made


def qwen():
    split = pre_tokenizers.Split(tokenizers.Regex(QWEN), "isolated")
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    texts = ["हिन्दी में लिखा हुआ पाठ " * 5, "ภาษาไทยที่เขียนด้วย " * 5, "hello world zqzq ߊߋߌ " * 5]
    made = tokenizers.Tokenizer(models.BPE())
    made.normalizer, made.decoder = normalizers.NFC(), decoders.ByteLevel()
    made.pre_tokenizer = pre_tokenizers.Sequence([split, whole])
    options = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False}
    made.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=600, special_tokens=SPECIALS, **options))
    return made


QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def own_regex(made):
    """None: the file's own expression keeps marks with their letters; the class's does not."""


def plain_regex(made):
    made["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = QWEN.replace(r"\p{M}", "")


def one_script(made):
    plain_regex(made)
    pattern = made["pre_tokenizer"]["pretokenizers"][0]["pattern"]
    pattern["Regex"] = r"[\u07c0-\u07ff]|" + pattern["Regex"]


def one_character(made):
    plain_regex(made)
    replace = {"type": "Replace", "pattern": {"String": "℃"}, "content": "C"}
    made["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "NFC"}, replace]}


def one_word(made):
    plain_regex(made)
    made["model"]["vocab"]["unmerged"] = len(made["model"]["vocab"])
    made["model"]["ignore_merges"] = True


def decoded_otherwise(made):
    plain_regex(made)
    replace = {"type": "Replace", "pattern": {"String": "℃"}, "content": "C"}
    made["decoder"] = {"type": "Sequence", "decoders": [made["decoder"], replace]}


@pytest.mark.parametrize("name", ["Qwen2Tokenizer", "Qwen2TokenizerFast", "GPT2Tokenizer", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize("edit", [own_regex, one_script, one_character, one_word, decoded_otherwise])
def test_no_part_of_the_file_is_lost(edit, name, tmp_path):
    """Texts that no probe holds, of classes that bring a regular expression, normalizer and decoder of their own."""
    made = changed(edit)
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name, "eos_token": "<eos>"}))
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    written = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    found = Tokenizer(tmp_path)
    for loaded in (found, Tokenizer(tmp_path, found.kind)):
        for text in ("हिन्दी में लिखा", "ภาษาไทยที่เขียน", "ߊߋߌ ߊߋߌ", "20℃ x", "unmerged", "hello zqzq"):
            ids = written.encode(text).ids
            assert loaded.encode(text) == ids, text
            assert loaded.decode(ids) == written.decode(ids), text


def two_exchanged(made):
    """Two pieces that no probe holds have each other's ids."""
    vocab = made["model"]["vocab"]
    vocab["zqzq"], vocab["ߊߋߌ"] = vocab["ߊߋߌ"], vocab["zqzq"]


def one_more(made):
    """A token that neither tokenizer.json nor the settings have."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    made["added_tokens"].append({"id": 2 * len(made["model"]["vocab"]), "content": "zqzqzq", **flags})


def with_rare_pieces():
    made = json.loads(qwen().to_str())
    for piece in ("zqzq", "ߊߋߌ"):
        made["model"]["vocab"].setdefault(piece, len(made["model"]["vocab"]))
    return made


@pytest.mark.parametrize("edit", [two_exchanged, one_more])
def test_the_whole_vocabulary_is_that_of_the_file(edit, tmp_path):
    """Of a class that builds a vocabulary of its own, whatever texts the probes are."""
    from transformers import PreTrainedTokenizerFast

    (tmp_path / "tokenizer.json").write_text(json.dumps(with_rare_pieces()))
    other = with_rare_pieces()
    edit(other)
    built = PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer.from_str(json.dumps(other)))
    written = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer_loading._agree(built, written), "no probe shows the difference"
    loaded = tokenizer_loading._as_written(built, tmp_path)
    pieces = written.get_vocab(with_added_tokens=True)
    assert {piece: loaded.convert_tokens_to_ids(piece) for piece in pieces} == pieces
    assert loaded.encode("a zqzqzq b") == written.encode("a zqzqzq b").ids


AFTER = prefixed().get_vocab_size()
NEW = {"content": "<new>", "lstrip": False, "rstrip": True, "normalized": False, "single_word": False, "special": True}
ADDED = {
    "added_tokens_decoder": {"tokenizer_config.json": {"added_tokens_decoder": {AFTER: NEW}}},
    "no special one": {"tokenizer_config.json": {"added_tokens_decoder": {AFTER: NEW | {"special": False}}}},
    "added_tokens.json": {"added_tokens.json": {"<new>": AFTER}},
    "additional_special_tokens": {"tokenizer_config.json": {"additional_special_tokens": ["<new>", "<newer>"]}},
    "extra_special_tokens": {"tokenizer_config.json": {"extra_special_tokens": ["<newer>", "<new>"]}},
    "special_tokens_map.json": {"special_tokens_map.json": {"additional_special_tokens": ["<new>"]}},
    "pad_token": {"tokenizer_config.json": {"pad_token": "<new>"}},
    "eos_token": {"tokenizer_config.json": {"eos_token": "<new>"}},
    "eos_token as data": {"tokenizer_config.json": {"eos_token": NEW | {"__type": "AddedToken"}}},
    "unk_token": {"tokenizer_config.json": {"unk_token": "<new>"}},
}


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "Qwen2Tokenizer", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize("files", ADDED.values(), ids=ADDED)
def test_tokens_of_other_files_have_the_ids_that_transformers_gives(files, name, tmp_path):
    import transformers

    (tmp_path / "tokenizer.json").write_text(prefixed().to_str())
    settings = {"tokenizer_class": name, "bos_token": "<bos>", "eos_token": "<eos>"}
    for file, entries in {"tokenizer_config.json": {}, **files}.items():
        own = settings if file == "tokenizer_config.json" else {}
        (tmp_path / file).write_text(json.dumps(own | entries))
    oracle = transformers.AutoTokenizer.from_pretrained(tmp_path)
    new = oracle.convert_tokens_to_ids("<new>")
    assert new >= AFTER
    found = Tokenizer(tmp_path)
    for loaded in (found, Tokenizer(tmp_path, found.kind)):
        ids = loaded.encode("Hello<new> world")
        assert ids.count(new) == 1
        for special in (True, False):
            want = oracle.decode([new], skip_special_tokens=special)
            assert loaded.fast.decode([new], skip_special_tokens=special) == want
        assert loaded.fast.special_tokens_map == oracle.special_tokens_map
        assert loaded.own_end_ids == {oracle.eos_token_id}
        written = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        assert loaded.encode("Hello  world") == written.encode("Hello  world").ids


@pytest.mark.parametrize("name", ["LlamaTokenizer", "GPT2Tokenizer", "Qwen2Tokenizer"])
@pytest.mark.parametrize("key", ["eos_token", "pad_token", "unk_token", "additional_special_tokens"])
def test_a_piece_of_the_vocabulary_is_special_if_the_settings_name_it(key, name, tmp_path):
    made = json.loads(prefixed().to_str())
    made["added_tokens"] = [token for token in made["added_tokens"] if token["content"] != "<unk>"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    path = tmp_path / "tokenizer_config.json"
    value = ["<unk>"] if key == "additional_special_tokens" else "<unk>"
    path.write_text(json.dumps({"tokenizer_class": name, "bos_token": "<bos>", key: value}))
    found = Tokenizer(tmp_path)
    assert made["model"]["vocab"]["<unk>"] in found.encode("Hello  <unk>world")
    if key != "additional_special_tokens":
        assert found.fast.special_tokens_map[key] == "<unk>"


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("make", [byte_level, split_words, metaspace, with_bos], ids=lambda make: make.__name__)
def test_the_file_decides_about_special_tokens_around_a_text(make, adds, tmp_path):
    """As in transformers 5, which takes no notice of add_bos_token beside a tokenizer.json."""
    save(make(), tmp_path)
    path = tmp_path / "tokenizer_config.json"
    own = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": adds, "add_eos_token": adds}
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    written = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert Tokenizer(tmp_path).encode("a  b") == written.encode("a  b").ids


@pytest.mark.parametrize(
    ("content", "packages"),
    [
        (b"\n\x0b\n\x05<unk>\x15\0\0\0\0\x18\x02", "sentencepiece"),
        (b"\n\x0e\n\x0a\xe2\x96\x81the", "sentencepiece"),
        (base64.b64encode(b"a") + b" 0\n" + base64.b64encode(b"b") + b" 1\n", "tiktoken"),
        (base64.b64encode(bytes(range(40))) + b" 0\n", "tiktoken"),
    ],
)
def test_the_library_that_is_missing_is_named(content, packages, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer_loading, "_is_installed", lambda module: module == "google.protobuf")
    (tmp_path / "tokenizer.model").write_bytes(content)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    with pytest.raises(CheckpointError, match=f"needs `pip install {packages}`.*tokenizer.json"):
        Tokenizer(tmp_path)


# ------------------------------------------------------------------ texts that are too long

WORDS = "The quick brown fox jumps. "


class Counting:
    """A tokenizer of transformers that counts the characters it encodes."""

    def __init__(self, inner):
        self.inner, self.characters = inner, 0

    def encode(self, text, **options):
        self.characters += len(text)
        return self.inner.encode(text, **options)

    def get_vocab(self):
        return self.inner.get_vocab()


UNITS = (WORDS, "ab1 \n", "x", " ", "\n", "日", "🎉", "<eos>", "\x00")
"""Of most of these, the last two kinds make one unknown word, or one space, however long it is."""
LONG = [
    (make, u)
    for make in (byte_level, metaspace, word_pieces, unigram)
    for u in UNITS
    if make in KINDS[:5] or u in UNITS[:2]
]


@pytest.mark.parametrize(("make", "unit"), LONG)
def test_of_a_text_that_is_too_long_little_is_encoded(make, unit, tmp_path):
    save(make(), tmp_path)
    limited = Tokenizer(tmp_path, max_tokens=500)
    limited._inner = counting = Counting(limited._inner)
    text = unit * (3_000_000 // len(unit))
    with pytest.raises(CapacityError, match=r"has more than 500 tokens.*shorten the prompt"):
        limited.encode(text)
    assert counting.characters < 300_000
    with pytest.raises(CapacityError):
        limited.encode(text[: 4 * PIECE_CHARACTERS], special=False)


@pytest.mark.parametrize("unit", [WORDS, "x", "  ", "日本 "])
@pytest.mark.parametrize("make", [byte_level, metaspace, word_pieces], ids=lambda make: make.__name__)
def test_what_is_not_too_long_is_encoded(make, unit, tmp_path):
    save(make(), tmp_path)
    text, tokenizer = unit * (200_000 // len(unit)), Tokenizer(tmp_path)
    ids = tokenizer.encode(text)
    for limit in (len(ids), len(ids) + 1, 10 * len(ids)):
        assert Tokenizer(tmp_path, tokenizer.kind, limit).encode(text) == ids
    assert Tokenizer(tmp_path, tokenizer.kind, 5).encode("a b c d e f") == tokenizer.encode("a b c d e f")


def test_a_conversation_that_is_too_long(tmp_path):
    save(byte_level(), tmp_path, chat_template=CHAT)
    with pytest.raises(CapacityError, match="more than 100 tokens"):
        Tokenizer(tmp_path, max_tokens=100).chat([{"role": "user", "content": WORDS * 100_000}])


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "added_tokens.json", "merges.txt"])
@pytest.mark.parametrize("kind", ["a device", "a pipe", "a large file"])
def test_a_file_that_never_ends_is_refused_before_it_is_read(tmp_path, kind, name):
    """Kind of advisory: a checkpoint that exhausts memory or hangs its host."""
    save(byte_level(), tmp_path)
    path = tmp_path / name
    path.unlink(missing_ok=True)
    if kind == "a device":
        path.symlink_to("/dev/zero")
    elif kind == "a pipe":
        os.mkfifo(path)
    else:
        path.touch()
        os.truncate(path, 2**40)
    with pytest.raises(CheckpointError, match="bytes" if kind == "a large file" else "not a regular file"):
        Tokenizer(tmp_path)
