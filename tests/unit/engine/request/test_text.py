"""Incremental decoding and stop strings, against decoding the whole."""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import sys
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferplane.dialogue.renderer import Renderer
from inferplane.engine.request.text import Detokenizer, Tokenizer, end_ids
from inferplane.errors import CheckpointError, InferplaneWarning, UsageError
from tests.e2e.tiny_tokenizers import CHAT, byte_level, metaspace, save

# Characters of one to four bytes, combining ones, all kinds of spaces; but not U+FFFD, which stands for broken ones.
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), max_size=40)
PIECES = st.lists(
    st.sampled_from(["a", " b", "é", "日本", "🎉", "👩‍💻", " ", "  ", "\n", ",", ".", "Hello world"]), max_size=12
)


@pytest.fixture(scope="module")
def bytes_(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    save(byte_level(), folder)
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def spaces(tmp_path_factory):
    folder = tmp_path_factory.mktemp("spaces")
    anyway = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"  # what transformers 5 asks for
    save(metaspace(), folder, clean_up_tokenization_spaces=True, **{anyway: True})
    return Tokenizer(folder)


def test_long_texts_are_not_warned_of(bytes_, caplog):
    """What is too long for a model is said at admission; a library's own line would end up in the server's log."""
    logger = logging.getLogger("transformers")
    before, logger.propagate = logger.propagate, True
    try:
        assert len(bytes_.encode("word " * 20_000)) > 10_000
    finally:
        logger.propagate = before
    assert not caplog.records and bytes_._inner.model_max_length > 2**40


def run(tokenizer, ids, stop=(), prompt=(), sizes=(1,)):
    """Push ids in groups of the given sizes; returns the pieces that were safe to show, the last at the end."""
    text, out, at, turn = Detokenizer(tokenizer, stop, prompt), [], 0, 0
    while at < len(ids) and not text.stopped:
        n = sizes[turn % len(sizes)]
        text.push(ids[at : at + n])
        out.append(text.take())
        at, turn = at + n, turn + 1
    out.append(text.take(end=True))
    assert "".join(out) == text.text and text.take(end=True) == ""
    return text, out


@given(TEXT)
def test_every_text_comes_back(bytes_, text):
    ids = bytes_.encode(text)
    assert bytes_.decode(ids) == text == run(bytes_, ids)[0].text


@given(st.lists(st.integers(0, 399), max_size=40), st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_any_tokens_decode_as_a_whole(bytes_, ids, sizes):
    """Also bytes that are no character, and special tokens in between."""
    text, pieces = run(bytes_, ids, sizes=sizes)
    assert text.text == bytes_.decode(ids)
    shown = "".join(pieces[:-1])
    assert bytes_.decode(ids).startswith(shown)


@given(st.lists(st.tuples(st.integers(0, 399), st.integers(1, 40)), max_size=30), st.integers(1, 4))
def test_long_runs_decode_as_a_whole(bytes_, runs, size):
    ids = [i for i, n in runs for _ in range(n)]
    assert run(bytes_, ids, sizes=(size,))[0].text == bytes_.decode(ids)


@given(st.lists(st.sampled_from(range(128, 256)), min_size=1, max_size=200), st.integers(1, 4))
def test_parts_of_characters_in_any_order_decode_as_a_whole(bytes_, raw, size):
    ids = [Bytes(bytes_).ids[b] for b in raw]
    assert run(bytes_, ids, sizes=(size,))[0].text == bytes_.decode(ids) == bytes(raw).decode(errors="replace")


@pytest.mark.parametrize("broken", range(14, 20))
@pytest.mark.parametrize("whole", ["é", "日", "🎉"])
def test_a_character_after_many_broken_ones_is_waited_for(bytes_, broken, whole):
    """However many are given up, the last few bytes may yet become a character."""
    one = Bytes(bytes_)
    ids = one.ids[0xFF : 0xFF + 1] * broken + one(whole) + one("b")
    assert run(bytes_, ids)[0].text == "\ufffd" * broken + whole + "b"


@given(st.lists(PIECES.map("".join) | st.binary(max_size=60).map(lambda b: b"\xff" + b), max_size=6), st.integers(1, 4))
def test_runs_of_bytes_between_texts(spaces, parts, size):
    """Decoders that spell bytes as tokens give up a whole run for one byte that does not belong to a character."""
    ids = []
    for part in parts:
        one = [spaces._inner.convert_tokens_to_ids(f"<0x{b:02X}>") for b in part] if isinstance(part, bytes) else []
        ids += one or [*spaces.encode(part), *spaces.encode("a")]
    assert run(spaces, ids, sizes=(size,))[0].text == spaces.decode(ids)


def test_one_broken_character_after_many_that_are_whole(spaces):
    def ids(data):
        return [spaces._inner.convert_tokens_to_ids(f"<0x{b:02X}>") for b in data]

    text = "日本語" * 30
    found, pieces = run(spaces, [*ids(text.encode()), *ids(b"\xff" * 50), *ids("日本".encode()), *spaces.encode("a")])
    assert found.text.startswith(text) and found.text.count("\ufffd") == 56 and found.text.endswith("a")
    assert "".join(pieces[: 3 * len(text)]) == text  # and none of it was held back


@pytest.mark.parametrize("stream", ["bytes", "special", "parts", "astride", "text"])
def test_a_token_costs_the_same_after_any_others(bytes_, stream):
    one = Bytes(bytes_)
    unit = {
        "bytes": one.ids[0xFF : 0xFF + 1],
        "special": [1],
        "parts": [one.ids[b] for b in "🎉".encode()[:3]],
        "text": one("a"),
    }
    if stream == "astride":  # tokens that each end within a character

        class Astride:
            """`日` without its last byte, which the next token begins with."""

            parts = ("日".encode()[:2], "日".encode()[2:] + "日".encode()[:2])

            def decode(self, ids):
                return b"".join(self.parts[i] for i in ids).decode(errors="replace")

        tokenizer, ids = Astride(), [0] + [1] * 600
    else:
        tokenizer, ids = bytes_, one("x") + (unit[stream] * 600)[:600]
    decoded = 0

    class Counting:
        def decode(self, ids):
            nonlocal decoded
            decoded += len(ids)
            return tokenizer.decode(ids)

    text, pieces = run(Counting(), ids)
    assert text.text == tokenizer.decode(ids)
    assert decoded <= 100 * len(ids)
    if stream == "astride":
        assert pieces[1:600] == ["日"] * 599  # each is shown as soon as it is whole


@given(PIECES.map("".join))
def test_spaces_and_byte_pieces(spaces, text):
    """The cleaning that tokenizers may ask for (' ,' -> ',') is not done: the text is the tokens'."""
    assert run(spaces, spaces.encode(text))[0].text == text == spaces.decode(spaces.encode(text))


@given(PIECES.map("".join), PIECES.map("".join))
def test_text_continues_the_prompt(spaces, bytes_, before, after):
    for tokenizer in (spaces, bytes_):
        ids, n = tokenizer.encode(before + after), len(tokenizer.encode(before))
        if tokenizer.decode(ids[:n]) == before and before:  # else a token crosses the border
            assert before + run(tokenizer, ids[n:], prompt=ids[:n])[0].text == before + after


def test_a_first_word_keeps_its_space(spaces):
    ids = spaces.encode("Hello world")
    n = next(i for i in range(1, len(ids)) if spaces.decode(ids[:i]) == "Hello")
    assert run(spaces, ids[n:], prompt=ids[:n])[0].text == " world"
    assert run(spaces, ids[n:])[0].text == "world"


def test_a_space_after_special_tokens(spaces, bytes_):
    for tokenizer in (spaces, bytes_):
        ids, eos = tokenizer.encode("Hello world"), 1
        for at in range(len(ids)):
            assert run(tokenizer, [*ids[:at], eos, eos, *ids[at:]], prompt=tokenizer.encode("x"))[0].text == (
                run(tokenizer, ids, prompt=tokenizer.encode("x"))[0].text
            )

        for specials in (1, 5, 6, 7, 40):
            prompt = [*tokenizer.encode("x"), *[eos] * specials]
            assert run(tokenizer, ids, prompt=prompt)[0].text == run(tokenizer, ids, prompt=prompt[:1])[0].text
            assert run(tokenizer, ids, prompt=[eos] * specials)[0].text == tokenizer.decode(ids)


def test_parts_of_a_character_are_held_back(bytes_):
    ids = [bytes_.encode("a")[0], *Bytes(bytes_)("é🎉"), *bytes_.encode("b")]
    _, pieces = run(bytes_, ids)
    assert pieces == ["a", "", "é", "", "", "", "🎉", "b", ""]
    _, pieces = run(bytes_, ids[:4])
    assert pieces == ["a", "", "é", "", "\ufffd"]  # the end of the text: no more will come
    text, _ = run(bytes_, Bytes(bytes_)("é")[1:], prompt=Bytes(bytes_)("é")[:1])
    assert text.text == "é"  # the prompt ended within a character


class Bytes:
    """Encodes byte by byte, whatever the merges."""

    def __init__(self, tokenizer):
        alphabet = [chr(b) for b in (*range(33, 127), *range(161, 173), *range(174, 256))]
        rest = iter(range(256, 512))
        shown = [c if (c := chr(b)) in alphabet else chr(next(rest)) for b in range(256)]
        self.ids = [tokenizer._inner.convert_tokens_to_ids(c) for c in shown]

    def __call__(self, text):
        return [self.ids[b] for b in text.encode()]


# ------------------------------------------------------------------ stop strings


@given(TEXT, st.lists(st.text(min_size=1, max_size=4), min_size=1, max_size=3), st.integers(1, 3), st.data())
def test_stop_strings(bytes_, text, stops, size, data):
    """The text is cut where the first of them begins, and nothing that might begin one is shown before."""
    if text:
        i = data.draw(st.integers(0, len(text) - 1))
        stops.append(text[i : i + data.draw(st.integers(1, 5))])
    stops = [s for s in stops if "\ufffd" not in s and s.isprintable()] or ["zz"]
    found, pieces = run(bytes_, bytes_.encode(text), stops, sizes=(size,))
    at = [text.find(s) for s in stops if s in text]
    assert found.stopped == bool(at)
    if found.stopped:  # the stop string that is complete first decides; then the one that began first
        ends = min(text.find(s) + len(s) for s in stops if s in text)
        assert len(found.text) < ends
        assert text.startswith(found.text) and any(text.startswith(s, len(found.text)) for s in stops)
    elif not found.stopped:
        assert found.text == text
    assert not any(s in found.text for s in stops)
    for i in range(len(pieces)):
        assert found.text.startswith("".join(pieces[: i + 1]))


def test_what_might_begin_a_stop_string_is_held_back(bytes_):
    one = Bytes(bytes_)
    assert run(bytes_, one("a<en<end>b"), ["<end>"])[1] == ["a", "", "", "", "<en", "", "", "", "", ""]
    assert run(bytes_, one("aaab"), ["aab"])[1] == ["", "", "a", "", ""]
    assert run(bytes_, one("a\n\nb"), ["\n\n\n"])[1] == ["a", "", "", "\n\nb", ""]
    assert run(bytes_, one("a\n"), ["\n\n"])[1] == ["a", "", "\n"]
    text, pieces = run(bytes_, one("abcd"), ["cd", "bcd", "d"])
    assert (text.text, text.stopped, "".join(pieces)) == ("a", True, "a")


def test_one_token_may_hold_the_stop_string_and_more(spaces):
    ids = spaces.encode("The quick brown fox")
    assert max(len(spaces.decode([i])) for i in ids) > 3
    text, _ = run(spaces, ids, ["ick b"])
    assert (text.text, text.stopped) == ("The qu", True)


# ------------------------------------------------------------------ the tokenizer


def test_encoding(bytes_, tmp_path):
    assert bytes_.encode("") == []
    with pytest.raises(UsageError, match=r"cannot be encoded: '\\ud800'"):
        bytes_.encode("\ud800")
    with pytest.raises(CheckpointError, match="no tokenizer"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="no tokenizer"):
        Tokenizer(tmp_path)


TOLD = """
import json, sys
from pathlib import Path
from inferplane.engine.request.text import Tokenizer
for folder, kind in json.loads(sys.argv[1]):
    t = Tokenizer(Path(folder), kind)
    ids = t.encode("Hello <eos> wörld")
    special, plain = t.fast.all_special_ids, t.fast.encode("a b", add_special_tokens=False)
    print(json.dumps([t.kind, ids, t.decode(ids), special, plain]))
sys.exit("torch was imported" if "torch" in sys.modules else 0)
"""


def test_who_is_told_the_kind_loads_the_same_tokenizer_without_torch(tmp_path):
    """What the server's process does: its engine's has chosen, and tells."""
    classes = ("PreTrainedTokenizerFast", "LlamaTokenizerFast", "Qwen2TokenizerFast")
    folders = {tmp_path / f"{make.__name__}-{c}": (make, c) for make in (byte_level, metaspace) for c in classes}
    chosen = []
    for folder, (make, name) in folders.items():
        save(make(), folder)
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": name}))
        chosen.append(Tokenizer(folder))
    want = []
    for t in chosen:
        ids = t.encode("Hello <eos> wörld")
        special, plain = t.fast.all_special_ids, t.fast.encode("a b", add_special_tokens=False)
        want.append([t.kind, ids, t.decode(ids), special, plain])
    assert len({kind for kind, *_ in want}) > 1
    told = json.dumps([[str(t.folder), t.kind] for t in chosen])
    done = subprocess.run([sys.executable, "-c", TOLD, told], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == want


def test_a_kind_is_loaded_with_what_all_classes_take(bytes_, monkeypatch):
    """mistral-common's refuses what only AutoTokenizer and most classes know."""
    from transformers import tokenization_utils_base

    class Strict:
        @classmethod
        def from_pretrained(cls, folder, *, local_files_only):
            assert folder == str(bytes_.folder) and local_files_only
            return cls()

    monkeypatch.setattr(tokenization_utils_base, "Strict", Strict, raising=False)
    assert type(Tokenizer(bytes_.folder, "transformers.tokenization_utils_base.Strict").fast) is Strict


def test_a_kind_that_is_none_of_transformers_is_not_imported(bytes_):
    for kind in ("this.T", "T", ""):
        assert Tokenizer(bytes_.folder, kind).kind == bytes_.kind
    assert "this" not in sys.modules


def test_code_in_a_checkpoint_is_not_run(bytes_, tmp_path):
    save(byte_level(), tmp_path)
    trap = "import pathlib; pathlib.Path(__file__).with_name('ran').touch()\nclass T: pass\n"
    (tmp_path / "tokenization_evil.py").write_text(trap)
    path = tmp_path / "tokenizer_config.json"
    entries = json.loads(path.read_text()) | {"auto_map": {"AutoTokenizer": ["tokenization_evil.T", None]}}
    path.write_text(json.dumps(entries | {"tokenizer_class": "T"}))
    with contextlib.suppress(CheckpointError):  # to refuse is right, to take the tokenizer.json beside it as well
        assert Tokenizer(tmp_path).encode("a") == bytes_.encode("a")
    assert Tokenizer(tmp_path, bytes_.kind).encode("a") == bytes_.encode("a")
    assert not (tmp_path / "ran").exists()


LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (LOOP, "takes longer than"),
        ("{% if messages[0].content == 'hang' %}" + LOOP + "{% endif %}fine", "takes longer than"),
        ("{{ 'x' * 20000000 }}", "writes more than"),
        ("{{ 'x' * 2000000000 }}", "MemoryError"),
        ("{% for %}", r"does not compile \(TemplateSyntaxError: .*, line 1\)"),
    ],
)
def test_chat_with_a_template_that_does_harm(tmp_path, template, said, monkeypatch):
    """It has limits, as in the server. Kind of advisory: a checkpoint's template stalls its host."""
    if said == "takes longer than":
        monkeypatch.setattr("inferplane.dialogue.template.Renderer", partial(Renderer, render_s=0.5))
    save(byte_level(), tmp_path, chat_template=template)
    tokenizer = Tokenizer(tmp_path)
    for _ in range(2):
        with pytest.raises(UsageError, match=said):
            tokenizer.chat([{"role": "user", "content": "hang"}])
    if template.endswith("fine"):
        assert tokenizer.decode(tokenizer.chat([{"role": "user", "content": "hi"}])) == "fine"


def test_chat(tmp_path):
    save(byte_level(), tmp_path / "with", chat_template=CHAT)
    save(byte_level(), tmp_path / "without")
    tokenizer = Tokenizer(tmp_path / "with")
    messages = [{"role": "user", "content": "hi <eos>"}, {"role": "bot", "content": "日本"}]
    assert tokenizer.decode(tokenizer.chat(messages)) == "<user>hi \n<bot>日本\n<bot>"
    with pytest.raises(UsageError, match="no chat template"):
        Tokenizer(tmp_path / "without").chat(messages)
    save(byte_level(), tmp_path / "strict", chat_template="{{ raise_exception('no system role') }}")
    with pytest.raises(UsageError, match="no system role"):
        Tokenizer(tmp_path / "strict").chat(messages)


def test_end_ids(tmp_path):
    assert end_ids(tmp_path) == frozenset()
    (tmp_path / "config.json").write_text('{"eos_token_id": 5}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert end_ids(tmp_path) == {5, 7, 8}
    (tmp_path / "config.json").write_text('{"eos_token_id": null}')
    save(byte_level(), tmp_path)
    assert end_ids(tmp_path) | Tokenizer(tmp_path).own_end_ids == {1, 7, 8}
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.warns(InferplaneWarning, match=r"generation_config\.json"):
        assert end_ids(tmp_path) == frozenset()
