"""The engine against "each request as if it were alone", over random histories of everything that can happen to it.

python -m tests.unit.engine.loop.test_random_histories 20000      # that many histories of 50 steps, more than CI runs
"""

import sys
import time

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from inferplane.engine.loop import accept_tokens as accept_module
from inferplane.engine.loop import engine as engine_module
from inferplane.engine.loop import overlap as overlap_module
from inferplane.engine.request.params import SamplingParams
from inferplane.engine.schedule.insertion import Insertion
from inferplane.errors import CapacityError
from tests.unit.support.fake_model import V, engine, interrupted, right

RUNS, STEPS = 500, 50
STEMS = [[5, 9, 9, 2, 7, 1, 3, 8, 8, 4, 6, 2], [5, 9, 9, 2, 7, 1, 11, 12], [3, 3, 3, 3, 3, 3, 3, 3, 3]]
PARAMS = [
    SamplingParams(max_tokens=n, **more)
    for n in (1, 4, 13)
    for more in (
        {"temperature": 0},
        {"temperature": 0, "ignore_eos": True, "logprobs": 0},
        {"temperature": 1.0, "seed": 5, "prompt_logprobs": 1},
        {"temperature": 0.7, "seed": 6, "top_k": 5, "repetition_penalty": 1.3, "presence_penalty": 0.4, "logprobs": 2},
        {"temperature": 0, "stop_token_ids": [4, 17], "min_tokens": 1},
    )
]
POOLS = st.fixed_dictionaries(
    {
        "blocks": st.integers(7, 20),
        "block_tokens": st.sampled_from([1, 3, 4]),
        "max_num_seqs": st.integers(1, 5),
        "max_num_batched_tokens": st.sampled_from([1, 2, 5, 9, 64]),
        "insertion": st.builds(
            Insertion,
            st.sampled_from([None, 1, 2, 4]),
            st.sampled_from([None, None, 1, 3, 20]),
            st.sampled_from([None, None, 1, 50, 10_000]),
        ),
        "max_waiting": st.sampled_from([None, 6]),
        "enable_prefix_caching": st.booleans(),
        "script": st.sampled_from([None, "right", "wrong", "alternate", "junk"]),
        "drafts": st.integers(1, 5),
        "recurrent": st.sampled_from([0, 0, 1, 3, 5]),
        "async_scheduling": st.sampled_from(["off", "on", "on", "on with drafts"]),
        "windows": st.sampled_from(
            [
                (None,),
                (None,),
                (1,),
                (2,),
                (5,),
                (9,),
                (None, 3),
                (None, 1, 1),
                (None, None, 4),
                (9, 2),
                (None, 5, 5, 5),
            ]
        ),
        "pool_of": st.sampled_from([(), (), (0, 1, 1, 1), (0, 0, 1, 2)]),
        "more_blocks": st.integers(4, 15),
    }
)


class Clock:
    """Seconds that pass only when told."""

    now = 100.0

    def monotonic(self):
        return self.now


class Histories(RuleBasedStateMachine):
    """Requests come, run, are aborted, pushed out, late, broken, interrupted; outcomes are those of `alone`."""

    @initialize(pool=POOLS)
    def start(self, pool):
        self.clock = Clock()
        engine_module.time = accept_module.time = overlap_module.time = self.clock
        self.doomed, self.late, self.interrupts = set(), set(), []
        if pool["windows"][0] is not None:
            pool["recurrent"] = 0
        pool["pool_of"] = pool["pool_of"][: len(pool["windows"])]
        if pool["async_scheduling"] == "on":
            pool["script"] = None
        pool["async_scheduling"] = pool["async_scheduling"].split()[0]
        self.engine = engine(**pool, spec={"verify_strategy": "target_match"} if pool["script"] else None)
        self.engine.fail_for, self.engine.fail_later_for = self.fail_for, self.fail_later_for
        inner = self.engine.runner.run

        def run(batch):
            self.clock.now += 0.004 + 0.002 * len(batch.ids)  # so that targets are missed and met
            return inner(batch)

        self.engine.runner.run = run

    def fail_for(self, request):
        if self.interrupts and self.interrupts[0] == "run":
            self.interrupts.pop()
            raise KeyboardInterrupt
        if id(request) in self.doomed - self.late:
            raise ValueError(f"planted for {request.request_id}")

    def fail_later_for(self, request):
        if self.interrupts and self.interrupts[0] == "read":
            self.interrupts.pop()
            raise KeyboardInterrupt
        if id(request) in self.late:
            raise ValueError(f"planted for {request.request_id}")

    @property
    def live(self):
        return [*self.engine.scheduler.running, *self.engine.scheduler.waiting]

    @rule(
        stem=st.sampled_from(STEMS),
        cut=st.integers(1, 12),
        tail=st.integers(0, V - 1),
        params=st.integers(0, len(PARAMS) - 1),
        priority=st.integers(0, 2),
        tenant=st.sampled_from(["", "b"]),
        patience=st.sampled_from([None, None, 3.0]),
        doomed=st.sampled_from([""] * 8 + ["launch", "read"]),
    )
    def add(self, stem, cut, tail, params, priority, tenant, patience, doomed):
        more = {"priority": priority, "tenant": tenant, "arrived": self.clock.now}
        if patience is not None:
            more["deadline"] = self.clock.now + patience
        try:
            request = self.engine.add([*stem[:cut], tail], PARAMS[params], **more)
        except CapacityError:
            return
        if doomed:
            self.doomed.add(id(request))
        if doomed == "read":
            self.late.add(id(request))

    @rule(n=st.integers(1, 3))
    def step(self, n):
        for _ in range(n):
            if self.engine.busy:
                before = {id(r): len(r.generated) for r in self.live}
                touched = self.engine.step()
                assert all(r.finish_reason or len(r.generated) > before[id(r)] for r in touched)

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0, 99))
    def abort(self, pick):
        self.engine.end(self.live[pick % len(self.live)], "abort")

    @precondition(lambda self: self.engine.scheduler.running)
    @rule(pick=st.integers(0, 99))
    def preempt(self, pick):
        running = self.engine.scheduler.running
        self.engine.scheduler.preempt(running[pick % len(running)])

    @rule()
    def evict(self):
        self.engine.pools.clear()

    @rule(seconds=st.sampled_from([0.5, 2.0]))
    def wait(self, seconds):
        self.clock.now += seconds

    @precondition(lambda self: self.engine.busy)
    @rule(where=st.sampled_from(["run", "run", "read", "propose"]))
    def interrupt(self, where):
        self.interrupts = [where]
        inner = self.engine.propose

        def propose(ran, hidden):
            raise KeyboardInterrupt

        if where == "propose":
            self.engine.propose = propose
        try:
            interrupted(self.engine.step)
        finally:
            self.engine.propose, self.interrupts = inner, []

    @invariant()
    def holds(self):
        if not hasattr(self, "engine"):
            return
        self.engine.check_books()
        for r in self.engine.accepted:
            assert right(r), (r.request_id, r.finish_reason, r.generated)
            if r.finish_reason == "error":
                assert r.error == f"ValueError: planted for {r.request_id}" and id(r) in self.doomed
            if r.finish_reason == "timeout":
                assert r.deadline <= self.clock.now

    def teardown(self):
        try:
            if hasattr(self, "engine"):
                self.engine.finish()
                self.holds()
                for r in self.engine.accepted:
                    assert r.finish_reason is not None and (r.finish_reason != "error" or id(r) in self.doomed)
                assert self.engine.speculator is None or not self.engine.speculator.lengths._length
        finally:
            engine_module.time = accept_module.time = overlap_module.time = time


def machine(runs, **more):
    return settings(max_examples=runs, stateful_step_count=STEPS, **more)


TestHistories = Histories.TestCase
TestHistories.settings = machine(RUNS)

if __name__ == "__main__":
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    run_state_machine_as_test(Histories, settings=machine(runs, derandomize=False, print_blob=True, deadline=None))
    print(f"{runs} histories of {STEPS} steps: all right")
