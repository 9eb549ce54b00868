"""Traces that judge drafts from text (`ngram`, `suffix`): prompts and the answers that a model would give to them.

    python benchmarks/suffix_traces.py                 # tokens a step of both methods on each trace, by replay
    python benchmarks/suffix_traces.py --speed         # also tokens a second against no drafts, with the demo model
    python benchmarks/suffix_traces.py --seeds 0 1 2 --json

All text is that of the standard library of the Python that runs this, in tokens of the demo model. Equal seeds give
equal traces. A trace is a list of calls in the order in which they arrive, each after the one before has ended.

- `edits`: requests to edit a file. Each file of 24 gets a series of 6 requests. A prompt is an instruction and 30 to
  50 lines of the file; every second one, at random, also holds the series' last answer, as a chat does, and the
  others do not, as those of an agent that begins anew. An answer takes turns between lines that are written again
  (from the lines in the prompt, or from an earlier answer of the series, one as often as the other) and lines that no
  earlier call has (of another file, each used once). Lines that are written again are edited: an identifier has a new
  name through the whole series, one line in eight is dropped, and one number in four is another. Each answer has a
  part of 30 to 70 % that repeats: tokens in pieces of 8 that stand in its prompt or in an earlier answer. The part is
  drawn evenly; an answer that misses this range is drawn anew.
- `natural`: prompts and answers from different places of files, with nothing written again. Code repeats short
  phrases.
- `shuffled`: as `natural`, but the tokens of each answer are in a random order, so that what repeats does so by
  chance.

The replay needs no model: it accepts the drafts that agree with the trace's answer, and adds the trace's next token.
Each method drafts with the same maximum, in every step. With `--speed` the demo model computes every step, and its
logits are replaced by ones whose largest is the trace's token; plain decoding and each method take turns on the same
calls.

Bars: `suffix` has at least 1.2 times the tokens a step of `ngram` on `edits`, whichever key length is best for
`ngram`; on `shuffled` it has at least 0.98 of the tokens a second of plain decoding.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch
from tokenizers import Tokenizer

from inferplane import LLM, SamplingParams
from inferplane.engine.request.state import Request
from inferplane.engine.runner.model_files import DEMO_FOLDER
from inferplane.engine.speculate import ProposerContext, SpeculativeConfig, VerifiedChunk
from inferplane.engine.speculate.registered import make_registered

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools" / "demo"))
from demo_data import stdlib_files

FILES, SERIES = 24, 6
"""Files that are edited, and requests for each."""
WINDOW_LINES, ANSWER_TOKENS = (30, 50), (200, 400)
SHARES = (0.3, 0.7)
PIECE = 8
"""Tokens of a piece whose earlier occurrence makes it a repetition."""
MAX_PROMPT = 1500
STEP_BAR, SPEED_BAR = 1.2, 0.98
METHODS = {
    "ngram-3": {"method": "ngram", "prompt_lookup_max": 3},
    "ngram-5": {"method": "ngram", "prompt_lookup_max": 5},
    "ngram-8": {"method": "ngram", "prompt_lookup_max": 8},
    "suffix": {"method": "suffix"},
    "suffix-alone": {"method": "suffix", "suffix_decoding_max_cached_requests": 0},
}
IDENTIFIER = re.compile(r"\b[a-z_][a-z_0-9]{3,}\b")
NUMBER = re.compile(r"\b\d+\b")


@dataclass
class Call:
    """A request and its answer, as token ids.

    Args:
        prompt: of the request. answer: to it.
        repeats: which part of the answer stands in its prompt or in earlier answers, in pieces of `PIECE` tokens.
    """

    prompt: list[int]
    answer: list[int]
    repeats: float = 0.0


@dataclass
class Source:
    """Text to take from: files in a random order, and lines that no call has used.

    Args:
        rng: random numbers.
        tokenizer: of the demo model.
    """

    rng: random.Random
    tokenizer: Tokenizer
    files: list[list[str]] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)

    def __post_init__(self):
        texts = [text.splitlines(keepends=True) for _, text in stdlib_files()]
        self.files = [lines for lines in texts if len(lines) >= 200]
        self.rng.shuffle(self.files)

    def encode(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def new_lines(self, count):
        """So many lines that follow each other and were never taken before."""
        if len(self.unused) < count:
            self.unused = list(self.files.pop())
        found, self.unused = self.unused[:count], self.unused[count:]
        return found

    def window(self, lines):
        """30 to 50 lines of a file that follow each other."""
        count = self.rng.randint(*WINDOW_LINES)
        start = self.rng.randrange(len(lines) - count)
        return lines[start : start + count]


def pieces(tokens):
    """Every piece of `PIECE` tokens."""
    return {tuple(tokens[i : i + PIECE]) for i in range(len(tokens) - PIECE + 1)}


def repeated(answer, known):
    """Which part of the answer's tokens is in pieces that are known."""
    covered = [False] * len(answer)
    for i in range(len(answer) - PIECE + 1):
        if tuple(answer[i : i + PIECE]) in known:
            covered[i : i + PIECE] = [True] * PIECE
    return sum(covered) / max(1, len(answer))


def edited(lines, names, rng):
    """Lines as an editor writes them again: with other names and numbers, and without some of them."""
    out = []
    for line in lines:
        if rng.random() < 1 / 8:
            continue
        line = IDENTIFIER.sub(lambda m: names.get(m[0], m[0]), line)
        out.append(NUMBER.sub(lambda m: str(int(m[0]) + 1) if rng.random() < 1 / 4 else m[0], line))
    return out


def write_answer(source, window, earlier, names, share):
    """An answer's lines: some written again, others new, until it is long enough."""
    rng, out, again, total = source.rng, [], 0, 0
    length = rng.randint(*ANSWER_TOKENS)
    while total < length:
        if again <= share * total:
            origin = rng.choice(earlier) if earlier and rng.random() < 0.5 else window
            start, count = rng.randrange(max(1, len(origin) - 4)), rng.randint(3, 12)
            lines = edited(origin[start : start + count], names, rng)
            again += len(source.encode("".join(lines)))
        else:
            lines = source.new_lines(rng.randint(2, 6))
        out += lines
        total = len(source.encode("".join(out)))
    return out


def make_edits(source):
    """The trace `edits`."""
    rng, calls, answered = source.rng, [], set()
    for number in range(FILES):
        lines, earlier = source.files.pop(0), []
        known = [name for name in IDENTIFIER.findall("".join(lines)) if not name.startswith("_")]
        names = {name: f"{name}_{number}" for name in rng.sample(sorted(set(known)), min(3, len(set(known))))}
        for _ in range(SERIES):
            call = None
            while call is None:
                window = source.window(lines)
                text = f"Edit this code.\n{''.join(window)}"
                if earlier and rng.random() < 0.5:
                    text = f"{''.join(earlier[-1])}\n{text}"
                prompt, share = source.encode(text)[-MAX_PROMPT:], rng.uniform(*SHARES)
                own = write_answer(source, window, earlier, names, share)
                answer = source.encode("".join(own))
                part = repeated(answer, pieces(prompt) | answered)
                if SHARES[0] <= part <= SHARES[1]:
                    call = Call(prompt, answer, part)
            calls.append(call)
            earlier.append(own)
            answered |= pieces(call.answer)
    return calls


def make_natural(source, shuffle=False):
    """The trace `natural`, or with `shuffle` the trace `shuffled`."""
    rng, calls, answered = source.rng, [], set()
    for _ in range(FILES * SERIES // 2):
        prompt = source.encode("".join(source.window(source.files[0])))[-MAX_PROMPT:]
        source.files.append(source.files.pop(0))
        answer, length = [], rng.randint(*ANSWER_TOKENS)
        while len(answer) < length:
            answer += source.encode("".join(source.new_lines(8)))
        answer = answer[:length]
        if shuffle:
            rng.shuffle(answer)
        calls.append(Call(prompt, answer, repeated(answer, pieces(prompt) | answered)))
        answered |= pieces(answer)
    return calls


def make_trace(name, seed):
    """The calls of a trace."""
    tokenizer = Tokenizer.from_file(str(DEMO_FOLDER / "tokenizer.json"))
    source = Source(random.Random(f"{name} {seed}"), tokenizer)
    return make_edits(source) if name == "edits" else make_natural(source, name == "shuffled")


def replay(calls, method, drafts):
    """Tokens a step of a method on a trace, and what a step costs the host in seconds."""
    config = SpeculativeConfig(**METHODS[method], num_speculative_tokens=drafts)
    proposer, hidden = make_registered(ProposerContext(config, 4096)), torch.zeros(0, 0)
    steps = tokens = drafted = accepted = 0
    spent = 0.0
    for number, call in enumerate(calls):
        request = Request(number, call.prompt, SamplingParams(max_tokens=len(call.answer)))
        request.generated.append(call.answer[0])
        last = VerifiedChunk(request, 0, 0, len(call.prompt), 0, 0, [])
        while len(request.generated) < len(call.answer):
            done = len(request.generated)
            begun = time.process_time()
            (found,) = proposer.propose([last], [min(drafts, len(call.answer) - done - 1)], hidden)
            spent += time.process_time() - begun
            stood = next((i for i, t in enumerate(found) if t != call.answer[done + i]), len(found))
            request.generated += call.answer[done : done + stood + 1]
            last = VerifiedChunk(request, request.tokens - stood - 2, 0, 1 + stood, len(found), stood, [])
            steps, tokens = steps + 1, tokens + stood + 1
            drafted, accepted = drafted + len(found), accepted + stood
        begun = time.process_time()
        proposer.forget(request)
        spent += time.process_time() - begun
    return {
        "tokens_per_step": tokens / steps,
        "drafted": drafted,
        "acceptance": accepted / max(1, drafted),
        "host_s_per_step": spent / steps,
    }


class Forced:
    """A model whose steps are computed, and whose tokens are those of the trace: logits are replaced."""

    def __init__(self, engine):
        self.engine, self.inner, self.answers, self.chunks = engine, engine.runner.run, {}, []
        inner_schedule = engine.schedule

        def schedule():
            self.chunks = inner_schedule()
            return self.chunks

        engine.schedule, engine.runner.run = schedule, self.run

    def run(self, batch):
        logits, hidden = self.inner(batch)
        ids = []
        for c in self.chunks:
            if c.samples_next:
                answer, done = self.answers[c.request.request_id], len(c.request.generated)
                ids += [answer[min(i, len(answer) - 1)] for i in range(done, done + 1 + len(c.drafts))]
        if ids:
            logits.scatter_(1, torch.tensor(ids)[:, None], 1e4)
        return logits, hidden


def decode(llm, forced, calls, at_once):
    """Seconds of processor time a token, while so many calls decode together."""
    spent = made = 0
    for first in range(0, len(calls), at_once):
        group = calls[first : first + at_once]
        length = min(len(call.answer) for call in group)
        params = SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True)
        requests = []
        for call in group:
            requests.append(llm.add(call.prompt, params))
            forced.answers[requests[-1].request_id] = call.answer
        while any(not r.generated for r in requests):
            llm.engine.step()
        before, begun = sum(len(r.generated) for r in requests), time.process_time()
        while any(r.finish_reason is None for r in requests):
            llm.engine.step()
        spent += time.process_time() - begun
        made += sum(len(r.generated) for r in requests) - before
        assert all(r.generated == call.answer[:length] for r, call in zip(requests, group)), "another answer"
    return spent / made


def speeds(calls, methods, args):
    """By method: tokens a second over those of plain decoding, on the same calls by turns of `args.at_once` calls, of
    which the first `args.warm` are not counted: what drafting learns of a size of batch takes hundreds of steps.
    """
    models, spent = {}, {}
    for name in ("plain", *methods):
        spec = None if name == "plain" else {**METHODS[name], "num_speculative_tokens": args.drafts}
        llm = LLM("demo", device="cpu", dtype="float32", speculative_config=spec, max_num_seqs=args.at_once)
        models[name], spent[name] = (llm, Forced(llm.engine)), []
    for turn, first in enumerate(range(0, len(calls) - args.at_once + 1, args.at_once)):
        for name in sorted(models, reverse=turn % 2 == 1):  # neither is always the first
            spent[name].append(decode(*models[name], calls[first : first + args.at_once], args.at_once))
    for llm, _ in models.values():
        llm.close()
    out = {}
    for name in methods:
        ratios = [a / b for a, b in zip(spent["plain"], spent[name])][args.warm :]
        times = sum(spent["plain"][args.warm :]) / sum(spent[name][args.warm :])
        out[name] = {"times_plain": times, "median": median(ratios), "least": min(ratios), "most": max(ratios)}
    return out


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", nargs="+", default=["edits", "natural", "shuffled"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--drafts", type=int, default=7, help="most drafts a step")
    parser.add_argument("--speed", action="store_true", help="measure the demo model's tokens a second, too")
    parser.add_argument("--at-once", type=int, default=1, help="calls that decode together, with --speed")
    parser.add_argument("--warm", type=int, default=8, help="turns that are not counted, with --speed")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    out = []
    for seed in args.seeds:
        for name in args.traces:
            calls = make_trace(name, seed)
            found = {"trace": name, "seed": seed, "calls": len(calls), "tokens": sum(len(c.answer) for c in calls)}
            found["repeats"] = [min(c.repeats for c in calls), max(c.repeats for c in calls)]
            found["methods"] = {m: replay(calls, m, args.drafts) for m in args.methods}
            if args.speed:
                found["speed"] = speeds(calls, args.methods, args)
            out.append(found)
            if not args.json:
                print(text(found, args))
    if args.json:
        print(json.dumps({"benchmark": "suffix_traces", "drafts": args.drafts, "traces": out}, indent=1))


def text(found, args):
    """The figures of a trace as lines."""
    low, high = found["repeats"]
    lines = [
        f"{found['trace']}, seed {found['seed']}: {found['calls']} calls, {found['tokens']} tokens, "
        f"{low:.0%} to {high:.0%} of an answer repeats, at most {args.drafts} drafts"
    ]
    for name, m in found["methods"].items():
        lines.append(
            f"{name:>13}: {m['tokens_per_step']:.3f} tokens a step, {m['acceptance']:4.0%} of {m['drafted']} drafts "
            f"accepted, {1e6 * m['host_s_per_step']:.0f} us of the host a step"
        )
    best = max((m["tokens_per_step"] for name, m in found["methods"].items() if "ngram" in name), default=None)
    if best and "suffix" in found["methods"]:
        times = found["methods"]["suffix"]["tokens_per_step"] / best
        lines.append(f"       suffix: {times:.3f} x the best n-grams (bar on edits: {STEP_BAR})")
    for name, s in found.get("speed", {}).items():
        spread = f"{s['times_plain']:.3f} x plain (median {s['median']:.3f}, {s['least']:.3f} to {s['most']:.3f})"
        lines.append(f"{name:>13}: {spread} in tokens a second (bar on shuffled: {SPEED_BAR})")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
