"""A captured step with drafts that is in flight, and the inputs of the next one, made on the device from its result.

How many drafts are accepted decides the positions, slots and lengths of the next step. They are computed on the device
from the table that the step leaves (`VerifyAndDraft`), so the next step is launched before the host has read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from inferplane.engine.request.state import Request
from inferplane.engine.sampling.sampler import NOT_FINITE
from inferplane.engine.speculate.captured.verify_and_draft import StepTensors


class DraftedTokens(NamedTuple):
    """What one sequence gets: its new tokens, the drafts for its next step, and the number of drafts in this one."""

    tokens: list[int]
    drafts: list[int]
    num_drafts: int


@dataclass(frozen=True)
class NextRows:
    """Where B sequences stand after a step, on the device.

    Args:
        ids: int64 `[B, 1 + D]`, the last token and the drafts behind it.
        rows: int64 `[B]`, rows of the next step: that token and its drafts; 0: the sequence has all its tokens.
        first: int64 `[B]`, the position of that token.
        generated: int64 `[B]`, tokens generated.
        max_new_rows: int64 `[B]`, as in `StepTensors`.
        lengths: int64 `[B]`, drafts that were requested of each.
    """

    ids: torch.Tensor
    rows: torch.Tensor
    first: torch.Tensor
    generated: torch.Tensor
    max_new_rows: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def after(cls, inputs: StepTensors, table: torch.Tensor) -> NextRows:
        """The rows behind a step with these inputs, whose result is the table (`VerifyAndDraft`)."""
        tokens, count = inputs.batch.max_query_tokens, table[:, 0]
        last = table[:, 2 : 2 + tokens].gather(1, (count - 1).clamp(min=0)[:, None])
        left = inputs.max_new_rows - count
        drafts = torch.where(count == inputs.rows, inputs.drafts_if_accepted, inputs.drafts_if_rejected)
        goes_on = (inputs.rows > 0) & (left >= 0)
        rows = torch.where(goes_on, 1 + drafts.minimum(left).clamp(min=0), 0)
        first = inputs.batch.seq_lens - inputs.rows + count
        ids = torch.cat((last, table[:, 2 + tokens :]), 1)
        return cls(ids, rows, first, inputs.generated + count, left, drafts)

    def select(self, places: Sequence[int]) -> NextRows:
        """The rows of the sequences at these places, in their order."""
        if list(places) == list(range(self.rows.shape[0])):
            return self
        at = torch.tensor(places).to(self.rows.device, non_blocking=True)
        return NextRows(*(getattr(self, name).index_select(0, at) for name in self.__dataclass_fields__))

    def fill(self, inputs: StepTensors, block_tokens: int, adapted: Sequence[bool]) -> None:
        """Put the next step's rows of these sequences, the first ones, into inputs that have all else, in place.

        Args:
            inputs: see above.
            block_tokens: tokens per block.
            adapted: whose numbers of drafts follow from this step's; else they are in the inputs already. The inputs
                have the most drafts of the former.
        """
        batch, count = inputs.batch, self.rows.shape[0]
        tokens = batch.max_query_tokens
        nth = torch.arange(tokens, device=self.rows.device)[None] - (tokens - self.rows)[:, None]
        real, positions = nth >= 0, (self.first[:, None] + nth).clamp(min=0)
        ids = self.ids.gather(1, nth.clamp(0, self.ids.shape[1] - 1))
        batch.ids.view(-1, tokens)[:count] = torch.where(real, ids, 0)
        batch.positions.view(-1, tokens)[:count] = torch.where(real, positions, 0)
        for table in batch.list_tables():
            width = table.block_tables.shape[1]
            blocks = table.block_tables[:count].long().gather(1, (positions // block_tokens).clamp(max=width - 1))
            slots = torch.where(real, blocks * block_tokens + positions % block_tokens, -1)
            table.slots.view(-1, tokens)[:count] = slots
        lengths = torch.where(self.rows > 0, self.first + self.rows, 0)
        batch.seq_lens[:count] = lengths.to(batch.seq_lens.dtype)
        inputs.rows[:count] = self.rows
        inputs.generated[:count] = self.generated
        inputs.max_new_rows[:count] = self.max_new_rows.clamp(min=0)
        if any(adapted):
            these = torch.tensor(adapted).to(self.rows.device, non_blocking=True)
            had, most = self.rows > 1, inputs.drafts_if_accepted[:count]
            more, fewer = self.lengths + 2, (self.lengths - 1).clamp(min=1)  # as `AdaptiveLength`
            for target, change in ((inputs.drafts_if_rejected, fewer), (inputs.drafts_if_accepted, more)):
                found = torch.where(had, change, self.lengths).minimum(most)
                target[:count] = torch.where(these, found, target[:count])


@dataclass(frozen=True)
class DraftsInFlight:
    """A captured step that is in flight.

    Args:
        requests: its sequences.
        table: int64 `[B, 2 + T + D]`, its result.
        rows: int64 `[B]`, its rows.
        next_rows: where its sequences stand after it.
        most_rows: T.
    """

    requests: list[Request]
    table: torch.Tensor
    rows: torch.Tensor
    next_rows: NextRows
    most_rows: int

    @classmethod
    def of(cls, requests: list[Request], inputs: StepTensors, table: torch.Tensor) -> DraftsInFlight:
        """The step with these inputs, whose result is the table; both may be overwritten afterwards."""
        after, count = NextRows.after(inputs, table), len(requests)
        parts = (getattr(after, name)[:count] for name in after.__dataclass_fields__)
        rows, most_rows = inputs.rows[:count].clone(), inputs.batch.max_query_tokens
        return cls(requests, table[:count].clone(), rows, NextRows(*parts), most_rows)

    def on_host(self, copies: Sequence[torch.Tensor]) -> list[DraftedTokens]:
        """What each sequence gets, from the host's copies of `table` and `rows`.

        Raises:
            FloatingPointError: the logits of a row that decides hold NaN or infinity.
        """
        table, rows = (copy.tolist() for copy in copies)
        if not all(finite for _, finite, *_ in table):
            raise FloatingPointError(NOT_FINITE)
        first_draft = 2 + self.most_rows
        return [DraftedTokens(row[2 : 2 + row[0]], row[first_draft:], max(0, n - 1)) for row, n in zip(table, rows)]
