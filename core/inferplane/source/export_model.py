"""Write a model with its weights packed for the device, as `inferplane export` does.

Takes the flags of the source system's export_model.py. Under a launcher one process writes the parts of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from inferplane.cli.screen import Screen
from inferplane.errors import UsageError
from inferplane.source.flags import (
    EXPORT_FLAGS,
    engine_options,
    explain_needless,
    model_of,
    parse,
    speculation,
)
from inferplane.units import format_bytes


def run(words: Sequence[str], screen: Screen, ranks: int | None = None) -> int:
    """Export, and print the folder.

    Args:
        words: the flags.
        screen: where notes go.
        ranks: devices that will share the model; None: as many processes as a launcher started, else 1.
    """
    args = parse("export_model", EXPORT_FLAGS, words, str(__doc__))
    model = model_of(args)
    if not args.output_path:
        raise UsageError("There is no folder to write.", remedy="pass --output_path FOLDER")
    if note := explain_needless(EXPORT_FLAGS, args.given):
        screen.note(note)
    options = engine_options(args, model)
    device = options.pop("device")
    config = speculation(args, model)
    with screen.loading(f"exporting {model.repository}") as loading:
        from inferplane.engine.clients.options import EngineOptions
        from inferplane.engine.runner.exports.export import export_model
        from inferplane.engine.runner.model_files import ModelFiles
        from inferplane.engine.runner.ranks import launcher_ranks
        from inferplane.engine.speculate import SpeculativeConfig, with_draft
        from inferplane.plugins import host

        rank, started, _ = launcher_ranks()
        if rank:
            return 0  # rank 0 writes for all
        runner_options = EngineOptions.of(options).runner_options(ranks or started)
        runner_options = with_draft(runner_options, SpeculativeConfig.of(config))
        files, folder = ModelFiles(model.repository), Path(args.output_path).expanduser()
        made = export_model(files, host(), device, runner_options, folder, progress=loading.bar)
    screen.stream(f"{folder}\n")
    screen.print_remark(f"{format_bytes(max(made.rank_bytes))} of weights for each of {made.ranks} device(s)")
    return 0
