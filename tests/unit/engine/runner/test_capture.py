"""Recorded decode steps, on a device that records by remembering the call: padding, buckets, and when nothing is."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from inferplane import LLM, SamplingParams
from inferplane.engine.runner.buckets import Buckets, Size
from inferplane.engine.runner.capture import (
    DecodeSteps,
    bucket_rows,
    copy_into,
    padding_batch,
    why_not_captured,
    why_not_captured_together,
)
from inferplane.kvcache import paged_layout
from inferplane.ops import Attention
from inferplane.types import HOST, Backend, KVCache, KVRequest, StateSlots
from inferplane.types.batch import Query, make_batch
from inferplane_cpu.backend import CpuBackend

BLOCK = 4
REQUEST = KVRequest("gqa", 2, 8, 8)


class Record:
    """As a device's graph: its inputs are the tensors it was made with, and so are its results."""

    def __init__(self, step, bucket):
        self.step, self.bucket = step, bucket
        self.addresses = [t.data_ptr() for t in vars(bucket).values() if isinstance(t, torch.Tensor)]
        step(bucket)
        self.results = tuple(torch.full_like(t, torch.nan if t.is_floating_point() else -1) for t in step(bucket))

    def replay(self):
        tensors = [t for t in vars(self.bucket).values() if isinstance(t, torch.Tensor)]
        assert [t.data_ptr() for t in tensors] == self.addresses, "an input moved"
        for kept, made in zip(self.results, self.step(self.bucket)):
            kept.copy_(made)
        return self.results


class Recording(CpuBackend):
    def __init__(self):
        super().__init__()
        self.recorded = []

    def capture(self, step, bucket):
        assert bucket.host_lens is None, "a record that knew the lengths would hold them for ever"
        self.recorded.append(Size(bucket.seq_lens.shape[0], bucket.max_query_tokens))
        return Record(step, bucket)


def step_over(kv):
    """A step whose logits depend on every entry that a row may see, and on its id and position."""
    op = Attention(4, 0.3, REQUEST, "few")
    table = torch.randn(16, 32, generator=torch.Generator().manual_seed(5))

    def step(batch):
        x = table[batch.ids].view(-1, 4, 8) + batch.positions[:, None, None]
        kv.write(batch.slots, x[:, :2], x[:, 2:])
        hidden = op(x, batch, kv).flatten(1)
        return hidden[:, :5].float(), hidden

    return step


@pytest.fixture
def made():
    torch.manual_seed(0)
    kv = paged_layout(BLOCK).build(REQUEST, 40, torch.float32, torch.device(HOST))
    kv.write(torch.arange(160), torch.randn(160, 2, 8), torch.randn(160, 2, 8))
    backend = Recording()
    sizes = Buckets((1, 2, 4, 8, 12), (1, 2, 3))
    return backend, DecodeSteps(backend, step_over(kv), KVCache((kv,), 40, BLOCK), 30, sizes), kv


def batch_of(counts, before=0, **options):
    queries, block = [], 0
    for i, count in enumerate(counts):
        blocks = [(block + j) % 40 for j in range(-(-(count + before + i) // BLOCK))]
        block += len(blocks)
        queries.append(Query([(3 * i + j) % 16 for j in range(count)], before + i, blocks, **options))
    return make_batch(queries, block_tokens=BLOCK, device=HOST)


@pytest.mark.parametrize("counts", [[1], [1, 1, 1], [2, 2], [3] * 5, [1] * 12, [1, 2], [3, 1, 2, 3, 1], [2, 1, 1]])
def test_a_replay_gives_what_the_step_gives(made, counts):
    _backend, steps, _kv = made
    for before in (5, 9, 2):
        batch = batch_of(counts, before)
        want = steps.step(batch)
        got = steps(batch)
        assert all(torch.equal(g, w) for g, w in zip(got, want)), "padding or stale inputs changed a real row"
    assert (steps.replayed, steps.eager, len(steps.buckets)) == (3, 0, 1)


def test_rows_that_want_logits(made):
    _backend, steps, _kv = made
    batch = batch_of([3, 3, 3], 4, logits=1)
    assert batch.logit_rows is not None
    logits, hidden = steps(batch)
    assert torch.equal(logits, hidden[batch.logit_rows][:, :5])


def test_results_outlive_the_next_replay(made):
    _backend, steps, _kv = made
    first = steps(batch_of([1, 1, 1], 5))
    copies = [t.clone() for t in first]
    steps(batch_of([1, 1], 9)), steps(batch_of([1, 1, 1], 11))
    assert all(torch.equal(a, b) for a, b in zip(first, copies))


def test_padding_replaces_what_a_larger_step_left(made):
    bucket = padding_batch(Size(4, 2), 8, BLOCK, HOST)
    copy_into(bucket, batch_of([2, 2, 2, 2], 5))
    copy_into(bucket, batch_of([2], 3))
    assert bucket.slots[2:].tolist() == [-1] * 6
    assert bucket.seq_lens.tolist() == [5, 0, 0, 0]
    assert bucket.ids[2:].tolist() == bucket.positions[2:].tolist() == [0] * 6
    assert bucket.query_start.tolist() == [0, 2, 4, 6, 8]


def test_padded_rows_leave_the_cache_alone(made):
    _backend, steps, kv = made
    batch = batch_of([1, 1, 1], 5)
    steps(batch)
    before = [t.clone() for t in kv.entries]
    steps(batch)
    assert all(torch.equal(a[:-1], b[:-1]) for a, b in zip(before, kv.entries))


def test_rows_of_uneven_sequences_that_want_logits(made):
    _backend, steps, _kv = made
    batch = batch_of([3, 1, 2], 4, logits=1)
    logits, hidden = steps(batch)
    assert torch.equal(logits, hidden[batch.logit_rows][:, :5]) and steps.replayed == 1


def test_rows_stand_last_in_their_sequence(made):
    batch = batch_of([3, 1, 2], 5)
    at = bucket_rows(batch, 3)
    assert at.tolist() == [0, 1, 2, 5, 7, 8]
    bucket = padding_batch(Size(4, 3), 8, BLOCK, HOST)
    copy_into(bucket, batch_of([3, 3, 3, 3], 5))
    copy_into(bucket, batch, at)
    assert bucket.query_start.tolist() == [0, 3, 6, 9, 12], "every sequence has as many rows"
    assert bucket.slots[[3, 4, 6, 9, 10, 11]].tolist() == [-1] * 6
    assert bucket.slots[at].tolist() == batch.slots.tolist() and bucket.positions[at].tolist() == [5, 6, 7, 6, 7, 8]
    assert bucket_rows(batch_of([2, 2]), 2) is None


def test_further_rows_are_copied_with_the_batch(made):
    """As the hidden states are that a drafting layer reads: they must not be those of the step that was recorded."""
    _backend, steps, _kv = made
    plain = steps.step

    def step(batch, hidden):
        logits, states = plain(batch)
        return logits + hidden[:, :5], states + hidden

    steps.step = step
    for counts in ([2, 1], [1, 1], [2, 2]):
        batch = batch_of(counts, 6)
        hidden = torch.randn(sum(counts), 32)
        for got, want in zip(steps(batch, hidden), step(batch, hidden)):
            assert torch.equal(got, want)
    assert (steps.replayed, steps.eager) == (3, 0)


@pytest.mark.parametrize("counts", [[1, 9], [9, 9], [1] * 13, [4, 4]])
def test_what_fits_no_bucket_runs_as_it_is(made, counts):
    backend, steps, _kv = made
    batch = batch_of(counts, 2)
    assert torch.equal(steps(batch)[0], steps.step(batch)[0])
    assert (steps.replayed, backend.recorded) == (0, [])


def test_sequences_shorter_than_a_bucket_s_tokens_run_as_they_are(made):
    """A padded row of theirs would stand before their first token."""
    _backend, steps, _kv = made
    batch = batch_of([2, 1], 0)
    assert batch.lens().seq_lens == (2, 2)
    assert torch.equal(steps(batch)[0], steps.step(batch)[0]) and steps.replayed == 1
    batch = batch_of([3, 1], 0)
    assert torch.equal(steps(batch)[0], steps.step(batch)[0]) and (steps.replayed, steps.eager) == (1, 1)
    known = batch_of([2, 1], 5)
    steps(replace(known, host_lens=None))
    assert steps.eager == 2, "nor where the host does not know"


def test_steps_with_states_that_the_cache_has_not_run_as_they_are(made):
    backend, steps, _kv = made
    batch = batch_of([1], 4, state=StateSlots(1, 2))
    assert torch.equal(steps(batch)[0], steps.step(batch)[0])
    assert (steps.eager, steps.replayed, backend.recorded) == (1, 0, [])


def test_no_rows_are_padded_beside_states(made):
    """Sequences of a bucket have as many rows each as it has; there may be fewer sequences."""
    _backend, steps, _kv = made
    steps.has_states, state = True, StateSlots(1, 2)
    assert steps.size_for(batch_of([2] * 3, 5, state=state)) == Size(4, 2)
    assert steps.size_for(batch_of([2, 1], 5, state=state)) is None
    assert steps.size_for(batch_of([2, 2], 5)) is None, "a cache with states and a step without"


def test_a_device_that_records_nothing(made):
    _, steps, _kv = made
    steps.backend = CpuBackend()
    steps(batch_of([1], 3))
    assert steps.disabled_reason == "the device captures no steps"
    assert (steps.eager, steps.replayed) == (1, 0)


def test_recording_that_fails_costs_the_record_and_nothing_else(made):
    backend, steps, _kv = made

    def fail(step, bucket):
        raise RuntimeError("operation not permitted when stream is capturing")

    backend.capture = fail
    batch = batch_of([1, 1], 3)
    assert torch.equal(steps(batch)[0], steps.step(batch)[0])
    assert "operation not permitted when stream is capturing" in steps.disabled_reason


def test_generation_is_the_same_replayed_and_eager(monkeypatch):
    """Requests of different lengths join and leave, so that buckets grow and shrink; drafts are verified as well."""
    safe = [replace(kernel, capture_safe=True) for kernel in CpuBackend().kernels()]
    monkeypatch.setattr(CpuBackend, "kernels", lambda self: safe)
    params = [SamplingParams(max_tokens=n, temperature=t, seed=n) for n, t in ((9, 0.0), (3, 0.8), (14, 0.0))]
    prompts = ["def f(", "class Stack:", "import "]
    texts = {}
    for record in (Backend.capture, lambda self, step, bucket: Record(step, bucket)):
        monkeypatch.setattr(CpuBackend, "capture", record)
        llm = LLM("demo", device="cpu", dtype="float32", max_num_seqs=4, max_model_len=128)
        texts[record] = [r.token_ids for r in llm.generate(prompts, params)]
        decode = llm.runner.decode
        llm.close()
    eager, replayed = texts.values()
    assert replayed == eager
    assert decode.disabled_reason == "" and decode.replayed > 8
    assert len({size.sequences for size in decode.buckets}) > 1


SPECULATIVE = {"num_speculative_tokens": 2, "verify_strategy": "target_match"}


@pytest.mark.parametrize("method", ["mtp", "eagle", "draft_model", "ngram"])
def test_drafts_and_their_verification_are_the_same_replayed_and_eager(monkeypatch, method):
    """Sequences bring different numbers of drafts, of which some are refused; networks that draft are recorded too."""
    safe = [replace(kernel, capture_safe=True) for kernel in CpuBackend().kernels()]
    monkeypatch.setattr(CpuBackend, "kernels", lambda self: safe)
    drafter = {"eagle": "demo-eagle", "draft_model": "demo-draft"}.get(method)
    given = {**SPECULATIVE, "method": method, "model": drafter}
    params = [SamplingParams(max_tokens=n, temperature=t, seed=n) for n, t in ((20, 0.0), (6, 0.8), (24, 0.0))]
    texts, steps = {}, {}
    for record in (Backend.capture, lambda self, step, bucket: Record(step, bucket)):
        monkeypatch.setattr(CpuBackend, "capture", record)
        llm = LLM("demo", device="cpu", dtype="float32", max_num_seqs=3, max_model_len=96, speculative_config=given)
        if (together := llm.engine.speculator.captured_steps) is not None:
            together.disabled_reason = "apart"  # as where a step and its drafts are two records
        texts[record] = [r.token_ids for r in llm.generate(["def f(", "class Stack:", "import "], params)]
        proposer = llm.engine.speculator.proposer
        steps[record] = [llm.runner.decode]
        if method == "draft_model":
            steps[record].append(llm.runner.draft.decode)
        elif method != "ngram":
            steps[record].append(proposer.steps)
        llm.close()
    eager, replayed = texts.values()
    assert replayed == eager
    for decode in steps[record]:
        assert decode.disabled_reason == "" and decode.replayed > 5, (
            decode.disabled_reason,
            decode.replayed,
            decode.eager,
        )
        assert {size.tokens for size in decode.buckets} - {1}, "no step with several tokens a sequence was recorded"


def test_a_kernel_that_cannot_be_recorded_is_named():
    llm = LLM("demo", device="cpu", dtype="float32", max_num_seqs=2, max_model_len=64)
    assert "cannot be captured" in llm.runner.decode.disabled_reason
    llm.close()


@pytest.mark.parametrize("site", ["layers.0.mlp", "mtp.mlp", "sample"])
def test_what_keeps_one_part_from_being_recorded_keeps_all_from_being_recorded_together(site):
    def plan(safe):
        kernel = SimpleNamespace(name="cpu.slow", capture_safe=safe)
        choice = SimpleNamespace(kernel=kernel, children={}, op="mlp", variant=None)
        op = SimpleNamespace(name="mlp", serves_many_queries=False, body_capture_safe=False)
        found, model = ("decode", site, op, choice), SimpleNamespace(called_by_engine=("mtp", "sample"))
        return SimpleNamespace(model=model, sites=lambda kind: [found[1:]], distinct=lambda: [found])

    options = SimpleNamespace(capture=True, ranks=1)
    assert why_not_captured_together(plan(True), options) == ""
    told = f"cpu.slow at {site} cannot be captured"
    assert why_not_captured_together(plan(False), options) == told
    assert why_not_captured(plan(False), options) == (told if site.startswith("layers") else "")


# ------------------------------------------------------------------ several block tables


def step_over_two(first, second):
    """A step of two layers, each with its table; the second reads the first one's results."""
    ops = [Attention(4, 0.3, kv.request, "few") for kv in (first, second)]
    table = torch.randn(16, 32, generator=torch.Generator().manual_seed(5))

    def step(batch):
        x = table[batch.ids].view(-1, 4, 8) + batch.positions[:, None, None]
        for number, (op, kv) in enumerate(zip(ops, (first, second))):
            view = batch.for_table(number)
            kv.write(view.slots, x[:, :2], x[:, 2:])
            x = op(x, view, kv)
        return x.flatten(1)[:, :5].float(), x.flatten(1)

    return step


@pytest.mark.parametrize("counts", [[1], [1, 1, 1], [3] * 2, [1, 2], [2, 1, 1]])
def test_a_replay_reads_the_tables_of_every_layer(counts):
    torch.manual_seed(0)
    first = paged_layout(BLOCK).build(REQUEST, 80, torch.float32, torch.device(HOST))
    first.write(torch.arange(320), torch.randn(320, 2, 8), torch.randn(320, 2, 8))
    second = first.share(replace(REQUEST, window=5))
    cache = KVCache((first, second), 80, BLOCK, tables=(0, 1))
    wrong = []
    steps = DecodeSteps(
        Recording(),
        step_over_two(first, second),
        cache,
        30,
        Buckets((1, 2, 4), (1, 2, 3)),
        on_wrong=lambda size, reason: wrong.append(reason),
        num_tables=cache.num_tables,
    )
    for before in (5, 9, 2):
        alone = batch_of(counts, before)
        tables = [row.table[: -(-row.tokens // BLOCK)].tolist() for row in alone.rows()]
        starts = alone.lens().query_start
        queries = [
            Query(alone.ids[a:b].tolist(), before + i, blocks, None, [[40 + x for x in blocks]])
            for i, (a, b, blocks) in enumerate(zip(starts, starts[1:], tables))
        ]
        batch = make_batch(queries, block_tokens=BLOCK, device=HOST)
        want = steps.step(batch)
        assert all(torch.equal(g, w) for g, w in zip(steps(batch), want)), "a table was not copied"
    assert (steps.replayed, steps.eager, wrong) == (3, 0, [])
