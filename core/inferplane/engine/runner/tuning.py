"""Tuning a model's kernels on an opened device, without its weights: what `inferplane tune` does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from inferplane.binding import Bench, Tuned, tune, write_lock
from inferplane.engine.runner.model_files import ModelFiles
from inferplane.engine.runner.model_runner import Runner, RunnerOptions
from inferplane.plugins import PluginHost
from inferplane.types.batch import Query, make_batch


def tuned(
    files: ModelFiles,
    host: PluginHost,
    device: str,
    options: RunnerOptions,
    told: Callable[[Tuned], None] = lambda outcome: None,
    *,
    index: int = 0,
) -> tuple[Runner, list[Tuned]]:
    """Open the device, bind the model, and measure every site where the plan could take several kernels.

    Args:
        files: the model; only its config is read.
        host: the plugin host.
        device: the user's word.
        options: as for running the model; a lock file in them is where tuning begins.
        told: is given each outcome as it comes.
        index: which of several such devices.

    Raises:
        DeviceError, BindError, CheckpointError: see each.
    """
    runner = Runner(files, host, host.backend(device, index=index), options)
    backend = runner.backend
    runner.state = host.open(backend)
    runner._prepare()
    settings = runner.plan.settings
    bench = Bench(settings.device, backend.torch_device_indexed, settings.dtype, settings.features, runner.offer)

    def record(work: Callable[[], Any]) -> Callable[[], Any]:
        bucket = make_batch([Query([0], 0, [0])], block_tokens=1, device=backend.torch_device_indexed)
        recorded = backend.capture(lambda batch: work(), bucket)
        replay: Callable[[], Any] = work if recorded is None else recorded.replay
        return replay

    return runner, tune(runner.plan, bench, backend.timer(), record, told)


def lock(path: str | Path, runner: Runner, outcomes: list[Tuned]) -> None:
    """Write what was found as a lock file, with what led to it.

    Raises:
        UsageError: it cannot be written.
    """
    choices = {o.key: o.chosen for o in outcomes}
    write_lock(path, runner.fingerprint(), choices, {o.key: facts(o) for o in outcomes})


def facts(outcome: Tuned) -> dict[str, Any]:
    """An outcome as JSON: times are medians in microseconds, by rows of the step."""
    kernels: dict[str, Any] = {}
    for trial in outcome.timings:
        found: dict[str, Any] = {"error": trial.error, "tolerance": trial.tolerance}
        if trial.wrong:
            found["wrong"] = trial.wrong
        else:
            found["us"] = {str(n): round(sorted(s)[len(s) // 2] * 1e6, 2) for n, s in trial.seconds.items()}
            found["noise"] = round(trial.noise, 4)
        kernels[trial.kernel] = found
    return {"site": outcome.site, "before": outcome.before, "chosen": outcome.chosen, "kernels": kernels}
