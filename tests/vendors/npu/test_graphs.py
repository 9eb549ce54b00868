"""Capture: a decode step recorded as a graph, replayed on new batches with new lengths, gives what it gives eagerly.

The runtime is a stand-in that notes the operators of a step (torch's own and the vendor's) and carries them out again,
into the same memory, when the graph is replayed. As on the device, Python integers stay as they were captured, but for
tasks that were given new arguments.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from inferplane.conformance import stepping
from inferplane.conformance.subject import Subject
from inferplane.ops import Draw
from inferplane.plugin import UsageError
from inferplane.plugins import host
from inferplane.types.batch import Query, make_batch
from inferplane_npu.graphs import UpdatableGraph, recorder_of
from tests.vendors.configs import LLAMA, V3, model
from tests.vendors.npu import chip

pytestmark = pytest.mark.skipif(chip.ARCH != "910b", reason="on the 910b: the 310P's attention is not captured")


class Tape(TorchDispatchMode):
    """The operators of a step, in order, with the memory of their arguments and results."""

    def __init__(self):
        super().__init__()
        self.entries = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        self.entries.append([operator, args, kwargs or {}, result])
        return result

    def replay(self):
        for operator, args, kwargs, result in self.entries:
            again = operator(*args, **kwargs)
            for old, new in zip(flat(result), flat(again)):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def flat(result):
    if isinstance(result, torch.Tensor):
        return [result]
    return [t for r in result for t in flat(r)] if isinstance(result, (list, tuple)) else []


class Runtime:
    """What of torch.npu a capture uses; `log` holds the order of events."""

    def __init__(self):
        self.log, self.tape, self.updating = [], None, None
        self.Stream = lambda: "side"
        self.current_stream = lambda: "main"
        self.NPUGraph = Tape

    def ExternalEvent(self):
        number = len([line for line in self.log if line.startswith("wait")])
        return SimpleNamespace(
            wait=lambda stream: self.log.append(f"wait {number}"),
            reset=lambda stream: None,
            record=lambda stream: self.log.append(f"record {number} on {stream}"),
        )

    @contextmanager
    def graph(self, tape):
        self.tape = tape
        with tape:
            yield
        self.tape = None

    @contextmanager
    def stream(self, stream):
        yield

    def graph_task_group_begin(self, stream):
        self.begun = len(self.tape.entries)

    def graph_task_group_end(self, stream):
        fused = [e for e in self.tape.entries[self.begun :] if "fused_infer" in str(e[0])]
        assert len(fused) == 1, "one operator a task"
        return fused[0]

    def graph_task_update_begin(self, stream, handle):
        self.updating = Tape()
        self.updating.__enter__()
        self.handle = handle

    def graph_task_update_end(self, stream):
        self.updating.__exit__(None, None, None)
        (entry,) = [e for e in self.updating.entries if "fused_infer" in str(e[0])]
        assert entry[0] is self.handle[0]
        self.handle[1:3] = entry[1:3]  # the arguments alone: what the update computed here does not count
        for result in flat(entry[2]["out"]):
            result.fill_(torch.nan)
        self.log.append("updated")


def batches(step: int, tokens: int = 1) -> list[Query]:
    """A step of so many tokens a sequence; its lengths grow over the border of a block, and its blocks are no run of
    numbers.
    """
    before = [5 + step, 126 + step, 127, 250 + step]
    tables = [[3, 9, 1], [7, 2, 11], [5, 0, 8], [4, 10, 6]]
    ids = range(step, step + tokens)
    return [Query([11 * i + t for t in ids], n, tables[i][: (n + tokens - 1) // 128 + 1]) for i, n in enumerate(before)]


@pytest.mark.parametrize("tokens", [1, 3], ids=["single", "drafts"])
@pytest.mark.parametrize(
    ("config", "kv_dtype"), [(LLAMA, "auto"), (LLAMA, "int8"), (V3, "auto")], ids=["llama", "llama_int8", "deepseek"]
)
def test_replays_equal_eager_steps(config, kv_dtype, tokens):
    subject = Subject.of(host(), "npu", "bfloat16")
    tree = model(config)
    weights = stepping.draw_weights(tree, torch.bfloat16, steady_routes=True)
    eager, captured = (stepping.on_device(subject, tree, torch.bfloat16, weights, 384, kv_dtype) for _ in range(2))
    for bound in (eager, captured):
        draw = Draw(3, torch.bfloat16)
        for kv in bound.cache.layers:
            slots = torch.arange(bound.cache.blocks * 128)
            kv.write(slots, *draw.kv_entries(kv.request, len(slots)))
    runtime = Runtime()

    def step(batch):
        return captured.steps["decode"](batch, captured.cache)[0]

    def batch(n):
        queries = batches(n, tokens)
        widest = [replace(q, blocks=[*q.blocks, *[0] * (3 - len(q.blocks))]) for q in queries]
        return make_batch(widest, block_tokens=128, device="cpu")

    with torch.inference_mode():
        graph = UpdatableGraph(runtime, step, batch(0))
        eager.steps["decode"](batch(0), eager.cache)  # capturing runs the step, and writes its tokens
        layers = len(tree.layers)
        assert len(graph.recorder.tasks) == layers
        for n in (1, 2, 3):
            graph.update(batch(n))
            assert runtime.log[-2 * layers :] == [
                line for i in range(layers) for line in ("updated", f"record {i} on side")
            ]
            want = eager.steps["decode"](batch(n), eager.cache)[0]
            assert torch.equal(graph.replay(), want), f"step {n}"


def test_what_cannot_be_captured():
    long = make_batch([Query(list(range(20)), 0, [0])], block_tokens=128, device="cpu")
    with pytest.raises(UsageError, match="A mixed step cannot be captured"):
        UpdatableGraph(Runtime(), lambda batch: None, long)
    one = make_batch([Query([1], 3, [0])], block_tokens=128, device="cpu")
    with pytest.raises(UsageError, match="without lengths on the host"):
        UpdatableGraph(Runtime(), lambda batch: None, replace(one, host_lens=None))
    graph = UpdatableGraph(Runtime(), lambda batch: batch.ids, one)
    assert recorder_of(graph.batch) is graph.recorder and recorder_of(one) is None
    two = make_batch([Query([1], 3, [0]), Query([1], 3, [1])], block_tokens=128, device="cpu")
    with pytest.raises(UsageError, match="has 1 rows of 1 sequences, the batch 2 rows of 2 sequences: ids differs"):
        graph.update(two)
    wide = make_batch([Query([1], 130, [0, 1])], block_tokens=128, device="cpu")
    with pytest.raises(UsageError, match=r"Block tables \[1, 2\] do not fit the captured \[1, 1\]"):
        graph.update(wide)
