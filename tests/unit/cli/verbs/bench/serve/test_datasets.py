"""Datasets: what conversations each makes, that seeds repeat them, and what is refused."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from statistics import fmean

import pytest

import inferplane.models
from inferplane.cli.verbs.bench.length_distribution import Lengths, parse_lengths
from inferplane.cli.verbs.bench.serve.datasets import Dataset, DatasetOptions
from inferplane.cli.verbs.bench.serve.prompts import WORDS, TextSource
from inferplane.errors import UsageError

DEMO = Path(inferplane.models.__file__).parent / "demo"


def dataset(path: Path | None = None, *, seed: int = 0, tokenizer: Path | None = None, **options) -> Dataset:
    options.setdefault("inputs", Lengths("fixed", 8, 8))
    options.setdefault("outputs", None)
    texts = TextSource(random.Random(f"texts {seed}"), tokenizer)
    return Dataset(DatasetOptions(path, **options), texts, seed)


def taken(count: int, *args, **options):
    source = dataset(*args, **options)
    return [source.take() for _ in range(count)]


# ---------------------------------------------------------------- random


def test_random_prompts_have_drawn_lengths_and_seeds_repeat_them():
    options = {"inputs": parse_lengths("10-30"), "outputs": parse_lengths("5-9")}
    each = taken(600, **options)
    words = [len(c.requests[0].prompt.split()) for c in each]
    assert set(words) == set(range(10, 31)) and fmean(words) == pytest.approx(20, rel=0.05)
    assert {c.requests[0].output_tokens for c in each} == set(range(5, 10))
    assert len({c.requests[0].prompt for c in each}) == 600, "a cache must find nothing"
    assert taken(5, **options) == each[:5] and taken(5, seed=1, **options) != each[:5]
    assert all(word.isalpha() for word in WORDS) and len(set(WORDS)) == len(WORDS)


def test_a_tokenizer_makes_lengths_exact():
    texts = TextSource(random.Random(0), DEMO)
    lengths = [20, 57, 100, 333]
    assert [texts.count(texts.make(n)) for n in lengths] == pytest.approx(lengths, abs=2)
    assert texts.count(texts.make(100)) > len(texts.make(100).split()) / 3


def test_groups_share_a_prefix():
    each = taken(300, prefix_groups=3, prefix_tokens=12)
    prefixes = Counter(" ".join(c.requests[0].prompt.split()[:12]) for c in each)
    assert len(prefixes) == 3 and min(prefixes.values()) > 60
    assert {len(c.requests[0].prompt.split()) for c in each} == {20}
    assert len({c.requests[0].prompt for c in each}) == 300


def test_random_conversations_have_messages_and_think_times():
    each = taken(400, conversation=parse_lengths("2-4"), think=0.5, prefix_groups=1, prefix_tokens=5)
    assert {len(c.requests) for c in each} == {2, 3, 4}
    assert all(c.requests[0].think_s == 0 for c in each)
    assert fmean(r.think_s for c in each for r in c.requests[1:]) == pytest.approx(0.5, rel=0.1)
    assert all(r.messages[0]["role"] == "user" and not r.prompt for c in each for r in c.requests)
    words = [[len(r.messages[0]["content"].split()) for r in c.requests] for c in each]
    assert all(w[0] == 13 and set(w[1:]) == {8} for w in words), "a conversation begins with its prefix, once"


# ---------------------------------------------------------------- ShareGPT

TALK = [
    {"from": "system", "value": "Be brief."},
    {"from": "human", "value": "What is the capital of France?"},
    {"from": "gpt", "value": "The capital of France is Paris, of course."},
    {"from": "human", "value": "And of Spain, please tell me?"},
    {"from": "gpt", "value": "That is Madrid, which lies in the middle."},
]


@pytest.fixture
def sharegpt(tmp_path):
    entries = [
        {"id": "a", "conversations": TALK},
        {
            "conversations": [
                {"role": "user", "content": "Hello there, you"},
                {"role": "assistant", "content": "Good day."},
            ]
        },
        {"conversations": [{"from": "gpt", "value": "It begins with an answer."}]},
        {"conversations": [{"from": "human", "value": "long " * 5000}, {"from": "gpt", "value": "Yes, it is."}]},
        {"conversations": []},
    ]
    path = tmp_path / "talk.json"
    path.write_text(json.dumps(entries))
    return path


def test_the_first_exchange_of_each_conversation(sharegpt):
    source = dataset(sharegpt)
    found = {c.requests[0].messages[-1]["content"]: c for c in source.entries}
    assert set(found) == {"What is the capital of France?", "Hello there, you"} and source.left_out == 3
    (request,) = found["What is the capital of France?"].requests
    assert [m["role"] for m in request.messages] == ["system", "user"]
    assert request.output_tokens == -(-len(TALK[2]["value"]) // 4), (
        "one token for four characters of the recorded answer"
    )
    assert dataset(sharegpt, outputs=parse_lengths("7")).entries[0].requests[0].output_tokens == 7
    exact = dataset(sharegpt, tokenizer=DEMO)
    texts = TextSource(random.Random(0), DEMO)
    talk = next(c for c in exact.entries if "France" in c.requests[0].messages[-1]["content"])
    assert talk.requests[0].output_tokens == len(texts.encode(TALK[2]["value"]))


def test_whole_conversations(sharegpt):
    source = dataset(sharegpt, whole_conversations=True, think=1.0)
    talk = next(c for c in source.entries if len(c.requests) == 2)
    assert [len(r.messages) for r in talk.requests] == [2, 1] and talk.requests[1].messages[0]["content"] == TALK[3][
        "value"
    ]
    assert talk.requests[0].think_s == 0 < talk.requests[1].think_s


def test_a_file_is_shuffled_by_its_seed_and_begins_again(tmp_path):
    path = tmp_path / "talk.json"
    talks = [
        [{"from": "human", "value": f"prompt number {i}"}, {"from": "gpt", "value": "an answer"}] for i in range(40)
    ]
    path.write_text(json.dumps([{"conversations": talk} for talk in talks]))
    one, other = (dataset(path, seed=seed) for seed in (0, 1))
    assert one.entries == dataset(path, seed=0).entries != other.entries
    first = [one.take() for _ in range(40)]
    assert one.repeats == 0 and one.take() == first[0] and one.repeats == 1
    assert len({c.requests[0].messages[-1]["content"] for c in first}) == 40


def test_of_a_large_file_no_more_is_read_than_is_needed(sharegpt):
    options = DatasetOptions(sharegpt, Lengths("fixed", 8, 8), None)
    some = Dataset(options, TextSource(random.Random(0), None), 0, enough=1)
    assert some.entries == dataset(sharegpt).entries[:1] and some.left_out <= 3


def test_the_source_systems_filtered_list(tmp_path):
    path = tmp_path / "filtered.json"
    path.write_text(json.dumps([["a prompt", 3, 17], ["another", 2, 5]]))
    assert sorted((c.requests[0].prompt, c.requests[0].output_tokens) for c in dataset(path).entries) == [
        ("a prompt", 17),
        ("another", 5),
    ]


# ---------------------------------------------------------------- JSON lines


def lines(tmp_path: Path, *entries, name: str = "a.jsonl") -> Path:
    path = tmp_path / name
    path.write_text("\n".join(e if isinstance(e, str) else json.dumps(e) for e in entries))
    return path


def test_lines_with_prompts_messages_and_conversations(tmp_path):
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "recorded"},
        {"role": "user", "content": "two"},
    ]
    path = lines(
        tmp_path,
        {"prompt": "text", "output_len": 3},
        {"prompt": [1, 2, 3]},
        "",
        {"messages": messages, "max_tokens": 9},
        {"conversation": [{"prompt": "a", "output_len": 2}, {"prompt": "b", "think_s": 1.5}]},
    )
    text, ids, chat, trace = dataset(path, outputs=None).entries
    assert (text.requests[0].prompt, text.requests[0].output_tokens) == ("text", 3)
    assert (ids.requests[0].prompt, ids.requests[0].output_tokens) == ([1, 2, 3], 128)
    assert chat.requests[0].messages == tuple(messages) and chat.requests[0].output_tokens == 9
    assert [(r.messages[0]["content"], r.think_s) for r in trace.requests] == [("a", 0.0), ("b", 1.5)]
    played = dataset(path, whole_conversations=True).entries[2]
    assert [[m["content"] for m in r.messages] for r in played.requests] == [["s", "one"], ["two"]]
    assert dataset(path, outputs=parse_lengths("6")).entries[0].requests[0].output_tokens == 6


def test_lines_of_text(tmp_path):
    path = lines(tmp_path, "first prompt", "second", name="a.txt")
    assert [c.requests[0].prompt for c in dataset(path).entries] == ["first prompt", "second"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("\n \n", "is empty"),
        ("[", "is no list in JSON"),
        ("[]", "no conversation that can be used"),
        ('[{"x": 1}]', "entry 0 has no conversations"),
        ('[{"conversations": [{"from": "human"}]}]', "a message without from and value"),
        ("{", ":1 is not JSON"),
        ("3", "no object"),
        ('{"prompt": 3}', ":1 has no prompt"),
        ('{"prompt": ""}', ":1 has no prompt"),
        ('{"prompt": [1, true]}', ":1 has no prompt"),
        ('{"prompt": "a"}\n{"prompt": "b", "output_len": 0}', ":2: output_len = 0"),
        ('{"prompt": "a", "output_len": "5"}', "output_len = '5'"),
        ('{"messages": [3]}', "messages are no list"),
        ('{"conversation": []}', "no list of objects"),
        ('{"conversation": [{"prompt": "a", "think_s": -1}]}', "think_s = -1"),
        ('{"conversation": [{"prompt": [1]}]}', "token ids"),
        ('{"conversation": [{"prompt": "a", "think_s": 1' + "0" * 400 + "}]}", "think_s = 1"),
        ('{"prompt": "a", "output_len": 3000000000}', "output_len = 3000000000"),
        ('[["a", 1, "x"]]', "entry 0 has 'x' for its tokens out"),
        ('[["a", 1, 1e999]]', "entry 0 has inf for its tokens out"),
        ("[" * 100_000, "is no list in JSON"),
        ('{"prompt": ' + "[" * 100_000, ":1 is not JSON"),
        (r'{"prompt": "\ud800"}', ":1 cannot be sent"),
        (r'[{"conversations": [{"from": "human", "value": "a \udc00"}]}]', "entry 0 cannot be sent"),
    ],
)
def test_files_that_are_refused(text, words, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError, match=words) as caught:
        dataset(path)
    assert str(path) in caught.value.what and (caught.value.remedy or caught.value.there_is)


def test_a_file_that_cannot_be_read(tmp_path):
    (tmp_path / "latin").write_bytes(b"\xe9")
    for name in ("missing", "latin", "."):
        with pytest.raises(UsageError, match="cannot be read"):
            dataset(tmp_path / name)
