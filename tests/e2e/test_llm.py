"""`LLM` as its users meet it, with a tiny random model and tokenizers made on the spot."""

from __future__ import annotations

import asyncio
import json
import random

import numpy as np
import pytest
import torch

from inferplane import LLM, AsyncLLM, SamplingParams
from inferplane.errors import CheckpointError, UsageError
from tests.e2e.tiny_llm import GREEDY, LONG, one, opened, write
from tests.e2e.tiny_models import llama_config, random_model
from tests.e2e.tiny_tokenizers import metaspace
from tests.families.cases import config_of

# ------------------------------------------------------------------ prompts


@pytest.mark.parametrize(("family", "case"), [("gemma3", "scaled"), ("qwen3_next", "mixed"), ("llama", "gqa")])
def test_a_folder_without_tokenizer_takes_token_ids_only(family, case, tmp_path):
    """For some families transformers would invent a tokenizer that encodes every text as one token."""
    random_model(config_of(family, case)).save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 100}')  # holds no vocabulary
    says = "has no tokenizer: .* holds none of its files"
    with LLM(tmp_path, device="cpu", max_model_len=64) as llm:
        for call in (lambda: llm.generate("hello"), lambda: llm.chat([{"role": "user", "content": "hello"}])):
            with pytest.raises(CheckpointError, match=says) as refused:
                call()
            assert refused.value.remedy == "add its tokenizer.json, or pass prompts as token ids"
        with pytest.raises(UsageError, match=f"A regex constrains text, .* {says}") as refused:
            llm.generate([[5, 6]], SamplingParams(regex="a+"))
        assert refused.value.remedy == "add its tokenizer.json, or leave the constraint out"
        result = llm.generate([[5, 6]], SamplingParams(max_tokens=3, ignore_eos=True))[0]
        assert len(result.token_ids) == 3 and result.text == ""

    async def ask() -> None:
        async with AsyncLLM(tmp_path, device="cpu", max_model_len=64) as engine:
            with pytest.raises(CheckpointError, match=says):
                await anext(aiter(engine.generate("hello")))
            params = SamplingParams(max_tokens=3, ignore_eos=True)
            pieces = [piece async for piece in engine.generate([5, 6], params)]
            assert sum(len(piece.token_ids) for piece in pieces) == 3

    asyncio.run(ask())


def test_prompts_in_every_form(llm):
    text, ids = "The lazy dog", llm.tokenizer.encode("The lazy dog")
    want = one(llm, text)
    forms = [text, ids, tuple(ids), np.array(ids), torch.tensor(ids), [np.int64(i) for i in ids]]
    for form in forms:
        assert one(llm, form).token_ids == want.token_ids
        assert one(llm, [form]).prompt_token_ids == ids
    mixed = llm.generate(forms, [SamplingParams(max_tokens=n, temperature=0) for n in range(3, 9)])
    assert [len(r.token_ids) for r in mixed] == list(range(3, 9))
    assert all(want.text.startswith(r.text[:1]) and want.token_ids[:3] == r.token_ids[:3] for r in mixed)
    assert [r.token_ids for r in llm.generate(np.array([ids, ids]), GREEDY)] == [want.token_ids] * 2


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("", "empty"),
        ([[]], "empty"),
        ([""], "empty"),
        ([[1], []], "empty"),
        ([], "No prompts"),
        (None, "no prompt"),
        (5, "no prompt"),
        ([[1], 5], "no prompt"),
        ([1, -1], "-1"),
        ([1, 10**9], "1000000000"),
        ([[1, 2.5]], "2.5"),
        ([[1, None]], "None"),
        ([[True]], "True"),
        ([[[1]]], r"\[1\]"),
        ("a \ud800", "cannot be encoded"),
        (["fine", "also fine", [1, 400]], "400"),
    ],
)
def test_prompts_that_are_none(llm, prompt, says):
    for ask in (llm.generate, llm.logits):
        with pytest.raises(UsageError, match=says):
            ask(prompt)
    if isinstance(prompt, (str, list)) and prompt:
        with pytest.raises(UsageError):
            next(llm.stream(prompt))
    assert not llm.engine.busy


def test_params_for_each_prompt(llm):
    a, b = llm.generate(["x", "y"], [SamplingParams(max_tokens=2, temperature=0), GREEDY])
    assert (len(a.token_ids), len(b.token_ids)) == (2, 24)
    for wrong in ([GREEDY], [GREEDY] * 3, []):
        with pytest.raises(UsageError, match=rf"{len(wrong)} sampling params for 2 prompts"):
            llm.generate(["x", "y"], wrong)


# ------------------------------------------------------------------ ends


def test_stop_strings(llm):
    """In random text, cut anywhere, also within characters and tokens; the same from generate and stream."""
    draw, seen = random.Random(2), set()
    for seed in range(6):
        params = {"max_tokens": 40, "temperature": 1.0, "seed": seed}
        whole = one(llm, "Hello", **params)
        assert whole.finish_reason == "length" and whole.text == llm.tokenizer.decode(whole.token_ids)
        for _ in range(6):
            i = draw.randrange(len(whole.text) - 6)
            stop = whole.text[i : i + draw.randint(1, 6)]
            if "\ufffd" in stop:
                continue
            cut = whole.text.find(stop)
            got = one(llm, "Hello", **params, stop=[stop, "never there"])
            assert (got.text, got.finish_reason) == (whole.text[:cut], "stop")
            assert got.token_ids == whole.token_ids[: len(got.token_ids)]
            assert stop in llm.tokenizer.decode(got.token_ids)
            assert stop not in llm.tokenizer.decode(got.token_ids[:-1])
            deltas = list(llm.stream("Hello", SamplingParams(**params, stop=stop)))
            assert "".join(d.text for d in deltas) == got.text
            assert [t for d in deltas for t in d.token_ids] == got.token_ids
            assert deltas[-1].finish_reason == "stop" and not any(d.finish_reason for d in deltas[:-1])
            seen.add(len(got.token_ids) - len(llm.generate("Hello", SamplingParams(**params))[0].token_ids))
    assert len(seen) > 5


def test_a_stop_string_in_the_last_token_allowed(llm):
    """It is an end by stop, not by length."""
    tested = 0
    for seed in range(3):
        ids = one(llm, seed=seed, temperature=1.0, ignore_eos=True).token_ids
        for n in range(1, 24):
            text = llm.tokenizer.decode(ids[:n])
            if text.find(text[-1:]) == len(text) - 1 and not text.endswith("\ufffd"):
                got = one(llm, seed=seed, temperature=1.0, ignore_eos=True, max_tokens=n, stop=text[-1])
                assert (got.finish_reason, got.token_ids, got.text) == ("stop", ids[:n], text[:-1])
                tested += 1
    assert tested > 5


def test_end_tokens(llm, folder):
    whole = one(llm, ignore_eos=True, seed=4, temperature=1.0)
    end = whole.token_ids[9]
    first = whole.token_ids.index(end)
    got = one(llm, stop_token_ids=[end], seed=4, temperature=1.0)
    assert (got.token_ids, got.finish_reason) == (whole.token_ids[: first + 1], "stop")
    assert got.text == llm.tokenizer.decode(whole.token_ids[:first])  # the token that ends it is not part of the text
    deltas = list(llm.stream("Hello", SamplingParams(max_tokens=24, stop_token_ids=[end], seed=4)))
    assert "".join(d.text for d in deltas) == got.text and deltas[-1].token_ids == [end]
    assert one(llm, stop_token_ids=end, seed=4, temperature=1.0, ignore_eos=True).token_ids == got.token_ids


def test_the_models_own_end_tokens(folder, tmp_path):
    with opened(folder) as llm:
        whole = one(llm)
    for name, value in (("generation_config.json", [5, whole.token_ids[6]]), ("config.json", whole.token_ids[6])):
        path = write(tmp_path / name.split(".")[0]) / name
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": value}))
        first = whole.token_ids.index(whole.token_ids[6])
        with opened(path.parent) as llm:
            assert one(llm).token_ids == whole.token_ids[: first + 1] and one(llm).finish_reason == "stop"
            assert one(llm, ignore_eos=True).token_ids == whole.token_ids
            late = one(llm, min_tokens=15)
            assert len(late.token_ids) >= 15 and not {5, value if isinstance(value, int) else value[1]} & {
                *late.token_ids[:14]
            }
            ids = llm.tokenizer.encode("Hello")
            assert llm.generate([ids, ids], GREEDY)[1].token_ids == whole.token_ids[: first + 1]


def test_min_tokens_forbids_end_tokens(llm):
    whole = one(llm)
    ends = sorted({*whole.token_ids})
    got = one(llm, stop_token_ids=ends, min_tokens=7)
    assert len(got.token_ids) >= 7 and not {*got.token_ids[:6]} & {*ends}
    together = llm.generate(
        ["Hello"] * 3, [GREEDY, SamplingParams(max_tokens=24, temperature=0, stop_token_ids=ends, min_tokens=7), GREEDY]
    )
    assert [r.token_ids for r in together] == [whole.token_ids, got.token_ids, whole.token_ids]


def test_timings(llm):
    got = one(llm)
    t = got.timings
    assert 0 <= t.queue_s <= t.first_token_s <= t.total_s < 60
    assert (t.prompt_tokens, t.generated_tokens) == (len(got.prompt_token_ids), 24)
    assert t.tokens_per_s == pytest.approx(23 / (t.total_s - t.first_token_s))
    assert one(llm, max_tokens=1).timings.tokens_per_s == 0


# ------------------------------------------------------------------ sampling


def test_seeds(llm):
    def sample(prompt="Hello", **options):
        return one(llm, prompt, **{"temperature": 1.3, "seed": 11, **options}).token_ids

    alone = sample()
    assert alone == sample() != sample(seed=12)
    assert sample(seed=None) != sample(seed=None)
    others = [SamplingParams(max_tokens=5 + 3 * i, temperature=0.5 * i, seed=i) for i in range(7)]
    together = llm.generate(
        [*(f"{LONG}{i}" for i in range(3)), "Hello", *"abcd"],
        [*others[:3], SamplingParams(max_tokens=24, temperature=1.3, seed=11), *others[3:]],
    )
    assert together[3].token_ids == alone
    assert sample(seed=-1) != alone and sample(seed=-(2**63))  # any signed integer of 64 bits


def test_cuts(llm):
    best = one(llm).token_ids
    for cut in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-30}, {"temperature": 1e-6}):
        assert one(llm, **{"temperature": 1.0, "seed": 3, **cut}).token_ids == best
    prompt = llm.tokenizer.encode("Hello")
    for cut in ({"top_k": 3}, {"top_p": 0.4}, {"min_p": 0.3}, {"top_k": 5, "top_p": 0.5, "min_p": 0.1}):
        ids = one(llm, temperature=1.5, seed=5, max_tokens=60, **cut).token_ids
        rows = llm.logits([[*prompt, *ids]])[0][len(prompt) - 1 : -1]
        chosen, ranks = [], []
        for row, token in zip((rows / 1.5).softmax(-1), ids):
            p, order = row.sort(descending=True)
            rank = int((order == token).nonzero())
            k = cut.get("top_k", len(p))
            before = float(p[:rank].sum() / p[:k].sum())
            assert rank < k and before < cut.get("top_p", 1.0) and p[rank] >= 0.999 * cut.get("min_p", 0) * p[0]
            chosen.append(token)
            ranks.append(rank)
        assert len({*ranks}) > 1  # it is not greedy


def test_sampling_follows_the_distribution(llm):
    """A first token drawn 600 times: the counts of the likeliest tokens are within four standard deviations."""
    ids = llm.tokenizer.encode("Hello")
    p = llm.logits([ids])[0][-1].softmax(-1)
    params = [SamplingParams(max_tokens=1, temperature=1.0, seed=i) for i in range(600)]
    drawn = torch.tensor([r.token_ids[0] for r in llm.generate([ids] * 600, params)])
    counts = torch.bincount(drawn, minlength=len(p)).float()
    for i in p.topk(12)[1].tolist():
        assert abs(counts[i] - 600 * p[i]) <= 4 * (600 * p[i] * (1 - p[i])).sqrt() + 1


# ------------------------------------------------------------------ streams


def test_streams_are_what_generate_returns(llm):
    for seed in range(4):
        params = SamplingParams(max_tokens=30, temperature=1.0, seed=seed, ignore_eos=True)
        want, deltas = llm.generate(LONG, params)[0], list(llm.stream(LONG, params))
        assert "".join(d.text for d in deltas) == want.text
        assert [t for d in deltas for t in d.token_ids] == want.token_ids
        assert [d.finish_reason for d in deltas] == [None] * (len(deltas) - 1) + [want.finish_reason]
        assert deltas[-1].timings.generated_tokens == 30 and deltas[0].timings is None


def test_a_stream_closed_early(llm):
    stream = llm.stream("Hello", SamplingParams(max_tokens=50))
    assert llm.engine.pools.used == 0  # nothing happens before the first piece is asked for
    next(stream)
    assert llm.engine.pools.used > 0
    stream.close()
    assert llm.engine.pools.used == 0 and list(stream) == []
    for _ in llm.stream("Hello"):
        break  # dropped without being closed


def test_streams_side_by_side(llm):
    """Each gets its own tokens, whoever's turn makes the step; so does a call of generate in between."""
    params = [SamplingParams(max_tokens=n, temperature=1.0, seed=n, stop="\x00") for n in (30, 9, 17)]
    texts = ["Hello", LONG, "x"]
    want = [llm.generate(t, p)[0] for t, p in zip(texts, params)]
    streams = [llm.stream(t, p) for t, p in zip(texts, params)]
    got: list = [[next(s)] for s in streams]
    assert one(llm).token_ids == one(llm).token_ids
    draw = random.Random(0)
    while live := [i for i, g in enumerate(got) if g[-1].finish_reason is None]:
        got[i := draw.choice(live)].append(next(streams[i]))
    for deltas, result in zip(got, want):
        assert "".join(d.text for d in deltas) == result.text
        assert [t for d in deltas for t in d.token_ids] == result.token_ids
        assert deltas[-1].finish_reason == result.finish_reason


def test_a_stream_left_behind_stops_where_it_should(llm):
    whole = one(llm, max_tokens=20)
    stop = whole.text[8:10]
    stream = llm.stream("Hello", SamplingParams(max_tokens=20, temperature=0, stop=stop))
    head = next(stream)
    one(llm, LONG, max_tokens=40)  # steps the stream's request to its end as well
    rest = list(stream)
    assert head.text + "".join(d.text for d in rest) == whole.text[: whole.text.find(stop)]
    assert rest[-1].finish_reason == "stop"


# ------------------------------------------------------------------ logits


def test_logits(llm):
    many = [llm.tokenizer.encode(LONG), [7], [5, 6, 7]]
    got = llm.logits(many)
    assert [(tuple(g.shape), g.dtype, g.device.type) for g in got] == [
        ((len(ids), 400), torch.float32, "cpu") for ids in many
    ]
    for chunk_tokens in (1, 5, 16, 500):
        for a, b in zip(got, llm.logits(many, chunk_tokens=chunk_tokens)):
            assert (a - b).abs().max() < 1e-5 * a.abs().max()
    assert torch.equal(llm.logits(LONG)[0], got[0])  # a prompt in every form, as in generate
    assert one(llm, many[0]).token_ids[0] == int(got[0][-1].argmax())
    for wrong in (0, -3):
        with pytest.raises(UsageError, match="chunk_tokens"):
            llm.logits(many, chunk_tokens=wrong)


# ------------------------------------------------------------------ chat, text, no text


def test_chat(llm, tmp_path):
    messages = [{"role": "user", "content": "Hello"}]
    rendered = llm.tokenizer.encode("<user>Hello\n<bot>")
    result = llm.chat(messages, GREEDY)
    assert result.prompt_token_ids == rendered and result.token_ids == one(llm, rendered).token_ids
    assert "".join(d.text for d in llm.stream_chat(messages, GREEDY)) == result.text
    with opened(write(tmp_path, chat_template=None)) as mute:
        for ask in (mute.chat, mute.stream_chat):
            with pytest.raises(UsageError, match="no chat template"):
                ask(messages)


def test_chat_of_async_llm(llm, tmp_path):
    folder = write(tmp_path)

    async def run(messages, **more):
        async with AsyncLLM(folder, device="cpu", dtype="float32", max_num_seqs=4) as found:
            return [piece async for piece in found.chat(messages, GREEDY, **more)]

    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    want = llm.chat([{"role": "user", "content": "Hel\nlo"}], GREEDY)
    pieces = asyncio.run(run([{"role": "user", "content": parts}], priority=1))
    assert [t for piece in pieces for t in piece.token_ids] == want.token_ids
    assert "".join(piece.text for piece in pieces) == want.text and pieces[-1].finish_reason == want.finish_reason
    for messages, more, says in (
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, "Images are not supported"),
        ([{"role": "bot", "content": "x"}], {}, "the role 'bot'"),
        ([{"role": "user", "content": "x"}], {"max_tokens": 3}, "takes no max_tokens"),
    ):
        with pytest.raises(UsageError, match=says):
            asyncio.run(run(messages, **more))


def test_words_keep_their_spaces(tmp_path):
    """Tokenizers that drop the space before a text's first word must not do so in the middle of one."""
    with opened(write(tmp_path, metaspace)) as llm:
        for seed in range(4):
            got = llm.generate("Hello", SamplingParams(max_tokens=30, temperature=1.0, seed=seed))[0]
            whole = llm.tokenizer.decode([*got.prompt_token_ids, *got.token_ids])
            if "\ufffd" not in whole:
                assert "Hello" + got.text == whole


def test_without_a_tokenizer(tmp_path):
    with opened(write(tmp_path, None)) as llm:
        got = llm.generate([[1, 2, 3]], GREEDY)[0]
        assert got.text == "" and len(got.token_ids) == 24
        assert [t for d in llm.stream([1, 2, 3], GREEDY) for t in d.token_ids] == got.token_ids
        for ask in (lambda: one(llm, "Hello"), lambda: one(llm, [1], stop="x"), lambda: llm.chat([])):
            with pytest.raises(CheckpointError, match="no tokenizer"):
                ask()
    config = llama_config()
    config.architectures = ["LlamaForCausalLM"]
    config.eos_token_id = got.token_ids[0]
    with LLM(config, device="cpu", load_format="dummy") as llm:
        assert len(one(llm, [1, 2], ignore_eos=True).token_ids) == 24
        with pytest.raises(UsageError, match="no tokenizer"):
            one(llm, "Hello")
