"""All settings of the server: name, type, default, range, help text.

Flags (`--max-num-seqs`), variables (`INFERPLANE_MAX_NUM_SEQS`), YAML keys (`max_num_seqs`) and `inferplane config show`
are all generated from this table. The options of the engine are described in `EngineOptions`, which this table reads.
Nothing heavy is imported here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from inferplane.engine.clients.options import ALIASES as OPTION_ALIASES
from inferplane.engine.clients.options import ALL_OPTIONS, help_text
from inferplane.engine.request.arguments import QUANTIZATIONS

MIB = 2**20


def _setting(default: Any, words: str, section: str, **more: Any) -> Any:
    return field(default=default, metadata={"words": words, "section": section, **more})


def _option(name: str, section: str, **more: Any) -> Any:
    """A setting with the default, the help, the range and the choices of the engine's option of that name."""
    option = ALL_OPTIONS[name]
    of = {key: option.metadata.get(key) for key in ("metavar", "choices")}
    if "minimum" in option.metadata:
        of["range"] = (option.metadata["minimum"], option.metadata.get("maximum"))
    given = {"default": option.default, "words": help_text(name), "section": section, **of, **more}
    return _setting(**given)


_model = partial(_setting, section="the model, and where it runs")
_model_option = partial(_option, section="the model, and where it runs")
_engine_option = partial(_option, section="the engine")
_network = partial(_setting, section="ports and access")
_limit = partial(_setting, section="limits")
_operation = partial(_setting, section="operation")

PORT = (0, 65535)


@dataclass(frozen=True)
class ServerSettings:
    """The settings of the server.

    `metadata` of a field: `words` (help text), `section`, and if they apply `range`, `choices`, `metavar`, `secret`,
    `bytes` (the value may have a unit).
    """

    model: str = _model(
        "demo",
        "a folder in the Hugging Face layout, a GGUF file, a name as hf:ORG/NAME or qwen3:0.6b, or demo",
        metavar="MODEL",
    )
    offline: bool = _model(False, "download nothing: the model must be a folder or in the cache")
    served_model_name: tuple[str, ...] = _model(
        (), "names that clients may use instead of the model's; answers contain the first", metavar="NAME"
    )
    device: str = _model_option("device")
    index: int = _model_option("index", range=(0, None))
    dtype: str = _model_option("dtype")
    kv_cache_dtype: str = _model_option("kv_cache_dtype")
    index_key_dtype: str = _model_option("index_key_dtype")
    quantization: str | None = _model_option("quantization", choices=tuple(QUANTIZATIONS))
    head_format: str = _model_option("head_format")
    load_format: str = _model_option("load_format")
    pooling: str = _model("last", "how a prompt's tokens become one embedding", choices=("last", "mean"), metavar="P")
    chat_template: str | None = _model(
        None, "a chat template in place of the checkpoint's: a file, or the template itself", metavar="FILE"
    )
    trust_request_chat_template: bool = _model(False, "requests may bring a chat template (`chat_template`)")
    reasoning_parser: str = _model(
        "auto", "the form of thoughts, by name; auto: by template and family; none: they are text", metavar="NAME"
    )
    tool_call_parser: str = _model(
        "auto", "the form of tool calls, by name; auto: by template and family; none: they are text", metavar="NAME"
    )
    op: tuple[str, ...] = _model_option("ops", default=(), words=f"{help_text('ops')}; repeatable")
    lock: str | None = _model_option("lock")
    strict: bool = _model_option("strict")
    deterministic: bool = _model_option("deterministic")

    max_model_len: int | None = _engine_option("max_model_len")
    max_num_seqs: int = _engine_option("max_num_seqs")
    max_num_batched_tokens: int = _engine_option("max_num_batched_tokens")
    max_new_requests_per_step: int | None = _engine_option("max_new_requests_per_step")
    max_prompt_tokens_per_step: int | None = _engine_option("max_prompt_tokens_per_step")
    max_inter_token_ms: int | None = _engine_option("max_inter_token_ms")
    kv_cache_bytes: int | None = _engine_option("kv_cache_bytes", range=(1, None), bytes=True)
    kv_cache_tokens: int | None = _engine_option("kv_cache_tokens")
    enable_prefix_caching: bool = _engine_option("enable_prefix_caching")
    async_scheduling: str = _engine_option("async_scheduling")
    speculative_method: str | None = _engine_option("speculative_method")
    num_speculative_tokens: int = _engine_option("num_speculative_tokens")
    speculative_model: str | None = _engine_option("speculative_model")
    speculative_quantization: str | None = _engine_option("speculative_quantization")
    prompt_lookup_max: int | None = _engine_option("prompt_lookup_max")
    verify_strategy: str | None = _engine_option("verify_strategy")
    max_candidates: int | None = _engine_option("max_candidates")
    verify_window: int | None = _engine_option("verify_window")
    suffix_decoding_max_tree_depth: int | None = _engine_option("suffix_decoding_max_tree_depth")
    suffix_decoding_max_cached_requests: int | None = _engine_option("suffix_decoding_max_cached_requests")
    suffix_decoding_max_cached_tokens: int | None = _engine_option("suffix_decoding_max_cached_tokens")
    suffix_decoding_max_spec_factor: float | None = _engine_option("suffix_decoding_max_spec_factor")
    suffix_decoding_min_token_prob: float | None = _engine_option("suffix_decoding_min_token_prob")

    host: str = _network("127.0.0.1", "address to listen on; 0.0.0.0: all addresses of this machine", metavar="A")
    port: int = _network(
        8000, "port of all HTTP routes; 0: any free port; -1: none, gRPC alone", range=(-1, 65535), metavar="P"
    )
    health_port: int | None = _network(
        None, "health routes also on a port and a thread of their own", range=PORT, metavar="P"
    )
    http_workers: int = _network(1, "processes that serve HTTP over one engine", range=(1, 64), metavar="N")
    grpc_port: int | None = _network(
        None, "also serve gRPC (KServe's inference protocol) on this port; 0: any free port", range=PORT, metavar="P"
    )
    grpc_health_port: int | None = _network(
        None, "gRPC's health protocol on a port and threads of their own", range=PORT, metavar="P"
    )
    metrics_port: int | None = _network(None, "metrics also on a port of their own", range=PORT, metavar="P")
    api_key: tuple[str, ...] = _network(
        (), "accepted keys; better set in INFERPLANE_API_KEY or in a file", metavar="KEY", secret=True
    )
    api_key_file: str | None = _network(
        None, "file of keys, one a line, as `key` or `name: key`; SIGHUP reads it again", metavar="FILE"
    )
    tls_cert: str | None = _network(None, "serve HTTPS with this certificate chain (PEM)", metavar="FILE")
    tls_key: str | None = _network(None, "its private key (PEM)", metavar="FILE")
    allowed_hosts: tuple[str, ...] = _network(
        (), "names by which clients may address the server, beside local ones; *: any", metavar="NAME"
    )
    cors_origins: tuple[str, ...] = _network((), "web pages that may call from a browser; repeatable", metavar="URL")

    max_waiting: int = _limit(128, "most sequences that wait; more are refused (429)", range=(0, None), metavar="N")
    max_num_seqs_per_key: int | None = _limit(
        None, "most sequences of one key that run or wait; more are refused (429)", range=(1, None), metavar="N"
    )
    max_tokens_per_minute_per_key: int | None = _limit(
        None, "most tokens of one key in a minute, prompts and answers (429)", range=(1, None), metavar="N"
    )
    max_prompt_tokens: int | None = _limit(None, "most tokens per prompt", range=(1, None), metavar="N")
    max_output_tokens: int | None = _limit(None, "most generated tokens per sequence", range=(1, None), metavar="N")
    strict_fields: bool = _limit(False, "refuse requests with fields that would otherwise be ignored")
    max_n: int = _limit(64, "most sequences per prompt", range=(1, 128), metavar="N")
    max_prompts: int = _limit(64, "most prompts per request", range=(1, 1024), metavar="N")
    max_body_bytes: int = _limit(4 * MIB, "largest body of a request", range=(1024, None), metavar="SIZE", bytes=True)
    max_held_bytes: int = _limit(
        256 * MIB,
        "memory for all bodies and their values at a time (503)",
        range=(MIB, None),
        metavar="SIZE",
        bytes=True,
    )
    max_connections: int = _limit(1024, "most connections at a time", range=(1, None), metavar="N")
    max_connections_per_address: int | None = _limit(
        None, "most HTTP connections of one address at a time (503); not behind a proxy", range=(1, None), metavar="N"
    )
    header_timeout_s: float = _limit(10.0, "seconds allowed for a request's headers", range=(0.1, 600), metavar="S")
    body_timeout_s: float = _limit(30.0, "seconds allowed for a request's body", range=(0.1, 600), metavar="S")
    write_timeout_s: float = _limit(60.0, "seconds a client may leave its answer unread", range=(1, 3600), metavar="S")
    request_timeout_s: float = _limit(300.0, "seconds allowed for a whole request", range=(1, 3600), metavar="S")

    drain_s: float = _operation(30.0, "seconds live requests may run on after SIGTERM", range=(0, 3600), metavar="S")
    stall_s: float = _operation(
        30.0, "seconds without a step despite work until the server is not ready", range=(0.1, 3600), metavar="S"
    )
    native_text: str = _operation(
        "chat", "native `text`: chat (by the chat template) or raw", choices=("chat", "raw"), metavar="F"
    )
    disable_streaming: bool = _operation(False, "send the text of a stream in one piece at its end")
    otlp_endpoint: str | None = _operation(
        None, "send OpenTelemetry spans of requests to this collector (OTLP over HTTP)", metavar="URL"
    )
    log_format: str = _operation(
        "auto", "json, text; auto: text on a terminal", choices=("auto", "json", "text"), metavar="F"
    )
    log_level: str = _operation(
        "info", "lowest level logged", choices=("debug", "info", "warning", "error"), metavar="L"
    )


FIELDS = {f.name: f for f in fields(ServerSettings)}
"""Every setting by its name."""
ALIASES = {alias: name for alias, name in OPTION_ALIASES.items() if name in FIELDS}
"""Other name of a setting -> its name."""
