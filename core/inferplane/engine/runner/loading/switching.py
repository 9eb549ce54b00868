"""Another drafter for a model that stays loaded: what drafted before is released, what drafts now is loaded.

Everything that can fail comes first (`prepare_switch`) and leaves the runner as it was; then `Switch.commit` frees the
old caches, and builds those of the model and of the new drafter in the same budget.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from inferplane.engine.runner.exports.compare import settle_options
from inferplane.engine.runner.kv_cache import CachePlan
from inferplane.engine.runner.loading import kv_scales
from inferplane.engine.runner.loading.weight_loading import read_weights
from inferplane.engine.runner.model_runner import Runner
from inferplane.engine.runner.options import RunnerOptions
from inferplane.errors import CapacityError, UsageError
from inferplane.units import format_bytes


@dataclass
class Switch:
    """A switch that cannot fail any more, but for lack of memory.

    Args:
        runner: has the new plan and the new weights, and the old caches.
        caches: sizes of the new caches; None: the old ones stay.
        released: the draft model that is released.
    """

    runner: Runner
    caches: CachePlan | None
    released: Runner | None = None

    def commit(self) -> None:
        """Free the old caches and build the new ones. Nothing else may refer to the old ones."""
        runner = self.runner
        runner.captured_speculation = None
        if self.released is not None:
            self.released.close()
        if self.caches is None:
            runner.make_decode_steps()
            return
        runner.cache = runner.decode = None
        runner.build_caches(self.caches)


def prepare_switch(runner: Runner, options: RunnerOptions) -> Switch:
    """Bind and load what drafts under other options, beside what runs; the model's own weights are not read again. If
    it fails, the runner is as it was.

    Args:
        runner: open, with one process.
        options: those of the runner but for what drafts.

    Raises:
        UsageError, CheckpointError, BindError, CapacityError: as `Runner.open` for the same options; CapacityError also
            if both drafters do not fit in memory together. UsageError: several ranks would have to load something.
    """
    if runner.files.exported is not None:
        options = settle_options(options, runner.files.exported, runner.backend.name)
    loaded, requested = _list_drafters(runner.options), _list_drafters(options)
    if requested == loaded:
        runner.options = options
        return Switch(runner, None)
    if runner.ranks is not None:
        if not requested <= loaded:
            raise UsageError(
                "Several ranks share the model, and what would draft is not loaded on them.",
                there_is="drafting by what was loaded when they started, by n-grams, and none",
                remedy="pass it as speculative_config when they start, or mtp=True to load prediction layers for later",
            )
        runner.options = replace(runner.options, num_drafts=options.num_drafts)
        return Switch(runner, None)
    plan = runner.options, runner.base, runner.drafters, runner.model, runner.plan, runner.max_model_len
    weights, released = (runner.loaded, runner.steps, runner.kv_values), runner.draft
    checks = [*runner.verdicts], {**runner.demoted}, {**runner.wrong_layouts}, runner.cached
    try:
        return _switch(runner, options, released)
    except BaseException:
        if runner.draft is not None and runner.draft is not released:
            runner.draft.close()
        runner.options, runner.base, runner.drafters, runner.model, runner.plan, runner.max_model_len = plan
        (runner.loaded, runner.steps, runner.kv_values), runner.draft = weights, released
        runner.verdicts, runner.demoted, runner.wrong_layouts, runner.cached = checks
        raise


def _switch(runner: Runner, options: RunnerOptions, released: Runner | None) -> Switch:
    """`prepare_switch` where something is loaded or released."""
    runner.options, runner.max_model_len = options, runner.longest
    stays = options.has_own_mtp and bool(runner.base.mtp)
    if not stays:
        runner.base = replace(runner.base, mtp=())
    runner.add_drafters(apart=not stays)
    runner.check_kernels()
    runner.draft = None if options.draft is None else runner.bind_draft(options.draft)
    _check_memory(runner)
    caches = runner.plan_caches()
    runner.kv_values = kv_scales.read_values(runner, runner.plan, runner.cached)
    runner.loaded = read_weights(runner, None)
    runner.link_weights()
    if runner.draft is not None:
        runner.draft.load_weights(None)
    return Switch(runner, caches, released)


def _check_memory(runner: Runner) -> None:
    """Raise CapacityError if the weights to be loaded do not fit beside those that are."""
    plan, packed = runner.plan, runner.loaded.packed
    new = sum(
        plan.nbytes(plan.weights[i], name)
        for i, names in plan.packings.items()
        for name in names
        if (i, name) not in packed
    )
    new += runner.draft.plan.weight_bytes if runner.draft is not None else 0
    free_bytes = runner.backend.memory().free_bytes
    if new > free_bytes:
        raise CapacityError(
            f"What drafts takes {format_bytes(new)} beside what is loaded.",
            there_is=f"{format_bytes(free_bytes)} free",
            remedy="switch to None first, which releases what drafts now, or quantize it (draft_quantization)",
        )


def _list_drafters(options: RunnerOptions) -> set[tuple[str | None, ...]]:
    """What drafts under options, so that equal results need nothing to be loaded."""
    found: set[tuple[str | None, ...]] = set()
    if options.mtp:
        name = None if options.mtp_files is None else options.mtp_files.name
        found.add(("mtp", name, options.draft_quantization))
    if options.eagle is not None:
        found.add(("eagle", options.eagle.name, options.draft_quantization))
    if options.draft is not None:
        own = options.draft.options
        found.add(("draft_model", options.draft.files.name, str(own.dtype), own.kv_cache_dtype, own.quantization))
    return found
