"""Exports a model: packs its weights for one device as a start would, and writes them to a folder."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from inferplane.binding import Plan, signature, write_lock
from inferplane.engine.runner.loading.kv_scales import export_scales
from inferplane.engine.runner.loading.weight_loading import describe_packings, pack_weights
from inferplane.engine.runner.model_files import LOCK, ModelFiles
from inferplane.engine.runner.model_runner import Runner
from inferplane.engine.runner.options import AS_STORED, RunnerOptions
from inferplane.errors import UsageError
from inferplane.hub.repository import CONFIGS, TOKENIZER_PATTERNS, TOKENIZERS
from inferplane.models.exported import Manifest, RankWriter
from inferplane.models.exported.manifest import hash_packings
from inferplane.models.exported.writer import number_weights
from inferplane.models.reading.quant_files import FILES
from inferplane.plugins import PluginHost
from inferplane.types import Packing, Placement, Weight
from inferplane.types.packages import version_of

CONFIG = "config.json"
LICENSES = ("LICENSE*", "NOTICE*", "USE_POLICY*")


def export_model(
    files: ModelFiles,
    host: PluginHost,
    device: str,
    options: RunnerOptions,
    folder: Path,
    *,
    index: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Manifest:
    """Write a model's packed weights to a new folder, with its config, tokenizer and kernel choices. There is no folder
    after a failure, and none under its name before all is written.

    Args:
        files: the model, with weights.
        host: the plugin host.
        device: its name. It is opened, and its kernels are checked as for a start.
        options: how to bind and load, among them `ranks`; layers that draft (MTP) are written if the checkpoint has
            any, in `draft_quantization` if that is another one; what drafts with files of its own is refused.
        folder: must not exist.
        index: which of several such devices.
        progress: called with the bytes of packed weights, and of all, over all ranks.

    Raises:
        UsageError: the folder exists or cannot be written; the model is an export; what drafts cannot be held.
        KernelError: a packing cannot be written.
        CheckpointError, BindError, DeviceError: as for loading it.
    """
    if os.path.lexists(folder):
        raise UsageError(f"{folder} exists.", remedy="name another folder, or remove it")
    if files.exported is not None:
        raise UsageError(f"{files.name} is an export.", remedy="export the model that it was made from")
    _check_drafter(options)
    made = folder.absolute().parent / f".{folder.name}.{secrets.token_hex(4)}"
    try:
        made.mkdir(parents=True)
        manifest = _Exporter(files, host, device, options, made, index, progress).run()
        made.rename(folder)
        return replace(manifest, folder=str(folder))
    except OSError as error:
        raise UsageError(
            f"{folder} cannot be written: {error.strerror or error}.", remedy="choose another folder, or free space"
        ) from error
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _check_drafter(options: RunnerOptions) -> None:
    """Raise UsageError for a drafter that an export cannot hold as requested."""
    if options.eagle is not None or options.draft is not None or options.mtp_files is not None:
        raise UsageError(
            "An export holds the model, and the prediction layers in its own files.",
            remedy="leave out the files of what drafts here, and name them where the export is started",
        )


class _Exporter:
    def __init__(
        self,
        files: ModelFiles,
        host: PluginHost,
        device: str,
        options: RunnerOptions,
        folder: Path,
        index: int,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        one = options.draft_quantization in (None, options.quantization or AS_STORED)
        drafts = None if one else options.draft_quantization
        self.options = replace(options, mtp=False, has_draft_layer=False, draft_quantization=drafts)
        self.files, self.host, self.folder, self.progress = files, host, folder, progress
        self.backend = host.backend(device, index=index)
        self.state = host.open(self.backend)

    def run(self) -> Manifest:
        """Write all ranks, then what they have in common."""
        ranks = self.options.ranks
        if self.options.load_format != "dummy" and self._has_draft_layers():
            self.options = replace(self.options, mtp=True)
        elif self.options.draft_quantization is not None:
            raise UsageError(
                f"draft_quantization = {self.options.draft_quantization!r}: {self.files.name} has no prediction "
                "layers (MTP) to export in it.",
                remedy="leave draft_quantization out",
            )
        layouts: list[str] = []
        rank_bytes: list[int] = []
        for rank in range(ranks):
            runner = self._bind(rank)
            writer = self._write_rank(runner, rank)
            layouts.append(writer.close())
            rank_bytes.append(writer.nbytes)
        packings = describe_packings(runner)
        manifest = Manifest(
            inferplane=version_of("inferplane") or "(source tree)",
            device=self.backend.name,
            arch=self.state.arch,
            features={name: feature.present for name, feature in self.state.features.items()},
            dtype=str(runner.dtype).removeprefix("torch."),
            quantization=self.options.quantization,
            draft_quantization=self.options.draft_quantization,
            packings=packings,
            packing_hash=hash_packings({label: entry["version"] for label, entry in packings.items()}),
            layouts=layouts,
            rank_bytes=rank_bytes,
            kv_scales=export_scales(runner),
            names=sorted(self.files.names()) if self.files.config.get("quantization_config") else None,
        )
        self._write_common(runner)
        manifest.write(self.folder)
        return manifest

    def _bind(self, rank: int) -> Runner:
        runner = Runner(self.files, self.host, self.backend, self.options)
        runner.placement, runner.state = Placement.shared(rank, self.options.ranks), self.state
        runner.bind_and_check()
        return runner

    def _has_draft_layers(self) -> bool:
        """Whether the config states layers that draft, and the checkpoint has their tensors."""
        if not self.files.config.get("num_nextn_predict_layers"):
            return False
        runner = Runner(self.files, self.host, self.backend, replace(self.options, mtp=True, draft_quantization=None))
        runner.state = self.state
        try:
            runner.bind(assumed=False)
        except UsageError:  # the family reads none
            return False
        model, source = runner.model, runner.view(self.files.source())
        weights = [weight for layer in model.mtp for _, weight in layer.weights() if not weight.optional]
        return all(source.shape(part) is not None for weight in weights for part in weight.parts)

    def _write_rank(self, runner: Runner, rank: int) -> RankWriter:
        plan = runner.plan
        numbers, sites = number_weights(plan.model.weights())
        writer = RankWriter(self.folder / f"rank_{rank}", sites)
        ranks = self.options.ranks

        def store(weight: Weight, packing: Packing, packed: Any) -> None:
            if weight.make is None:
                writer.write(numbers[id(weight)], packing, packed)

        def report(done: int, total: int) -> None:
            if self.progress is not None:
                self.progress(rank * total + done, ranks * total)

        pack_weights(runner, report, store)
        return writer

    def _write_common(self, runner: Runner) -> None:
        """The config as it is understood, the kernel choices, and the files beside the weights that a start reads."""
        config = runner.files.config if not runner.files.has_weights else runner.files.config_of_tensors()
        (self.folder / CONFIG).write_text(json.dumps(config, indent=2, default=_as_json) + "\n", encoding="utf-8")
        write_lock(self.folder / LOCK, runner.fingerprint(), list_choices(runner.plan))
        if self.files.folder is None:
            return
        patterns = (*CONFIGS, *TOKENIZERS, *TOKENIZER_PATTERNS, *LICENSES)
        for path in sorted(self.files.folder.iterdir()):
            named = any(fnmatchcase(path.name, pattern) for pattern in patterns)
            if named and path.name not in (CONFIG, *FILES) and path.is_file():  # what FILES say is in the config
                shutil.copyfile(path, self.folder / path.name)


def _as_json(value: Any) -> Any:
    """What a config has that JSON does not name: mappings that cannot be changed, and dtypes."""
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else dict(value)


def list_choices(plan: Plan) -> dict[str, str]:
    """The kernel of each site that has one, as a lock file has them."""
    return {
        f"{op.name}|{kind}|{signature(op)}": choice.kernel.name
        for kind, _, op, choice in plan.distinct()
        if choice.kernel is not None
    }
