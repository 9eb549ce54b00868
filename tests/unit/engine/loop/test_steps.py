"""Who runs when, what a full pool does, and that nothing of it shows in the tokens. Steps are counted, not seconds."""

import random

import pytest

from inferplane.engine.request.params import SamplingParams
from inferplane.engine.schedule.insertion import Insertion
from inferplane.errors import CapacityError, UsageError
from tests.unit.support.fake_model import V, alone, engine, right


def greedy(n=8, **more):
    return SamplingParams(max_tokens=n, temperature=0, ignore_eos=True, **more)


def some(n, length, seed=0):
    draw = random.Random(seed)
    return [[draw.randrange(V) for _ in range(length)] for _ in range(n)]


def tokens(requests):
    return [r.generated for r in requests]


# ------------------------------------------------------------------ bar d: less room than work


@pytest.mark.parametrize("script", [None, "right", "wrong", "alternate"])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_a_pool_of_two_and_a_half_sequences_serves_sixteen(script, enable_prefix_caching):
    """40 tokens each, 10 blocks; the pool has 25."""
    e = engine(25, script=script, max_num_seqs=16, enable_prefix_caching=enable_prefix_caching)
    each = [e.add(p, greedy(20)) for p in some(16, 21)]
    e.finish()
    assert all(r.finish_reason == "length" and right(r) for r in each)
    assert e.stats()["num_preemptions_total"] > 0 and max(r.preemptions for r in each) > 0
    assert e.pools.used == 0


def test_a_request_larger_than_the_pool_is_refused():
    e = engine(10, max_model_len=45)
    e.add([1] * 21, greedy(20))  # 40 tokens in the cache; the last one is never written
    with pytest.raises(CapacityError, match="10 in all"):
        e.add([1] * 22, greedy(20))
    with pytest.raises(CapacityError, match="45 tokens"):
        e.add([1] * 26, greedy(20))
    assert e.metrics.rejected == {"CapacityError": 2}
    e.finish()
    assert e.metrics.finished == {"length": 1}


def test_whoever_is_served_last_makes_room():
    e = engine(11, max_num_seqs=4, enable_prefix_caching=False)
    first, second, urgent = (e.add(p, greedy(16), priority=n) for p, n in zip(some(3, 5), (1, 1, 0)))
    e.finish()
    assert (urgent.preemptions, first.preemptions) == (0, 0) and second.preemptions > 0
    assert all(map(right, (first, second, urgent)))


def test_what_a_preempted_sequence_wrote_is_found_again():
    e = engine(64)
    r = e.add(some(1, 21)[0], greedy(20))
    for _ in range(12):
        e.step()
    before, done = e.runner.rows, r.computed
    e.scheduler.preempt(r)
    assert done == 32 and r.computed == 0 and e.pools.used == 0
    e.step()
    # 33 tokens are known; 8 full blocks hold 32 of them
    assert e.runner.rows - before == 1 and r.cached_tokens == 0 and r.preemptions == 1
    e.finish()
    assert right(r)


# ------------------------------------------------------------------ bar e: a long prompt among streams


@pytest.mark.parametrize("script", [None, "right"])
def test_streams_go_on_while_a_long_prompt_is_prefilled(script):
    e = engine(1900, script=script, max_num_batched_tokens=64, max_num_seqs=8)
    streams = [e.add(p, greedy(480)) for p in some(6, 3)]
    e.step()
    e.step()
    late = e.add(some(1, 4000, seed=9)[0], greedy(4))
    steps = 0
    while not late.generated:
        before = [len(r.generated) for r in streams]
        rows = e.runner.rows
        e.step()
        steps += 1
        assert e.runner.rows - rows == 64 or late.generated, "the budget is used up, and never exceeded"
        assert all(len(r.generated) > n for r, n in zip(streams, before)), "every stream, every step"
    chunk = 64 - 6 * (1 if script is None else 4)
    assert steps == -(-4000 // chunk)
    assert right(late) or late.finish_reason is None


def test_without_chunking_they_wait_for_the_whole_prefill():
    e = engine(1200, max_num_batched_tokens=5000)
    stream = e.add([1, 2, 3], greedy(50))
    e.step()
    late = e.add(some(1, 4000)[0], greedy(4))
    rows = e.runner.rows
    e.step()
    assert e.runner.rows - rows == 4001 and len(late.generated) == 1 and len(stream.generated) == 2


def test_a_step_of_both_kinds_puts_the_short_ones_first():
    e = engine(64)
    e.add([1, 2, 3], greedy())
    e.step()
    e.add([1] * 20, greedy())
    e.step()
    e.step()
    assert e.runner.kinds == ["decode", "mixed", "decode"]


# ------------------------------------------------------------------ who comes in


def test_insertion_is_limited():
    e = engine(64, insertion=Insertion(2), max_num_seqs=5)
    for p in some(9, 3):
        e.add(p, greedy(30))
    counts = []
    for _ in range(4):
        e.step()
        counts.append(len(e.scheduler.running))
    assert counts == [2, 4, 5, 5]
    e.finish()


def test_the_queue_is_limited():
    e = engine(64, max_waiting=3, max_num_seqs=1)
    for p in some(3, 3):
        e.add(p, greedy(2))
    with pytest.raises(CapacityError, match="3 requests are waiting"):
        e.add([1], greedy(1))
    e.step()  # one of them runs now
    e.add([1], greedy(1))
    e.finish()
    assert e.metrics.finished["length"] == 4


def test_priorities_and_then_arrival():
    e = engine(64, max_num_seqs=1)
    order = []
    each = [e.add([n + 1], greedy(1), priority=n % 3) for n in range(6)]
    while e.busy:
        order += [each.index(r) for r in e.step()]
    assert order == [0, 3, 1, 4, 2, 5]


def test_tenants_take_turns():
    """One that queues twenty requests does not keep out one that queues two."""
    e = engine(64, max_num_seqs=4, insertion=Insertion(1))
    many = [e.add(p, greedy(12), tenant="many") for p in some(20, 2)]
    few = [e.add(p, greedy(12), tenant="few") for p in some(2, 2)]
    for _ in range(4):
        e.step()
    assert [r.tenant for r in e.scheduler.running] == ["many", "few", "many", "few"]
    e.finish()
    assert all(map(right, (*many, *few)))


def test_more_sequences_than_tokens_in_a_step():
    """The first ones go on; the others wait for them, and nobody is lost."""
    e = engine(64, max_num_batched_tokens=3, max_num_seqs=8)
    each = [e.add(p, greedy(5)) for p in some(8, 2)]
    e.finish()
    assert all(map(right, each))


def test_ids_and_prompts_are_judged_on_arrival():
    e = engine(64)
    e.add([1], greedy(), request_id="a")
    for prompt, more, says in (
        ([], {}, "empty"),
        ([V], {}, f"{V}"),
        ([True], {}, "True"),
        ([1], {"request_id": "a"}, "alive"),
    ):
        with pytest.raises(UsageError, match=says):
            e.add(prompt, greedy(), **more)
    assert len(e.scheduler.waiting) == 1 and e.metrics.counters["requests_accepted_total"] == 1
    e.finish()
    e.add([1], greedy(), request_id="a")
    e.close()
    assert e.accepted[-1].finish_reason == "abort" and e.pools.used == 0
    with pytest.raises(UsageError, match="closed"):
        e.add([1], greedy())


# ------------------------------------------------------------------ bar b with a model that cannot hide a mistake


@pytest.mark.parametrize("script", [None, "right", "alternate", "junk"])
@pytest.mark.parametrize("budget", [1, 3, 7, 200])
def test_same_tokens_whatever_the_batch(budget, script):
    prompts = [p[: 1 + 5 * i] for i, p in enumerate(some(6, 30))]
    each = [greedy(9), SamplingParams(max_tokens=9, temperature=0), greedy(9, presence_penalty=1.0)]
    sampled = SamplingParams(max_tokens=9, temperature=0.8, seed=4, top_p=0.9)
    each = [*each, *([sampled] * 3)]
    for batch in (1, 2, 5):
        for order in (1, -1):
            e = engine(
                40, script=script, spec={"verify_strategy": "target_match"} if script else None, max_num_seqs=batch
            )
            e.scheduler.limits = type(e.scheduler.limits)(batch, budget, 1000)
            requests = [e.add(p, q) for p, q in list(zip(prompts, each))[::order]]
            e.finish()
            assert all(map(right, requests))


def test_numbers():
    e = engine(64)
    a, b = (e.add(p, greedy(4)) for p in some(2, 6))
    e.finish()
    s = e.stats()
    assert (s["prompt_tokens_total"], s["generation_tokens_total"], s["steps_total"]) == (12, 8, 4)
    assert s["forward_rows_total"] == e.runner.rows == 12 + 3 * 2
    assert s["request_success_total"] == {"length": 2} and s["num_requests_running"] == s["num_requests_waiting"] == 0
    assert s["kv_cache_usage_perc"] == 0 and s["kv_blocks_free"] + s["kv_blocks_cached"] == s["kv_blocks_total"] == 64
    assert [s[n]["count"] for n in ("time_to_first_token_seconds", "inter_token_latency_seconds")] == [2, 6]
    assert [s[n]["count"] for n in ("e2e_request_latency_seconds", "request_queue_time_seconds")] == [2, 2]
    assert [s[n]["count"] for n in ("step_time_seconds", "schedule_commit_time_seconds")] == [4, 4]
    assert 0 < s["schedule_commit_time_seconds"]["sum"] < s["step_time_seconds"]["sum"]
    assert a.timings().first_token_s <= a.timings().total_s and alone(tuple(b.prompt), b.params)[0] == b.generated
