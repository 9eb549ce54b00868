"""From the settings for speculation to what the runner has to load beside the model."""

from __future__ import annotations

from dataclasses import replace

from inferplane.engine.runner.model_files import ModelFiles
from inferplane.engine.runner.model_runner import Draft, RunnerOptions
from inferplane.engine.speculate.config import SpeculativeConfig


def with_drafter(options: RunnerOptions, config: SpeculativeConfig | None) -> RunnerOptions:
    """The runner's options with what the method needs: prediction layers, an EAGLE head, a draft model.

    A draft model is bound and loaded apart: its own dtype, KV dtype and weight formats, no pins and no lock file, which
    name the model's sites, and whole on rank 0 where several share the model. An EAGLE head runs in the model's dtype,
    on its hidden states.

    Raises:
        UsageError: no such folder. CheckpointError: it lacks a readable config.
    """
    if config is None:
        return options
    options = replace(options, drafts=config.speculate_max_draft_token_num)
    if config.speculate_method == "inference_with_reference":
        return options
    if config.speculate_method == "mtp":
        return replace(options, mtp=True, drafting_layer=True)
    files = ModelFiles(config.draft_model_name_or_path)
    if config.speculate_method == "eagle":
        return replace(options, eagle=files, drafting_layer=True)
    own = replace(
        options,
        dtype=config.draft_model_dtype,
        kv_dtype=config.draft_model_kv_dtype,
        ops={},
        lock=None,
        mtp=False,
        drafts=1,  # it runs on the newest token, and on a draft that stood where it has no entry of it yet
        ranks=1,
    )
    return replace(options, draft=Draft(files, own))
