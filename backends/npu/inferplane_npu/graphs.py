"""Captured steps. A replay reads a step's tensors anew, but not the lengths that the vendor's attention takes as Python
integers. So each attention call is a task of its own within the graph, which gets new lengths before each replay.

A task waits for an event that `update` records once it has been given its lengths, on a stream of its own: replay and
update may overlap.

Source: page of npu_fused_infer_attention_score (example 9) and of torch.npu.graph_task_group_begin in Ascend/op-plugin
at 517f2e7d; the order of events as in vllm-ascend at 182b75ea, attention_v1.py (`full_graph_fia`) and acl_graph.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch

from inferplane.plugin import Batch, HostLens, UsageError

npu = torch.ops.npu
LENGTHS = ("actual_seq_lengths", "actual_seq_lengths_kv")
PERSISTENT = ("ids", "positions", "slots", "query_start", "seq_lens", "block_tables", "logit_rows")


def attend(
    batch: Batch,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    heads_first: bool = False,
    by_token: bool = False,
    **call: Any,
) -> torch.Tensor:
    """Call npu_fused_infer_attention_score; for a batch whose step is being captured, add the call to its graph.

    Args:
        batch: the step.
        q: `[T, H, D]`, or `[T, 1, H, D]` in BSND. k, v: as the call's layout wants them.
        heads_first: the result is `[H, T, D]`, not of the shape of `q`.
        by_token: each token is a sequence of its own (`lengths_by_token`), not one of several of a sequence.
        call: keyword arguments of the operator.
    """
    recorder = recorder_of(batch)
    if recorder is not None:
        return recorder.attend(q, k, v, heads_first, by_token, call)
    return npu.npu_fused_infer_attention_score(q, k, v, **call)[0]


@dataclass
class Task:
    """One attention call within a graph: what it was called with, and how it is reached."""

    handle: Any
    event: Any
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    call: dict[str, Any]
    results: list[torch.Tensor]
    by_token: bool


@dataclass
class Recorder:
    """Collects the attention tasks of a graph during capture.

    Args:
        runtime: the vendor's counterpart of `torch.cuda`.
        workspaces: one scratch buffer for all calls of one shape; they run one after another.
    """

    runtime: Any
    tasks: list[Task] = field(default_factory=list)
    workspaces: dict[tuple[Any, ...], torch.Tensor] = field(default_factory=dict)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads_first: bool, by_token: bool, call: dict[str, Any]
    ) -> torch.Tensor:
        """Add one call of attention to the graph, with tensors for its results."""
        shape = (q.shape[1], q.shape[0], v.shape[-1]) if heads_first else q.shape
        key = (tuple(q.shape), tuple(k.shape), call["input_layout"])
        if key not in self.workspaces:
            self.workspaces[key] = npu._npu_fused_infer_attention_score_get_max_workspace(q, k, v, **call)
        results = [q.new_empty(shape), q.new_empty(1, dtype=torch.float32)]
        call = {**call, "workspace": self.workspaces[key]}
        stream = self.runtime.current_stream()
        event = self.runtime.ExternalEvent()
        event.wait(stream)
        event.reset(stream)
        self.runtime.graph_task_group_begin(stream)
        npu.npu_fused_infer_attention_score.out(q, k, v, **call, out=results)
        handle = self.runtime.graph_task_group_end(stream)
        self.tasks.append(Task(handle, event, (q, k, v), call, results, by_token))
        return results[0]

    def update(self, stream: Any, lens: HostLens) -> None:
        """Give every task its lengths, in order, and release it."""
        lengths = {
            form: lengths_by_token(lens) if form else lengths_of(lens) for form in {t.by_token for t in self.tasks}
        }
        with self.runtime.stream(stream):
            for task in self.tasks:
                task.call.update(lengths[task.by_token])
                self.runtime.graph_task_update_begin(stream, task.handle)
                npu.npu_fused_infer_attention_score.out(*task.tensors, **task.call, out=task.results)
                self.runtime.graph_task_update_end(stream)
                task.event.record(stream)


def recorder_of(batch: Batch, recorder: Recorder | None = None) -> Recorder | None:
    """The recorder of the step that this batch captures; None for a batch that runs eagerly.

    Args:
        recorder: is remembered for the batch when this is the first call.
    """
    return batch.once("inferplane_npu.recorder", lambda: recorder)


class UpdatableGraph:
    """A decode step as a graph.

    Args:
        runtime: the vendor's counterpart of `torch.cuda`.
        step: the step to capture.
        bucket: a decode batch of the size to capture; its tensors become the graph's own.

    Raises:
        UsageError: the bucket is no decode step, or the host does not know its lengths, or it has several block tables.
    """

    def __init__(self, runtime: Any, step: Callable[[Batch], Any], bucket: Batch) -> None:
        if bucket.kind != "decode" or bucket.host_lens is None:
            raise UsageError(
                f"A {bucket.kind} step {'' if bucket.host_lens else 'without lengths on the host '}cannot be captured.",
                remedy="capture decode steps, with host_lens",
            )
        if bucket.more_tables:
            raise UsageError("A step with several block tables cannot be captured.", remedy="run it eagerly")
        self.runtime, self.recorder = runtime, Recorder(runtime)
        self.batch = replace(bucket)  # a copy has an empty scratch, which the step fills while it is captured
        recorder_of(self.batch, self.recorder)
        self.graph, self.side = runtime.NPUGraph(), runtime.Stream()
        with runtime.graph(self.graph):
            self.outputs = step(self.batch)

    def update(self, batch: Batch) -> None:
        """Take over a batch of the bucket's size: its tensors, and its lengths for every attention call.

        Raises:
            UsageError: it has another number of rows or sequences, or wider block tables.
        """
        for name in PERSISTENT:
            own, given = getattr(self.batch, name), getattr(batch, name)
            if own is None and given is None:
                continue
            if own is None or given is None or (name != "block_tables" and own.shape != given.shape):
                raise UsageError(
                    f"The captured step has {_rows(self.batch)}, the batch {_rows(batch)}: {name} differs."
                )
            if name == "block_tables":
                if given.shape[0] != own.shape[0] or given.shape[1] > own.shape[1]:
                    raise UsageError(f"Block tables {list(given.shape)} do not fit the captured {list(own.shape)}.")
                own = own[:, : given.shape[1]]
            own.copy_(given)
        self.recorder.update(self.side, batch.lens())

    def replay(self) -> Any:
        """Run the graph; returns what the captured step returned, refilled."""
        self.graph.replay()
        return self.outputs


def lengths_of(lens: HostLens) -> dict[str, list[int]]:
    """The two lists that attention is called with: ends of the queries, and lengths of the sequences."""
    return dict(zip(LENGTHS, (list(lens.query_start[1:]), [max(1, n) for n in lens.seq_lens])))


def lengths_by_token(lens: HostLens) -> dict[str, list[int]]:
    """The list that attention is called with where each token is a sequence of its own that ends with it: lengths in
    tokens, 1 for a padded one. Lengths of queries mean nothing then.
    """
    sequences = zip(pairwise(lens.query_start), lens.seq_lens, strict=True)
    return {LENGTHS[1]: [max(1, n - behind) for (a, b), n in sequences for behind in range(b - a - 1, -1, -1)]}


def _rows(batch: Batch) -> str:
    return f"{batch.tokens} rows of {batch.seq_lens.shape[0]} sequences"


__all__ = ["Recorder", "UpdatableGraph", "attend", "lengths_by_token", "lengths_of", "recorder_of"]
