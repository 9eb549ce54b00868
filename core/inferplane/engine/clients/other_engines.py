"""Options of other engines, with what to use here: for errors of `LLM`, of the command line and of settings files, and
for docs/other-engines.md. Only options whose names differ from those here, or that have no counterpart.

Without torch, as the options themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import NamedTuple


class OtherOption(NamedTuple):
    """An option of another engine.

    Args:
        engine: its name.
        names: of the option, without dashes, with underscores.
        here: the option to use here (`ALL_OPTIONS`, or a setting of the server); empty: there is none.
        note: how it differs, or what to do without it.
        shell: what to use on the command line, if that is no flag.
    """

    engine: str
    names: tuple[str, ...]
    here: str = ""
    note: str = ""
    shell: str = ""


VLLM, SGLANG, LLAMA_CPP, TGI = "vLLM", "SGLang", "llama.cpp", "TGI"
LAUNCH = "torchrun --nproc-per-node N -m inferplane"
BYTES = "bytes for the cache instead of a share of the memory"
MERGE = "merge the adapter into the checkpoint"
WHOLE = "a model that is too large for one device is divided by torchrun, each layer over all devices"
REPLICAS = "start a server per replica behind a load balancer"
OWN_CODE = "code of a checkpoint is never run; a plugin may add a model family"
NAMED = "a revision is part of the name, hf:ORG/NAME@REVISION; HF_HOME names the cache"
EXPLAINED = "pins one op after the other; `inferplane explain` shows the choices"
GRAPHS = "False runs every step eagerly"

OTHER_OPTIONS: tuple[OtherOption, ...] = tuple(
    OtherOption(engine, tuple(names.split()), *rest)
    for engine, names, *rest in (
        (VLLM, "model", "model", "", "the word behind the verb"),
        (VLLM, "gpu_memory_utilization", "kv_cache_bytes", BYTES),
        (VLLM, "num_gpu_blocks_override", "kv_cache_bytes", "bytes instead of blocks"),
        (VLLM, "tensor_parallel_size tp", "tensor_parallel_size", "torchrun starts the processes", LAUNCH),
        (VLLM, "pipeline_parallel_size pp", "", WHOLE),
        (VLLM, "data_parallel_size dp", "", REPLICAS),
        (VLLM, "enable_expert_parallel", "", "each expert is on one rank whenever torchrun starts several"),
        (VLLM, "distributed_executor_backend", "", f"start it by {LAUNCH}"),
        (VLLM, "enforce_eager", "capture", GRAPHS, "LLM(capture=False), in Python"),
        (VLLM, "speculative_config", "speculative_config", "", "--speculative-method and --speculative-model"),
        (VLLM, "block_size", "", "the KV layout that the device's kernels read decides"),
        (VLLM, "swap_space cpu_offload_gb", "", "preempted sequences are computed again; weights stay on the device"),
        (VLLM, "enable_lora lora_modules max_loras max_lora_rank", "", MERGE),
        (VLLM, "trust_remote_code", "", OWN_CODE),
        (VLLM, "tokenizer", "", "the model's folder holds its tokenizer"),
        (VLLM, "download_dir revision", "", NAMED),
        (VLLM, "enable_chunked_prefill", "max_num_batched_tokens", "prompts are always read in chunks of that size"),
        (VLLM, "attention_backend", "ops", EXPLAINED, "--op"),
        (VLLM, "scheduling_policy", "", "each request has a priority"),
        (VLLM, "guided_decoding_backend", "", "constraints need the extra `constrained`"),
        (VLLM, "enable_auto_tool_choice tool_call_parser", "", "calls of tools are always recognized"),
        (VLLM, "reasoning_parser", "", "reasoning is part of the text; clients split it off"),
        (VLLM, "disable_log_requests disable_log_stats uvicorn_log_level", "log_level"),
        (VLLM, "task runner", "", "the checkpoint decides; a decoder generates text and makes embeddings"),
        (VLLM, "hf_overrides rope_scaling rope_theta", "", "change the checkpoint's config.json"),
        (VLLM, "seed", "seed", "a parameter of each request", "the field seed of requests"),
        (VLLM, "root_path", "", "the proxy in front removes the prefix of paths"),
        (VLLM, "ssl_certfile", "tls_cert"),
        (VLLM, "ssl_keyfile", "tls_key"),
        (VLLM, "allowed_origins", "cors_origins"),
        (VLLM, "api_server_count", "http_workers"),
        (SGLANG, "model_path", "model", "", "the word behind the verb"),
        (SGLANG, "mem_fraction_static", "kv_cache_bytes", BYTES),
        (SGLANG, "max_total_tokens", "kv_cache_bytes", "bytes instead of tokens"),
        (SGLANG, "tp_size tp", "tensor_parallel_size", "torchrun starts the processes", LAUNCH),
        (SGLANG, "dp_size dp", "", REPLICAS),
        (SGLANG, "context_length", "max_model_len"),
        (SGLANG, "max_running_requests", "max_num_seqs"),
        (SGLANG, "max_queued_requests", "max_waiting"),
        (SGLANG, "chunked_prefill_size", "max_num_batched_tokens"),
        (SGLANG, "disable_radix_cache", "enable_prefix_caching", "set it to False", "--no-enable-prefix-caching"),
        (SGLANG, "enable_deterministic_inference", "deterministic"),
        (SGLANG, "speculative_algorithm", "speculative_method"),
        (SGLANG, "speculative_num_steps speculative_num_draft_tokens", "num_speculative_tokens"),
        (SGLANG, "speculative_draft_model_path", "speculative_model"),
        (SGLANG, "lora_paths", "", MERGE),
        (SGLANG, "schedule_policy", "", "each request has a priority"),
        (LLAMA_CPP, "m hf_repo", "model", "a GGUF file or hf:ORG/NAME:Q4_K_M", "the word behind the verb"),
        (LLAMA_CPP, "ctx_size c", "max_model_len", "tokens of one sequence, not of all slots together"),
        (LLAMA_CPP, "n_gpu_layers gpu_layers ngl", "device", "all layers are on it"),
        (LLAMA_CPP, "main_gpu", "index"),
        (LLAMA_CPP, "split_mode tensor_split", "tensor_parallel_size", "equal shares", LAUNCH),
        (LLAMA_CPP, "parallel np", "max_num_seqs"),
        (LLAMA_CPP, "batch_size ubatch_size b ub", "max_num_batched_tokens"),
        (LLAMA_CPP, "n_predict predict", "max_tokens"),
        (LLAMA_CPP, "temp", "temperature"),
        (LLAMA_CPP, "cache_type_k cache_type_v ctk ctv", "kv_cache_dtype", "K and V alike"),
        (LLAMA_CPP, "threads t", "", "set the variable OMP_NUM_THREADS"),
        (LLAMA_CPP, "flash_attn fa", "ops", EXPLAINED, "--op"),
        (LLAMA_CPP, "draft_max draft", "num_speculative_tokens"),
        (LLAMA_CPP, "model_draft md", "speculative_model", "with speculative_method draft_model"),
        (LLAMA_CPP, "lora lora_scaled", "", MERGE),
        (LLAMA_CPP, "mmproj", "", "images are not supported"),
        (LLAMA_CPP, "mlock no_mmap", "", "weights are read once, into memory of the device"),
        (TGI, "model_id", "model", "", "the word behind the verb"),
        (TGI, "num_shard sharded", "tensor_parallel_size", "torchrun starts the processes", LAUNCH),
        (TGI, "max_total_tokens", "max_model_len"),
        (TGI, "max_input_tokens max_input_length", "max_prompt_tokens"),
        (TGI, "max_batch_prefill_tokens max_batch_total_tokens", "max_num_batched_tokens"),
        (TGI, "max_batch_size", "max_num_seqs"),
        (TGI, "max_concurrent_requests", "max_waiting", "the sequences that wait, without those that run"),
        (TGI, "max_best_of", "max_n"),
        (TGI, "quantize", "quantization"),
        (TGI, "hostname", "host"),
        (TGI, "json_output", "log_format", "json"),
        (TGI, "lora_adapters", "", MERGE),
    )
)
"""Every row is an option as the engine's own documentation names it."""


def as_flag(option: OtherOption) -> str:
    """What a row's `here` is on the command line."""
    return option.shell or f"--{option.here.replace('_', '-')}"


def as_keyword(option: OtherOption) -> str:
    """What a row's `here` is in Python."""
    return option.here


def advice(word: str, here: Callable[[OtherOption], str] = as_keyword) -> str:
    """What to use in place of another engine's option, as a remedy; empty for words that no other engine has.

    Args:
        word: as the user wrote it, with or without dashes; it returns in the advice.
        here: how a row's option is called where the user wrote it.
    """
    name = word.lstrip("-").replace("-", "_")
    advice_of: dict[str, list[str]] = {}
    for option in OTHER_OPTIONS:
        if name in option.names:
            found = here(option) if option.here else ""
            note = f" ({option.note})" if found and option.note else option.note
            words = f"is {found} here{note}" if found else f"has no counterpart here: {note}"
            advice_of.setdefault(words, []).append(f"{option.engine}'s")
    return "; ".join(f"{' and '.join(engines)} {word} {words}" for words, engines in advice_of.items())


def table() -> list[str]:
    """All rows as lines of Markdown, a section per engine."""
    lines = []
    for engine, options in groupby(OTHER_OPTIONS, key=lambda option: option.engine):
        lines += [
            f"## {engine}",
            "",
            "| option | in Python and in settings | on the command line | note |",
            "|---|---|---|---|",
        ]
        for option in options:
            names = ", ".join(f"`{name}`" for name in option.names)
            cells = [f"`{option.here}`" if option.here else "none", as_flag(option) if option.here else "none"]
            shown = f"`{cells[1]}`" if cells[1].startswith(("--", "torchrun")) else cells[1]
            lines.append(f"| {names} | {cells[0]} | {shown} | {option.note} |")
        lines.append("")
    return lines
