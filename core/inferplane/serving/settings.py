"""Every setting of the server, once: name, type, default, range, words for help.

Flags (`--max-batch`), variables (`INFERPLANE_MAX_BATCH`), YAML keys (`max_batch`) and `inferplane config show` are all
made of this table. Nothing heavy is imported here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

MIB = 2**20


def _setting(default: Any, words: str, section: str, **more: Any) -> Any:
    return field(default=default, metadata={"words": words, "section": section, **more})


def _model(default: Any, words: str, **more: Any) -> Any:
    return _setting(default, words, "the model, and where it runs", **more)


def _engine(default: Any, words: str, **more: Any) -> Any:
    return _setting(default, words, "the engine", **more)


def _network(default: Any, words: str, **more: Any) -> Any:
    return _setting(default, words, "ports and access", **more)


def _limit(default: Any, words: str, **more: Any) -> Any:
    return _setting(default, words, "limits", **more)


def _operation(default: Any, words: str, **more: Any) -> Any:
    return _setting(default, words, "operation", **more)


PORT = (0, 65535)


@dataclass(frozen=True)
class ServerSettings:
    """How to serve. `metadata` of a field: `words` for help, `section`, and where they apply `range`, `choices`,
    `metavar`, `secret`, `bytes` (units are taken), `short` (another flag, as other commands have it)."""

    model: str = _model("demo", "a folder in the Hugging Face layout, or demo", metavar="MODEL")
    served_model_name: tuple[str, ...] = _model(
        (), "names clients may ask for, instead of the folder's; the first one answers", metavar="NAME"
    )
    device: str = _model("auto", "a device; auto: the best one here", metavar="X")
    index: int = _model(0, "which of several devices of that kind", range=(0, None), metavar="I")
    dtype: str = _model("auto", "float32, bfloat16, float16; auto: the checkpoint's", metavar="D")
    kv_dtype: str = _model("auto", "how the KV cache stores: fp8, int8 where offered", metavar="D")
    quantization: str | None = _model(
        None,
        "quantize linear weights while reading them",
        choices=("weight_only_int8", "weight_only_int4", "a8w8", "a8w8_fp8_wint4"),
        metavar="Q",
    )
    load_format: str = _model("auto", "dummy: random weights", choices=("auto", "dummy"), metavar="F")
    pooling: str = _model("last", "how embeddings are made of a prompt's tokens", choices=("last", "mean"), metavar="P")
    op: tuple[str, ...] = _model((), "pin an op or a site to a provider; repeatable", metavar="WHAT=PROVIDER")
    lock: str | None = _model(None, "take kernel choices from a lock file", metavar="FILE")
    strict: bool = _model(False, "refuse to leave a hot op on its slow reference")
    deterministic: bool = _model(False, "bind only kernels whose results do not depend on the batch")

    max_model_len: int | None = _engine(None, "most tokens of a sequence", range=(1, None), metavar="N")
    max_batch: int = _engine(32, "sequences in a step", range=(1, None), metavar="N")
    max_step_tokens: int = _engine(2048, "tokens in a step; longer prompts are cut", range=(1, None), metavar="N")
    kv_cache_bytes: int | None = _engine(
        None, "memory for the KV cache; left out: 30 %% of what is free", range=(1, None), metavar="SIZE", bytes=True
    )
    prefix_cache: bool = _engine(True, "reuse the cache for equal beginnings of prompts")
    speculate_method: str | None = _engine(
        None,
        "draft several tokens a step",
        choices=("ngram", "inference_with_reference", "draft_model", "mtp", "eagle"),
        metavar="M",
        short="--speculate",
    )
    speculate_max_draft_token_num: int = _engine(1, "drafts a step", range=(1, None), metavar="N", short="--drafts")
    draft_model_name_or_path: str | None = _engine(
        None,
        "folder of the draft model or EAGLE head; demo-draft, demo-eagle: for the demo model",
        metavar="X",
        short="--draft-model",
    )

    host: str = _network("127.0.0.1", "address to listen on; 0.0.0.0: all of this machine's", metavar="A")
    port: int = _network(8000, "port of all HTTP routes; 0: any that is free", range=PORT, metavar="P")
    health_port: int | None = _network(None, "health on a port of its own, too", range=PORT, metavar="P")
    http_workers: int = _network(1, "processes that serve HTTP over one engine", range=(1, 64), metavar="N")
    grpc_port: int | None = _network(
        None, "also serve gRPC (KServe's inference protocol) on this port; 0: any that is free", range=PORT, metavar="P"
    )
    metrics_port: int | None = _network(None, "metrics on a port of their own, too", range=PORT, metavar="P")
    api_key: tuple[str, ...] = _network(
        (), "clients must send one of these; better in INFERPLANE_API_KEY or a file", metavar="KEY", secret=True
    )
    api_key_file: str | None = _network(None, "keys that clients must send one of, one a line", metavar="FILE")
    tls_cert: str | None = _network(None, "serve HTTPS with this certificate chain (PEM)", metavar="FILE")
    tls_key: str | None = _network(None, "its private key (PEM)", metavar="FILE")
    cors_origins: tuple[str, ...] = _network((), "web pages that may call from a browser; repeatable", metavar="URL")

    max_waiting: int = _limit(128, "sequences that may wait; more are refused (429)", range=(0, None), metavar="N")
    max_prompt_tokens: int | None = _limit(None, "most tokens of a prompt", range=(1, None), metavar="N")
    max_output_tokens: int | None = _limit(None, "most tokens generated for a prompt", range=(1, None), metavar="N")
    max_n: int = _limit(64, "sequences for a prompt", range=(1, 128), metavar="N")
    max_prompts: int = _limit(64, "prompts in a request", range=(1, 1024), metavar="N")
    max_body_bytes: int = _limit(4 * MIB, "bytes of a request's body", range=(1024, None), metavar="SIZE", bytes=True)
    max_connections: int = _limit(1024, "connections at a time", range=(1, None), metavar="N")
    header_timeout_s: float = _limit(10.0, "seconds for a request's headers to arrive", range=(0.1, 600), metavar="S")
    body_timeout_s: float = _limit(30.0, "seconds for a request's body to arrive", range=(0.1, 600), metavar="S")
    write_timeout_s: float = _limit(60.0, "seconds a client may leave its answer unread", range=(1, 3600), metavar="S")
    request_timeout_s: float = _limit(300.0, "seconds for a whole request", range=(1, 3600), metavar="S")

    drain_s: float = _operation(30.0, "seconds that requests have to end after SIGTERM", range=(0, 3600), metavar="S")
    stall_s: float = _operation(
        30.0, "seconds without a step, while there is work, after which it is not ready", range=(0.1, 3600), metavar="S"
    )
    native_text: str = _operation(
        "chat", "native `text`: chat (by the chat template) or raw", choices=("chat", "raw"), metavar="F"
    )
    disable_streaming: bool = _operation(False, "send the text of a stream as one piece at its end")
    otlp_endpoint: str | None = _operation(
        None, "send OpenTelemetry spans of requests to this collector (OTLP over HTTP)", metavar="URL"
    )
    log_format: str = _operation(
        "auto", "json, text; auto: text on a terminal", choices=("auto", "json", "text"), metavar="F"
    )
    log_level: str = _operation("info", "what is logged", choices=("debug", "info", "warning", "error"), metavar="L")


FIELDS = {f.name: f for f in fields(ServerSettings)}
"""Every setting by its name."""
