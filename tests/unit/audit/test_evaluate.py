"""Perplexity and divergence, held against direct arithmetic and transformers; the page; the verb."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch

from inferplane import LLM
from inferplane.audit import evaluate, score_windows
from inferplane.audit.page import write_page
from inferplane.calibrate.texts import Window
from inferplane.errors import UsageError
from tests.e2e.tiny_models import logits_of
from tests.families.cases import make


class Fixed:
    """Logits that are given, by the first token of a window."""

    def __init__(self, logits):
        self.logits_of = logits

    def logits(self, prompts):
        return [self.logits_of[ids[0]] for ids in prompts]


def draw(windows=8, tokens=70, vocab=11, seed=0):
    g = torch.Generator().manual_seed(seed)
    found = [
        Window("ab"[i % 2], [i, *torch.randint(0, vocab, (tokens - 1,), generator=g).tolist()]) for i in range(windows)
    ]
    logits = {i: torch.randn(tokens, vocab, generator=g) for i in range(windows)}
    other = {i: value + 0.3 * torch.randn(tokens, vocab, generator=g) for i, value in logits.items()}
    return found, Fixed(logits), Fixed(other)


def test_figures_are_those_of_direct_arithmetic():
    windows, model, reference = draw()
    found = evaluate(score_windows(model, windows, reference), seed=3)
    p = torch.cat([model.logits_of[w.ids[0]][:-1] for w in windows]).double().log_softmax(-1)
    q = torch.cat([reference.logits_of[w.ids[0]][:-1] for w in windows]).double().log_softmax(-1)
    ids = torch.tensor([i for w in windows for i in w.ids[1:]])[:, None]
    assert found.tokens == 8 * 69 and found.windows == 8
    assert found.perplexity.value == pytest.approx((-p.gather(1, ids).mean()).exp().item(), rel=1e-6)
    assert found.reference_perplexity.value == pytest.approx((-q.gather(1, ids).mean()).exp().item(), rel=1e-6)
    ratio = (q.gather(1, ids) - p.gather(1, ids)).mean().exp().item()
    assert found.ratio.value == pytest.approx(ratio, rel=1e-6)
    kl = (q.exp() * (q - p)).sum(-1)
    assert found.divergence.value == pytest.approx(kl.mean().item(), rel=1e-5)
    assert found.agreement.value == pytest.approx((p.argmax(-1) == q.argmax(-1)).double().mean().item())
    for figure in (found.perplexity, found.ratio, found.divergence, found.agreement):
        assert figure.low < figure.value < figure.high
    assert [part.name for part in found.by_position] == ["1-15", "16-30", "31-60", "61-69"]
    assert sum(part.tokens for part in found.by_position) == found.tokens
    rows = torch.arange(8)[:, None] * 69 + torch.arange(15, 30)
    assert found.by_position[1].divergence == pytest.approx(kl[rows.flatten()].mean().item(), rel=1e-5)
    assert [part.name for part in found.by_file] == ["a", "b"]
    first = torch.cat([kl[69 * i : 69 * (i + 1)] for i in range(0, 8, 2)]).mean().item()
    assert found.by_file[0].divergence == pytest.approx(first, rel=1e-5)


def test_a_model_against_itself():
    windows, model, _ = draw()
    found = evaluate(score_windows(model, windows, model))
    assert (
        tuple(found.ratio) == (1, 1, 1) and tuple(found.divergence) == (0, 0, 0) and tuple(found.agreement) == (1, 1, 1)
    )


def test_pairs_make_intervals_narrow():
    """Windows of very different difficulty: the ratio's interval does not have their spread."""
    windows, model, _ = draw(windows=20)
    for i, value in model.logits_of.items():
        value.mul_(1 + i)
    reference = Fixed({i: value * 1.01 for i, value in model.logits_of.items()})
    found = evaluate(score_windows(model, windows, reference))
    assert (found.ratio.high / found.ratio.low - 1) < 0.1 * (found.perplexity.high / found.perplexity.low - 1)


def test_what_cannot_be_evaluated():
    windows, model, _ = draw()
    with pytest.raises(UsageError, match="vocabulary of 11 tokens, the reference one of 7"):
        score_windows(model, windows, Fixed({i: value[:, :7] for i, value in model.logits_of.items()}))
    with pytest.raises(UsageError, match="No windows"):
        evaluate([])


@pytest.mark.parametrize(("dtype", "close"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_perplexity_is_that_of_transformers(dtype, close, tmp_path):
    reference = make("llama", "gqa", tmp_path)
    g = torch.Generator().manual_seed(5)
    with LLM(tmp_path, device="cpu", dtype=dtype, max_model_len=64, max_num_seqs=1) as llm:
        windows = [Window("a", torch.randint(0, llm.engine.vocab, (60,), generator=g).tolist()) for _ in range(4)]
        found = evaluate(score_windows(llm, windows))
    losses = [
        torch.nn.functional.cross_entropy(logits_of(reference, w.ids)[:-1].float(), torch.tensor(w.ids[1:]))
        for w in windows
    ]
    assert math.log(found.perplexity.value) == pytest.approx(torch.stack(losses).mean().item(), rel=close)


def test_a_quantized_cache_counts(tmp_path):
    """A prompt attends to what is in the cache, not to entries before they are quantized."""
    make("llama", "gqa", tmp_path)
    g = torch.Generator().manual_seed(5)
    options = {"device": "cpu", "dtype": "bfloat16", "max_model_len": 64, "max_num_seqs": 1}
    with LLM(tmp_path, **options) as plain, LLM(tmp_path, **options, kv_cache_dtype="int8") as quantized:
        windows = [Window("a", torch.randint(0, plain.engine.vocab, (60,), generator=g).tolist()) for _ in range(2)]
        assert evaluate(score_windows(quantized, windows, plain)).divergence.value > 0
        assert evaluate(score_windows(plain, windows, plain)).divergence.value == 0


def test_the_page_stands_alone():
    windows, model, reference = draw()
    found = evaluate(score_windows(model, windows, reference))
    page = write_page(found, "mine <b>", "yours", [("dtype", "a & b")])
    assert page.count("<svg") == 2 and "mine &lt;b&gt; against yours" in page and "a &amp; b" in page
    assert not re.search(r"(src|href)=|https?:", page)
    assert f"{found.divergence.value:.5g}" in page
    alone = write_page(evaluate(score_windows(model, windows)), "mine", None, [])
    assert alone.count("<svg") == 1 and "of the reference</td>" not in alone


def test_the_verb(tmp_path, monkeypatch, capsys):
    from inferplane.cli.main import main

    monkeypatch.setattr("inferplane.cli.main.prepare", lambda environment: None)
    text = tmp_path / "text.txt"
    text.write_text("def f(x):\n    return x + 1\n\n" * 4000)  # longer than any prompt may be
    command = ["eval", "demo", "--device", "cpu", "--data", str(text), "--window-tokens", "32", "--windows", "3"]
    assert main([*command, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["windows"] == 3 and data["tokens"] == 93 and data["ratio"] is None and data["perplexity"]["value"] > 1
    page = tmp_path / "page.html"
    assert main([*command, "--kv-cache-dtype", "int8", "--against", "demo", "--html", str(page)]) == 0
    out = capsys.readouterr().out
    assert "ratio of perplexities" in out and "kv cache dtype" in page.read_text()
    assert main([*command, "--html", str(tmp_path / "no" / "page.html")]) == 2
    assert main(["eval", "demo", "--data", str(tmp_path / "none.txt")]) == 2
    assert "no such file" in capsys.readouterr().err
