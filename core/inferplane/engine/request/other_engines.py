"""Options and verbs of other engines, with what to use here: for errors of `LLM`, of `SamplingParams`, of the command
line and of settings files, and for docs/other-engines.md. Only those whose names differ from those here, or that have
no counterpart.

Without torch, as the options themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import groupby
from typing import NamedTuple


class OtherOption(NamedTuple):
    """An option of another engine.

    Args:
        engine: its name.
        names: of the option, without dashes, with underscores.
        here: the option to use here (`ALL_OPTIONS`, or a setting of the server); empty: there is none.
        note: how it differs, or what to do without it.
        shell: what to use on the command line, if that is no flag; {here} stands for `here`.
    """

    engine: str
    names: tuple[str, ...]
    here: str = ""
    note: str = ""
    shell: str = ""


VLLM, SGLANG, LLAMA_CPP, OLLAMA, TGI = "vLLM", "SGLang", "llama.cpp", "Ollama", "TGI"
FASTDEPLOY = "FastDeploy"
BEHIND_VERB = "the word behind the verb"
PRIORITY = "AsyncLLM.generate takes a priority; the server takes its clients in turns"
LAUNCH = "torchrun --nproc-per-node N -m inferplane"
BYTES = "bytes for the cache instead of a share of the memory"
MERGE = "merge the adapter into the checkpoint"
WHOLE = "a model that is too large for one device is divided by torchrun, each layer over all devices"
REPLICAS = "start a server per replica behind a load balancer"
OWN_CODE = "code of a checkpoint is never run; a plugin may add a model family"
NAMED = "a revision is part of the name, hf:ORG/NAME@REVISION; HF_HOME names the cache"
EXPLAINED = "pins one op after the other; `inferplane explain` shows the choices"
GRAPHS = "False runs every step eagerly"
IN_PYTHON = "LLM(capture=False), in Python"
OWN_CONFIG = "change the checkpoint's config.json"
OWN_TOKENIZER = "the model's folder holds its tokenizer"
TEXT_ONLY = "images are not supported"
CONSTRAINED = "or regex, grammar"
IN_REQUESTS = "the field {here} of requests"
SWITCH = "/think of `inferplane chat`, or the field chat_template_kwargs of requests"
IN_REQUESTS_TOO = "the field reasoning_effort of requests"
IN_FORMAT = "the field response_format of requests"
BY_PENALTIES = "temperature, top_k, top_p, min_p and penalties choose tokens"
ON_DEVICE = "weights and cache stay on the device; preempted sequences are computed again"
ALL_LAYERS = "all layers are on it"
ALWAYS_TOGETHER = "sequences always share steps"
WHOLE_TEXT = "penalties look at the whole sequence"
REFUSED_PROMPT = "a prompt that is too long is refused, and nothing of it is dropped"
OPERATOR = "a server holds one model from its start to its end"

OTHER_OPTIONS: tuple[OtherOption, ...] = tuple(
    OtherOption(engine, tuple(names.split()), *rest)
    for engine, names, *rest in (
        (VLLM, "model", "model", "", BEHIND_VERB),
        (VLLM, "gpu_memory_utilization", "kv_cache_bytes", BYTES),
        (VLLM, "kv_cache_memory_bytes", "kv_cache_bytes"),
        (VLLM, "num_gpu_blocks_override", "kv_cache_tokens", "tokens instead of blocks"),
        (VLLM, "tensor_parallel_size tp", "tensor_parallel_size", "torchrun starts the processes", LAUNCH),
        (VLLM, "pipeline_parallel_size pp", "", WHOLE),
        (VLLM, "data_parallel_size dp data_parallel_size_local data_parallel_address headless", "", REPLICAS),
        (VLLM, "nnodes node_rank master_addr master_port", "tensor_parallel_size", "options of torchrun", LAUNCH),
        (VLLM, "enable_expert_parallel", "", "each expert is on one rank whenever torchrun starts several"),
        (VLLM, "distributed_executor_backend", "", f"start it by {LAUNCH}"),
        (VLLM, "sampling_params", "params", "of generate, stream and chat", "the fields of requests"),
        (VLLM, "use_tqdm", "", "generate and chat show no progress"),
        (VLLM, "enable_thinking", "thinking", "of chat", SWITCH),
        (VLLM, "reasoning_effort", "chat_template_kwargs", 'of chat: {"reasoning_effort": "high"}', IN_REQUESTS_TOO),
        (VLLM, "add_generation_prompt", "continue_final_message", "of chat; else a reply is always begun", IN_REQUESTS),
        (VLLM, "response_format", "json_schema", "a parameter of SamplingParams", IN_FORMAT),
        (VLLM, "enforce_eager compilation_config", "capture", GRAPHS, IN_PYTHON),
        (VLLM, "cudagraph_capture_sizes max_seq_len_to_capture", "capture", GRAPHS, IN_PYTHON),
        (VLLM, "speculative_config", "speculative_config", "", "--speculative-method and --speculative-model"),
        (VLLM, "block_size", "", "the KV layout that the device's kernels read decides"),
        (VLLM, "swap_space cpu_offload_gb kv_offloading_size", "", ON_DEVICE),
        (VLLM, "kv_transfer_config kv_events_config", "", "prefill, decode and cache are in one engine"),
        (VLLM, "enable_lora lora_modules max_loras max_lora_rank max_cpu_loras lora_request", "", MERGE),
        (VLLM, "trust_remote_code", "", OWN_CODE),
        (VLLM, "tokenizer tokenizer_mode tokenizer_revision", "", OWN_TOKENIZER),
        (VLLM, "skip_tokenizer_init", "", "prompts may be token ids in any case"),
        (VLLM, "download_dir revision", "", NAMED),
        (VLLM, "hf_token", "", "set the variable HF_TOKEN"),
        (
            VLLM,
            "generation_config override_generation_config",
            "",
            "requests state how tokens are chosen",
        ),
        (VLLM, "limit_mm_per_prompt mm_processor_kwargs allowed_local_media_path", "", TEXT_ONLY),
        (VLLM, "enable_chunked_prefill", "max_num_batched_tokens", "prompts are always read in chunks of that size"),
        (VLLM, "attention_backend", "ops", EXPLAINED, "--op"),
        (VLLM, "scheduling_policy", "", PRIORITY),
        (
            VLLM,
            "max_num_partial_prefills long_prefill_token_threshold",
            "max_prompt_tokens_per_step",
            "beside decoding",
        ),
        (VLLM, "guided_decoding_backend structured_outputs_config", "", "constraints need the extra `constrained`"),
        (VLLM, "guided_decoding structured_outputs", "json_schema", CONSTRAINED, IN_FORMAT),
        (VLLM, "bad_words allowed_token_ids", "logit_bias", "by token id", IN_REQUESTS),
        (VLLM, "best_of use_beam_search", "n", "independent samples", IN_REQUESTS),
        (VLLM, "truncate_prompt_tokens", "", REFUSED_PROMPT),
        (VLLM, "skip_special_tokens detokenize", "", "results have text and token_ids"),
        (VLLM, "include_stop_str_in_output", "", "the text ends before a stop string"),
        (VLLM, "max_logprobs", "logprobs", "at most 20 a token", IN_REQUESTS),
        (VLLM, "logits_processors", "logit_bias", "or penalties and constraints", IN_REQUESTS),
        (VLLM, "enable_prompt_embeds", "", "prompts are text or token ids"),
        (VLLM, "enable_sleep_mode", "", "end the process to free the device"),
        (VLLM, "enable_auto_tool_choice", "", "calls of tools are always recognized"),
        (VLLM, "enable_prompt_tokens_details", "", "usage always counts cached tokens"),
        (VLLM, "enable_force_include_usage", "", "clients request it by stream_options"),
        (VLLM, "enable_tokenizer_info_endpoint", "", "/tokenizer_info is always answered"),
        (VLLM, "enable_request_id_headers", "", "answers always have X-Request-Id"),
        (VLLM, "disable_log_requests disable_log_stats uvicorn_log_level", "log_level"),
        (VLLM, "otlp_traces_endpoint", "otlp_endpoint"),
        (VLLM, "pooler_config override_pooler_config", "pooling"),
        (VLLM, "task runner", "", "the checkpoint decides; a decoder generates text and makes embeddings"),
        (VLLM, "hf_overrides rope_scaling rope_theta", "", OWN_CONFIG),
        (VLLM, "seed", "seed", "a parameter of each request", IN_REQUESTS),
        (VLLM, "root_path", "", "the proxy in front removes the prefix of paths"),
        (VLLM, "ssl_certfile", "tls_cert"),
        (VLLM, "ssl_keyfile", "tls_key"),
        (VLLM, "ssl_ca_certs ssl_cert_reqs", "", "keys authenticate clients; a proxy in front may check certificates"),
        (VLLM, "uds", "host", "the server listens on TCP"),
        (VLLM, "middleware", "", "put a proxy in front"),
        (VLLM, "allowed_origins", "cors_origins"),
        (VLLM, "api_server_count", "http_workers"),
        (SGLANG, "model_path", "model", "", BEHIND_VERB),
        (SGLANG, "mem_fraction_static", "kv_cache_bytes", BYTES),
        (SGLANG, "max_total_tokens", "kv_cache_tokens"),
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
        (SGLANG, "schedule_policy", "", PRIORITY),
        (SGLANG, "attention_backend sampling_backend", "ops", EXPLAINED, "--op"),
        (SGLANG, "grammar_backend", "", "constraints need the extra `constrained`"),
        (SGLANG, "json_model_override_args", "", OWN_CONFIG),
        (SGLANG, "enable_metrics", "", "/metrics is always answered"),
        (LLAMA_CPP, "m hf_repo hf hfr hf_file hff", "model", "a GGUF file or hf:ORG/NAME:Q4_K_M", BEHIND_VERB),
        (LLAMA_CPP, "model_url mu", "model", "download the file first", BEHIND_VERB),
        (LLAMA_CPP, "hf_token hft", "", "set the variable HF_TOKEN"),
        (LLAMA_CPP, "alias", "served_model_name"),
        (LLAMA_CPP, "ctx_size c", "max_model_len", "tokens of one sequence, not of all slots together"),
        (LLAMA_CPP, "n_gpu_layers gpu_layers ngl", "device", ALL_LAYERS),
        (LLAMA_CPP, "override_tensor ot cpu_moe cmoe n_cpu_moe ncmoe no_kv_offload nkvo", "", ON_DEVICE),
        (LLAMA_CPP, "main_gpu", "index"),
        (LLAMA_CPP, "split_mode tensor_split", "tensor_parallel_size", "equal shares", LAUNCH),
        (LLAMA_CPP, "parallel np", "max_num_seqs"),
        (LLAMA_CPP, "batch_size ubatch_size b ub", "max_num_batched_tokens"),
        (LLAMA_CPP, "cont_batching cb no_cont_batching", "", ALWAYS_TOGETHER),
        (LLAMA_CPP, "cache_reuse cache_prompt", "enable_prefix_caching", "whole blocks of equal beginnings"),
        (LLAMA_CPP, "context_shift no_context_shift keep", "", REFUSED_PROMPT),
        (LLAMA_CPP, "n_predict predict", "max_tokens"),
        (LLAMA_CPP, "temp", "temperature"),
        (LLAMA_CPP, "repeat_penalty", "repetition_penalty", "", IN_REQUESTS),
        (LLAMA_CPP, "repeat_last_n", "", WHOLE_TEXT),
        (LLAMA_CPP, "mirostat typical tfs xtc_probability dynatemp_range dry_multiplier samplers", "", BY_PENALTIES),
        (LLAMA_CPP, "grammar_file json_schema_file", "grammar", "or json_schema; the text, not a file", IN_REQUESTS),
        (LLAMA_CPP, "cache_type_k cache_type_v ctk ctv", "kv_cache_dtype", "K and V alike"),
        (LLAMA_CPP, "threads t threads_batch tb", "", "set the variable OMP_NUM_THREADS"),
        (LLAMA_CPP, "threads_http", "http_workers", "processes"),
        (LLAMA_CPP, "timeout to", "request_timeout_s"),
        (LLAMA_CPP, "ssl_key_file", "tls_key"),
        (LLAMA_CPP, "ssl_cert_file", "tls_cert"),
        (LLAMA_CPP, "log_verbosity lv", "log_level"),
        (LLAMA_CPP, "log_timestamps log_prefix log_colors", "log_format"),
        (LLAMA_CPP, "reasoning_format", "reasoning_parser"),
        (LLAMA_CPP, "reasoning_budget", "", "requests have the field thinking_token_budget"),
        (LLAMA_CPP, "chat_template_file", "chat_template"),
        (LLAMA_CPP, "jinja no_jinja", "", "chat templates are always rendered"),
        (LLAMA_CPP, "metrics", "", "/metrics is always answered"),
        (LLAMA_CPP, "embedding embeddings", "", "every model has /v1/embeddings"),
        (LLAMA_CPP, "reranking rerank", "", "embeddings alone"),
        (
            LLAMA_CPP,
            "rope_scaling rope_scale rope_freq_base rope_freq_scale override_kv",
            "",
            "the file's own apply",
        ),
        (LLAMA_CPP, "flash_attn fa", "ops", EXPLAINED, "--op"),
        (LLAMA_CPP, "draft_max draft", "num_speculative_tokens"),
        (LLAMA_CPP, "model_draft md", "speculative_model", "with speculative_method draft_model"),
        (LLAMA_CPP, "lora lora_scaled", "", MERGE),
        (LLAMA_CPP, "gpu_layers_draft ngld", "device", "the draft model is on it too"),
        (LLAMA_CPP, "mmproj", "", TEXT_ONLY),
        (LLAMA_CPP, "mlock no_mmap", "", "weights are read once, into memory of the device"),
        (OLLAMA, "num_ctx", "max_model_len", "tokens of one sequence"),
        (OLLAMA, "num_gpu", "device", ALL_LAYERS),
        (OLLAMA, "main_gpu", "index"),
        (OLLAMA, "num_batch", "max_num_batched_tokens"),
        (OLLAMA, "num_parallel", "max_num_seqs"),
        (OLLAMA, "max_queue", "max_waiting"),
        (OLLAMA, "num_predict", "max_tokens"),
        (OLLAMA, "num_keep", "", REFUSED_PROMPT),
        (OLLAMA, "num_thread", "", "set the variable OMP_NUM_THREADS"),
        (OLLAMA, "kv_cache_type f16_kv", "kv_cache_dtype"),
        (OLLAMA, "repeat_penalty", "repetition_penalty", "", IN_REQUESTS),
        (OLLAMA, "repeat_last_n", "", WHOLE_TEXT),
        (OLLAMA, "mirostat mirostat_eta mirostat_tau tfs_z typical_p", "", BY_PENALTIES),
        (OLLAMA, "format", "json_schema", "the schema", IN_FORMAT),
        (
            OLLAMA,
            "think hidethinking",
            "",
            "`/think off` in a chat; requests have reasoning_effort and include_reasoning",
        ),
        (OLLAMA, "keep_alive keepalive max_loaded_models", "", OPERATOR),
        (OLLAMA, "use_mmap use_mlock low_vram numa", "", "weights are read once, into memory of the device"),
        (OLLAMA, "flash_attention", "ops", EXPLAINED, "--op"),
        (OLLAMA, "origins", "cors_origins"),
        (TGI, "model_id", "model", "", BEHIND_VERB),
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
        (FASTDEPLOY, "max_concurrency", "max_connections"),
        (FASTDEPLOY, "max_waiting_time", "max_waiting", "sequences that wait; more are refused at once"),
        (FASTDEPLOY, "engine_worker_queue_port cache_queue_port", "", "the parts of the server need no ports"),
        (FASTDEPLOY, "use_warmup", "", "kernels are tried out at every start"),
        (
            FASTDEPLOY,
            "kv_cache_ratio static_decode_blocks",
            "",
            "prompts and generated tokens share one pool of blocks",
        ),
        (FASTDEPLOY, "max_long_partial_prefills", "max_num_batched_tokens", "tokens of a step"),
        (FASTDEPLOY, "use_cudagraph graph_optimization_config", "capture", GRAPHS, IN_PYTHON),
        (FASTDEPLOY, "disable_custom_all_reduce", "", "the device's own library joins the parts of ranks"),
        (FASTDEPLOY, "splitwise_role innode_prefill_ports", "", "prefill, decode and cache are in one engine"),
        (FASTDEPLOY, "guided_decoding_disable_any_whitespace", "", "constraints need the extra `constrained`"),
        (FASTDEPLOY, "dynamic_load_weight", "", OPERATOR),
        (FASTDEPLOY, "enable_logprob", "logprobs", "at most 20 a token", IN_REQUESTS),
        (FASTDEPLOY, "tool_parser_plugin", "tool_call_parser", "a plugin may add forms"),
        (FASTDEPLOY, "enable_mm", "", TEXT_ONLY),
    )
)
"""Every row is an option as the engine's own documentation names it."""


OTHER_VERBS: Mapping[str, str] = {
    "run": "`inferplane chat MODEL` holds a conversation, `inferplane generate MODEL -p TEXT` continues a text",
    "ps": "/v1/models of a server names its model, /status shows its work",
    "stop": "Ctrl-C or SIGTERM ends a server, which then frees the device",
    "create": "`inferplane chat --system TEXT` states a system message; models are not made from others",
    "cp": "`inferplane serve --served-model-name NAME` gives a model another name",
    "complete": "`inferplane generate MODEL -p TEXT` continues a text",
    "run-batch": "a script with `LLM.generate` runs many prompts in shared steps",
    "collect-env": "`inferplane doctor` checks and describes the machine",
    "signin": "`hf auth login`, or the variable HF_TOKEN, is where the hub's token is read",
}
"""Verbs of vLLM's and Ollama's commands -> what to use here, as a remedy."""


def as_flag(option: OtherOption) -> str:
    """What a row's `here` is on the command line."""
    return option.shell.format(here=option.here) or f"--{option.here.replace('_', '-')}"


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
