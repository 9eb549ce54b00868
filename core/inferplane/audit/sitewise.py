"""Where in a network an error arises: at each site, the error that arrives and the error that is introduced there."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal

import torch

from inferplane.audit.differences import (
    Difference,
    list_inputs,
    list_results,
    mixes_alone,
    pass_inputs,
    reads_a_cache,
)
from inferplane.audit.observe import STACK, Call, ObservedModel
from inferplane.audit.sites import check_alike, find_layer, find_part, name_modules
from inferplane.calibrate.texts import MIN_WINDOW, Window
from inferplane.engine import LLM
from inferplane.engine.loop.prompt_logits import prompt_steps
from inferplane.errors import UsageError
from inferplane.ops import Op
from inferplane.ops.op import ROUNDED
from inferplane.types import Batch

Role = Literal["introduces", "contains", "passes on", "agrees"]
"""What a site does with errors above its threshold: it introduces one, and no site below it does; a site below it does;
one arrives or is returned, and it introduces none; or there is none."""


@dataclass(frozen=True)
class SiteErrors:
    """Errors at a site, each the rms of a difference over the rms of the reference's values.

    Args:
        site: its path in the tree of ops, as `explain` has it.
        modules: of the checkpoint that it stands for.
        op: name of the op. layer: number of the layer; None: it is in none.
        kernel: what runs there. reference_kernel: what runs there in the reference.
        arrived: of its input, in the model's own run.
        introduced: of its result when it is fed with the reference's input.
        out: of its result, in the model's own run.
        introduced_by_token, out_by_token: the same as the rms over tokens of each one's relative error: a token with
            large values does not hide the others.
        threshold: above which an introduced error counts, in one form or the other.
        role: see `Role`.
    """

    site: str
    modules: str
    op: str
    layer: int | None
    kernel: str
    reference_kernel: str
    arrived: float
    introduced: float
    out: float
    introduced_by_token: float
    out_by_token: float
    threshold: float
    role: Role


@dataclass(frozen=True)
class PartErrors:
    """What equal sites of all layers introduce.

    Args:
        part: their name without the number of the layer. sites: how many there are.
        median: of what they introduce. maximum: of it. at: the site that introduces most.
    """

    part: str
    sites: int
    median: float
    maximum: float
    at: str


@dataclass(frozen=True)
class SiteAudit:
    """A model held against a reference, site by site.

    Args:
        windows: number of windows. tokens: of them all.
        sites: in the order in which they return. by_part: equal sites of all layers together.
        fused: kernels of the model, and of the reference, that run hot ops in one call -> their sites, where only the
            whole is compared.
    """

    windows: int
    tokens: int
    sites: Sequence[SiteErrors]
    by_part: Sequence[PartErrors]
    fused: dict[str, dict[str, list[str]]]

    @property
    def first(self) -> SiteErrors | None:
        """The first site that introduces an error above its threshold."""
        return next((each for each in self.sites if each.role == "introduces"), None)

    @property
    def units(self) -> list[SiteErrors]:
        """Sites over depth: the embedding, the layers, the last norm, the head."""
        return [each for each in self.sites if "." not in each.site or each.site == f"{STACK}.{each.layer}"]

    def count(self, role: Role) -> int:
        """Number of sites with a role."""
        return sum(each.role == role for each in self.sites)

    def data(self) -> dict[str, Any]:
        """Everything, JSON-ready; an infinite error is null."""

        def plain(each: Any) -> dict[str, Any]:
            found = asdict(each)
            return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in found.items()}

        return {
            "windows": self.windows,
            "tokens": self.tokens,
            "first": None if self.first is None else self.first.site,
            "by_part": [plain(each) for each in self.by_part],
            "fused": self.fused,
            "sites": [plain(each) for each in self.sites],
        }


@dataclass
class _SiteSums:
    arrived: Difference = field(default_factory=Difference)
    introduced: Difference = field(default_factory=Difference)
    out: Difference = field(default_factory=Difference)


def audit_sites(
    model: LLM,
    reference: LLM,
    windows: Iterable[Window],
    threshold: float | None = None,
    progress: Callable[[], None] | None = None,
) -> SiteAudit:
    """Run two models over windows of texts unit by unit, and compare what each site reads and returns.

    Nothing is held of a unit when the next one runs, and of a window only sums. What a site introduces is measured by a
    call of its bound op with the reference's input, never computed from other errors. Attention and recurrences, which
    read what they have stored, are called as whole mixers, which store the window anew.

    Args:
        model: what is audited. Its steps hold a whole window (`max_num_batched_tokens`).
        reference: what it is held against, of the same structure, in any formats, on any device.
        windows: token ids, of at least 16 tokens each.
        threshold: introduced error above which a site diverges; None: the tolerance that kernels of the site's op are
            held to, in the less precise of both dtypes.
        progress: called after each window.

    Raises:
        UsageError: the models differ in structure, a window is too short, or there is none.
        UnsupportedModelError: several ranks share a model.
        CapacityError: a window does not fit in a step.
    """
    check_alike(model.runner.model, reference.runner.model, (model.files.name, reference.files.name))
    return _Audit(ObservedModel(model), ObservedModel(reference)).run(windows, threshold, progress)


class _Audit:
    def __init__(self, model: ObservedModel, reference: ObservedModel) -> None:
        self.model, self.reference = model, reference
        self.common = [site for site in model.sites if site in reference.sites]
        self.sums: dict[str, _SiteSums] = {}

    def run(self, windows: Iterable[Window], threshold: float | None, progress: Callable[[], None] | None) -> SiteAudit:
        count, tokens = 0, 0
        for window in windows:
            if len(window.ids) < MIN_WINDOW:
                raise UsageError(f"A window of {len(window.ids)} tokens.", remedy=f"give at least {MIN_WINDOW}")
            with torch.inference_mode():
                self.add(window.ids)
            count, tokens = count + 1, tokens + len(window.ids)
            if progress is not None:
                progress()
        if not count:
            raise UsageError("No windows were audited.", remedy="give texts of at least one window")
        sites = self.describe(threshold)
        fused = {"model": _group(self.model.fused), "reference": _group(self.reference.fused)}
        return SiteAudit(count, tokens, sites, _by_part(sites), fused)

    def add(self, ids: Sequence[int]) -> None:
        """Compare both models over a window."""
        with (
            closing(prompt_steps(self.model.engine, ids)) as own,
            closing(prompt_steps(self.reference.engine, ids)) as other,
        ):
            mine = self.model.begin(check_one_step(next(own), ids), self.common)
            theirs = self.reference.begin(check_one_step(next(other), ids), self.common)
            for unit in min(self.model.units, self.reference.units, key=len):
                for calls, others in zip(mine.run(unit), theirs.run(unit), strict=True):
                    for site in calls:
                        if len(calls[site]) == len(others.get(site, ())):
                            self.compare(site, calls[site], others[site])

    def compare(self, site: str, calls: Sequence[Call], others: Sequence[Call]) -> None:
        """Compare the calls of a site in a unit, and call it again with the reference's inputs."""
        op = self.model.sites[site].op
        if any(reads_a_cache(call.arguments) for call in calls) and not mixes_alone(op):
            return
        sums = self.sums.setdefault(site, _SiteSums())
        for mine, theirs in zip(calls, others):
            returned = list_results(op, theirs.results)
            sums.arrived.add(list_inputs(op, mine.arguments), list_inputs(op, theirs.arguments))
            sums.out.add(list_results(op, mine.results), returned)
            again = self.model.call_again(site, pass_inputs(mine.arguments, theirs.arguments))
            sums.introduced.add(list_results(op, again), returned)

    def describe(self, threshold: float | None) -> list[SiteErrors]:
        names, found = name_modules(self.model.model), []
        introducing: list[str] = []
        for site, sums in self.sums.items():
            own, other = self.model.sites[site], self.reference.sites[site]
            limit = self.default_threshold(own.op) if threshold is None else threshold
            arrived, introduced, out = sums.arrived.error, sums.introduced.error, sums.out.error
            introduced_by_token, out_by_token = sums.introduced.error_by_token, sums.out.error_by_token
            below = f"{site}." if site else ""
            role: Role = "agrees"
            if any(each.startswith(below) for each in introducing):
                role = "contains"
            elif max(introduced, introduced_by_token) > limit:
                role = "introduces"
                introducing.append(site)
            elif max(arrived, out, out_by_token) > limit:
                role = "passes on"
            kernels = own.kernel, other.kernel
            errors = arrived, introduced, out, introduced_by_token, out_by_token
            found.append(SiteErrors(site, names[site], own.op.name, find_layer(site), *kernels, *errors, limit, role))
        return found

    def default_threshold(self, op: Op) -> float:
        """The tolerance of an op's kernels in the less precise dtype; not below one rounding of it."""
        dtype = max(self.model.dtype, self.reference.dtype, key=lambda dtype: ROUNDED[dtype])
        return max(op.tolerance[dtype], ROUNDED[dtype])


def check_one_step(batch: Batch, ids: Sequence[int]) -> Batch:
    """The step of a prompt, which holds all of its ids.

    Raises:
        UsageError: the engine divides such a prompt.
    """
    if batch.tokens < len(ids):
        raise UsageError(
            f"A window of {len(ids)} tokens in steps of {batch.tokens}.",
            remedy="use windows of so many tokens, or raise max_num_batched_tokens",
        )
    return batch


def _group(fused: dict[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for site, kernel in fused.items():
        found[kernel].append(site)
    return dict(found)


def _by_part(sites: Sequence[SiteErrors]) -> list[PartErrors]:
    found: dict[str, list[SiteErrors]] = defaultdict(list)
    for each in sites:
        found[find_part(each.site)].append(each)
    parts = []
    for part, members in found.items():
        most = max(members, key=lambda each: each.introduced)
        parts.append(PartErrors(part, len(members), median(m.introduced for m in members), most.introduced, most.site))
    return parts
