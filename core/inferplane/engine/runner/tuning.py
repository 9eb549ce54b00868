"""Tunes a model's kernels on an opened device, without its weights: for `inferplane tune`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from inferplane.binding import Bench, Tuned, tune, write_lock
from inferplane.engine.runner.model_files import ModelFiles
from inferplane.engine.runner.model_runner import Runner
from inferplane.engine.runner.options import RunnerOptions
from inferplane.plugins import PluginHost
from inferplane.types.batch import Query, make_batch


def tune_model(
    files: ModelFiles,
    host: PluginHost,
    device: str,
    options: RunnerOptions,
    on_outcome: Callable[[Tuned], None] = lambda outcome: None,
    *,
    index: int = 0,
) -> tuple[Runner, list[Tuned]]:
    """Open the device, bind the model, and measure every site where several kernels could be chosen. It takes minutes;
    no weights are read.

    Args:
        files: the model; only its config is read.
        host: the plugin host.
        device: its name.
        options: as for running the model; tuning begins with the choices of their lock file.
        on_outcome: called with each outcome when it is known, to report progress.
        index: which of several such devices.

    Returns:
        The bound runner, and the outcomes, as `write_tuning_lock` takes them.

    Raises:
        DeviceError, BindError, CheckpointError: see each.
    """
    runner = Runner(files, host, host.backend(device, index=index), options)
    backend = runner.backend
    runner.state = host.open(backend)
    runner.bind_and_check()
    settings = runner.plan.settings
    bench = Bench(settings.device, backend.torch_device_indexed, settings.dtype, settings.features, runner.kv_layouts)

    def capture(work: Callable[[], Any]) -> Callable[[], Any]:
        """Capture `work`, so that it is measured as in a captured step; `work` itself where the device captures
        nothing.
        """
        bucket = make_batch([Query([0], 0, [0])], block_tokens=1, device=backend.torch_device_indexed)
        graph = backend.capture(lambda batch: work(), bucket)
        replay: Callable[[], Any] = work if graph is None else graph.replay
        return replay

    return runner, tune(runner.plan, bench, backend.timer(), capture, on_outcome)


def write_tuning_lock(path: str | Path, runner: Runner, outcomes: list[Tuned]) -> None:
    """Write the tuned choices as a lock file, with the measurements.

    Raises:
        UsageError: it cannot be written.
    """
    choices = {o.key: o.chosen for o in outcomes}
    write_lock(path, runner.fingerprint(), choices, {o.key: outcome_data(o) for o in outcomes})


def outcome_data(outcome: Tuned) -> dict[str, Any]:
    """The outcome at one site as JSON-ready data: kernels before and after, and for each kernel its error, tolerance,
    noise, and median times in microseconds by rows of the step.
    """
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
