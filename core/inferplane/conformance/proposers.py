"""Proves a proposer: drafts may change how fast tokens come, and nothing else. For its author's tests:

    from inferplane.conformance.proposers import check_proposer

    def test_conformance():
        assert not [case for case in check_proposer("NAME") if case.failure]

`inferplane conform --proposer NAME` runs the same cases. They need no model files: a model of two small layers with
random weights answers prompts that repeat themselves and prompts that do not, in chunks, in a cache that is too small
for all.
"""

from __future__ import annotations

import argparse
import gc
import json
import signal
import sys
import tempfile
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from inferplane.cli.main import WRONG_USAGE
from inferplane.cli.screen import Screen
from inferplane.cli.signals import raise_for_signal
from inferplane.engine import LLM, SamplingParams
from inferplane.engine.request.state import Request
from inferplane.engine.speculate import Proposer, SpeculativeConfig
from inferplane.engine.speculate.registered import WatchedProposer
from inferplane.errors import InferplaneError, InferplaneWarning, UsageError, in_words

VOCAB, DRAFTS = 24, 4
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
}
SIZES = {
    "dtype": "float32",
    "deterministic": True,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 32,
    "max_model_len": 256,
    "kv_cache_tokens": 384,
}
SAMPLES, SAMPLED_TOKENS = 400, 4
MAX_DEVIATIONS = 5.0
"""Standard deviations of chi-square above its mean that pass: beyond chance in less than one run of a million."""


@dataclass(frozen=True)
class ProposerCase:
    """What a case found.

    Args:
        name: of the case.
        failure: what is wrong; empty if it passed.
        counts: what it counted, in words.
    """

    name: str
    failure: str = ""
    counts: str = ""


def check_proposer(method: str, options: Mapping[str, Any] | None = None, device: str = "auto") -> list[ProposerCase]:
    """Run every case on a method of speculation that loads no network.

    Args:
        method: its name, as in `speculative_config`.
        options: its own options and further fields of `SpeculativeConfig`.
        device: as in `LLM`.

    Raises:
        UsageError: there is no such method, or it loads a network. PluginError: its plugin fails.
    """
    given = {"num_speculative_tokens": DRAFTS, "adaptive": False, **(options or {})}
    config = SpeculativeConfig.of({"method": method, **given})
    if config is None or config.model is not None or config.method in ("mtp", "eagle"):
        raise UsageError(f"method = {method!r} is no proposer without a network.", there_is="ngram, suffix, plugins'")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        with LLM(folder, device=device, load_format="dummy", **SIZES) as llm:
            return [_run(name, case, llm, config) for name, case in CASES.items()]


def prompts() -> Iterator[list[int]]:
    """Token ids: texts that repeat themselves, texts that do not, and one token."""
    generator = torch.Generator().manual_seed(1)
    for length in (3, 9, 40):
        part = torch.randint(0, VOCAB, (length,), generator=generator).tolist()
        yield part * 3
        yield part
    yield [5]


def _run(
    name: str, case: Callable[[LLM, SpeculativeConfig], tuple[str, str]], llm: LLM, config: SpeculativeConfig
) -> ProposerCase:
    """One case; what the proposer raises, and drafts that are refused, are its failure."""
    counters = llm.engine.metrics.counters
    counters["spec_decode_failures_total"] = 0  # the first failure alone is a warning
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            failure, counts = case(llm, config)
        except InferplaneError as error:
            failure, counts = in_words(error), ""
    messages = [str(w.message) for w in caught if issubclass(w.category, InferplaneWarning)]
    refused = next((words for words in messages if "Drafting failed" in words or "Proposer" in words), "")
    return ProposerCase(name, refused or failure, counts)


def _answers(llm: LLM, config: SpeculativeConfig | None, params: list[SamplingParams]) -> list[list[int]]:
    """The tokens of every prompt; `params` of one after the other, again from the first at the end."""
    llm.set_speculation(config)
    each = list(prompts())
    found = llm.generate(each, [params[i % len(params)] for i in range(len(each))])
    return [result.token_ids for result in found]


def _greedy(llm: LLM, config: SpeculativeConfig) -> tuple[str, str]:
    """Greedy tokens are those of plain decoding, whatever is drafted."""
    params = [SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True)]
    plain, drafted = _answers(llm, None, params), _answers(llm, config, params)
    stats = llm.engine.stats()
    made, stood = (stats.get(f"spec_decode_num_{n}_tokens_total", 0) for n in ("draft", "accepted"))
    counts = f"{made} drafts, {stood} accepted"
    wrong = [i for i, (a, b) in enumerate(zip(plain, drafted)) if a != b]
    return (f"prompt {wrong[0]} has other tokens than without drafts" if wrong else ""), counts


def _sampled(llm: LLM, config: SpeculativeConfig) -> tuple[str, str]:
    """Sampled tokens have the distribution of plain decoding: chi-square of two samples, position by position."""
    samples: list[list[Counter[int]]] = []
    prompt = next(prompts())
    for first, method in ((0, None), (SAMPLES, config)):
        llm.set_speculation(method)
        params = [
            SamplingParams(max_tokens=SAMPLED_TOKENS, temperature=1.0, seed=first + i, ignore_eos=True)
            for i in range(SAMPLES)
        ]
        found = [result.token_ids for result in llm.generate([prompt] * SAMPLES, params)]
        samples.append([Counter(tokens[i] for tokens in found) for i in range(SAMPLED_TOKENS)])
    most = max(chi_square(a, b) for a, b in zip(*samples))
    words = f"chi-square is {most:.1f} standard deviations above its mean"
    return (words if most > MAX_DEVIATIONS else ""), words


def chi_square(a: Counter[int], b: Counter[int]) -> float:
    """How far the chi-square of two samples of equal size lies above its mean, in standard deviations; tokens with
    fewer than 10 occurrences are one class.
    """
    common = [token for token in a | b if a[token] + b[token] >= 10]
    pairs = [(a[token], b[token]) for token in common]
    rest = a.total() - sum(x for x, _ in pairs), b.total() - sum(y for _, y in pairs)
    pairs += [rest] if sum(rest) else []
    freedom = max(1, len(pairs) - 1)
    statistic = sum((x - y) ** 2 / (x + y) for x, y in pairs)
    return float((statistic - freedom) / (2 * freedom) ** 0.5)


def _blocks(llm: LLM, config: SpeculativeConfig) -> tuple[str, str]:
    """No block is held once every request has ended, aborted ones among them."""
    llm.set_speculation(config)
    params = SamplingParams(max_tokens=90, temperature=0.0, ignore_eos=True)
    requests = [llm.add(prompt, params) for prompt in prompts()]
    for step in range(10_000):
        if not llm.engine.busy:
            break
        llm.engine.step()
        if step in (3, 9):
            llm.engine.end(requests[step // 3], "abort")
    used = llm.engine.pools.used
    unfinished = sum(r.finish_reason not in ("length", "abort") for r in requests)
    failure = f"{used} block(s) are held though no request lives" if used else ""
    failure = f"{unfinished} request(s) did not end" if unfinished else failure
    return failure, f"{llm.engine.scheduler.preemptions} preemptions"


def _forgets(llm: LLM, config: SpeculativeConfig) -> tuple[str, str]:
    """`forget` frees what was known of a request."""
    llm.set_speculation(config)
    assert llm.engine.speculator is not None
    proposer = llm.engine.speculator.proposer
    proposer = proposer.inner if isinstance(proposer, WatchedProposer) else proposer
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    requests: list[Request] = [
        llm.add(prompt, params, request_id=f"forgotten {i}") for i, prompt in enumerate(prompts())
    ]
    alive, names = [weakref.ref(r) for r in requests], [r.request_id for r in requests]
    while llm.engine.busy:
        llm.engine.step()
    requests.clear()
    gc.collect()
    left = sum(reference() is not None for reference in alive)
    if left:
        return f"{left} ended request(s) are held", ""
    held = _holders(proposer, names)
    return (f"{held[0]} still has an ended request" if held else ""), ""


def _holders(proposer: Proposer, names: list[int | str]) -> list[str]:
    """Attributes with a key or an entry that is the id of a request."""
    each = {k: v for k, v in vars(proposer).items() if isinstance(v, (dict, set, frozenset, list, tuple))}
    return [k for k, v in each.items() if any(isinstance(x, (int, str)) and x in names for x in v)]


CASES: dict[str, Callable[[LLM, SpeculativeConfig], tuple[str, str]]] = {
    "greedy tokens": _greedy,
    "sampled tokens": _sampled,
    "blocks": _blocks,
    "forget": _forgets,
}
"""Every case: `(model, config) -> (failure, counts)`. In each of them drafts over the maximum, and drafts that are no
tokens, are failures too."""


def main(arguments: list[str] | None = None) -> int:
    """What `inferplane conform --proposer NAME` runs: print a line per case; the exit code is 1 if one failed."""
    signal.signal(signal.SIGINT, raise_for_signal)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the verb blocks it while this is imported
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--proposer", required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE")
    args = parser.parse_args(arguments)
    try:
        cases = check_proposer(args.proposer, dict(map(_read_option, args.option)), args.device)
    except InferplaneError as error:
        Screen().error(error)
        return WRONG_USAGE if isinstance(error, UsageError) else 1
    for case in cases:
        words = case.failure or case.counts
        print(f"{'FAIL' if case.failure else 'ok':4} {case.name}{f': {words}' if words else ''}")
    return 1 if any(case.failure for case in cases) else 0


def _read_option(given: str) -> tuple[str, Any]:
    """The name and the value of an option: a number, true or false if the text is one in JSON; else the text."""
    name, separator, value = given.partition("=")
    if not separator or not name:
        raise UsageError(f"--option {given}.", there_is="NAME=VALUE, as in --option window=8")
    try:
        return name.replace("-", "_"), json.loads(value)
    except ValueError:
        return name.replace("-", "_"), value


if __name__ == "__main__":
    sys.exit(main())
