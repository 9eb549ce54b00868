"""Another method of speculation for an engine whose model stays loaded."""

from __future__ import annotations

from inferplane.engine.loop.engine import Engine
from inferplane.engine.request.arguments import NETWORK_METHODS
from inferplane.engine.runner.loading.switching import prepare_switch
from inferplane.engine.runner.options import RunnerOptions
from inferplane.engine.speculate import SpeculativeConfig, Speculator
from inferplane.errors import UsageError
from inferplane.types import KVCache


def switch_speculation(engine: Engine, config: SpeculativeConfig | None, options: RunnerOptions) -> None:
    """Draft by another method from now on. The model's weights stay; what drafted before is released unless it drafts
    now, too. Caches that change are built anew in the same budget, and prefixes in them are forgotten.

    Args:
        engine: between requests.
        config: the method; None: one token a step.
        options: of the runner, with what the method needs (`with_draft`).

    Raises:
        UsageError: the engine is closed, or requests run or wait. Otherwise as `prepare_switch`; then nothing changed.
        Whatever fails while the new caches are built, lack of memory above all: the old ones are freed by then, so the
            engine is closed.
    """
    if engine.closed:
        raise UsageError("The model is closed: its weights and its cache are freed.", remedy="make a new LLM")
    engine.settle()
    if live := len(engine.scheduler.running) + len(engine.scheduler.waiting):
        raise UsageError(
            f"{live} request(s) run or wait, with drafts and cache entries of what drafts now.",
            remedy="set speculation when they have ended, or abort them",
        )
    before = engine.speculator
    switch = prepare_switch(engine.runner, options)
    methods = {None if each is None else each.method for each in (config, None if before is None else before.config)}
    if switch.caches is None and methods.isdisjoint(NETWORK_METHODS):  # cached entries are those of the model alone
        switch.commit()
        engine.speculator = None if config is None else Speculator(config, engine.runner, engine.scheduler)
        return
    counted = engine.scheduler.preemptions, engine.scheduler.prefix_queries_tokens, engine.scheduler.prefix_hits_tokens
    engine.speculator, engine.cache = None, KVCache((), 0, engine.cache.block_tokens)
    try:
        switch.commit()
        engine.start(config)
    except BaseException:
        engine.close()
        raise
    scheduler = engine.scheduler
    scheduler.preemptions, scheduler.prefix_queries_tokens, scheduler.prefix_hits_tokens = counted
