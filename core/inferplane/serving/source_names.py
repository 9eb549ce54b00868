"""The names of the source system: the one place that says what each means here.

"The source system" is PaddleNLP's serving stack, whose clients the native dialect (`native.py`) accepts. Its names are
aliases here. New code and new settings use Inferplane's names:

| name of the source system | Inferplane's name | where the alias is accepted |
|---|---|---|
| environment variables, such as `MAX_SEQ_LEN` | a setting: `NAMES` below | `inferplane serve`, `inferplane config` |
| fields of a request, such as `max_dec_len`, `penalty_score` | `native.WORDS` | the native dialect |
| gauges, such as `available_resource` | `metrics.py` | /metrics |
| `speculate_method` | `speculative_method`, in Python `method` | flags and settings; `speculative_config` |
| `speculate_max_draft_token_num` | `num_speculative_tokens` | flags and settings; `speculative_config` |
| `draft_model_name_or_path` | `speculative_model`, in Python `model` | flags and settings; `speculative_config` |
| `draft_model_quant_type` | `speculative_quantization`, in Python `draft_quantization` | as these |
| the method `inference_with_reference` | the method `ngram` | flags and settings; `speculative_config` |

Source: https://paddlenlp.readthedocs.io, "llm/server", tables of service and model parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from inferplane.errors import UsageError

TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
"""Accepted spellings of a switch, in upper or lower case."""


class Meaning(NamedTuple):
    """A setting, and how a variable's text becomes its value; if `convert` returns None, the setting is not set."""

    setting: str
    convert: Callable[[str], Any] = str


def _if_true(value: Any) -> Callable[[str], Any]:
    """Return a converter of a switch: `value` if it is on, None if it is off; it raises ValueError for other texts."""

    def convert(text: str) -> Any:
        if text.lower() not in (*TRUE, *FALSE):
            raise ValueError
        return value if text.lower() in TRUE else None

    return convert


def _none_if_named_so(text: str) -> str | None:
    return None if text == "None" else text


NAMES: dict[str, Meaning] = {
    "MODEL_DIR": Meaning("model"),
    "SERVICE_HTTP_PORT": Meaning("port"),
    "PUSH_MODE_HTTP_PORT": Meaning("port"),
    "HEALTH_HTTP_PORT": Meaning("health_port"),
    "METRICS_HTTP_PORT": Meaning("metrics_port"),
    "PUSH_MODE_HTTP_WORKERS": Meaning("http_workers"),
    "SERVICE_GRPC_PORT": Meaning("grpc_port"),
    "GRPC_PORT": Meaning("grpc_port"),
    "MAX_SEQ_LEN": Meaning("max_prompt_tokens"),
    "MAX_DEC_LEN": Meaning("max_output_tokens"),
    "BATCH_SIZE": Meaning("max_num_seqs"),
    "MAX_CACHED_TASK_NUM": Meaning("max_waiting"),
    "CHECK_HEALTH_INTERVAL": Meaning("stall_s"),
    "DISABLE_STREAMING": Meaning("disable_streaming", _if_true(True)),
    "USE_CACHE_KV_INT8": Meaning("kv_cache_dtype", _if_true("int8")),
    "USE_HF_TOKENIZER": Meaning("native_text", _if_true("raw")),
    "SPECULATE_METHOD": Meaning("speculative_method", _none_if_named_so),
    "SPECULATE_MAX_DRAFT_TOKEN_NUM": Meaning("num_speculative_tokens"),
    "SPECULATE_MODEL_PATH": Meaning("speculative_model"),
    "SPECULATE_MODEL_QUANT_TYPE": Meaning("speculative_quantization", _none_if_named_so),
}
"""Variable -> setting. The first of two variables for one setting wins."""

WITHOUT_EFFECT = {
    "BLOCK_BS": "the KV cache takes kv_cache_bytes, else a share of what is free",
    "BLOCK_RATIO": "prompts and generated tokens share one pool of blocks",
    "INTER_PROC_PORT": "the parts of the server need no port among themselves",
    "USE_WARMUP": "kernels are tried out at every start",
    "OUTPUT_LOG_TO_CONSOLE": "the log always goes to standard error",
}
"""Variables that are known and have no effect, with the reason."""

ONLY = {"MP_NUM": "1", "MP_NNODE": "1"}
"""Variables with only one supported value; accepting another would silently serve something else."""
RANKS = "several processes share a model by `torchrun --nproc-per-node N -m inferplane serve MODEL`"
"""The alternative to several values."""


def read(environ: Mapping[str, str]) -> tuple[dict[str, tuple[str, Any]], list[str]]:
    """Read the settings that the source system's variables give.

    Returns:
        Setting -> (variable, value), and notes on variables without effect.

    Raises:
        UsageError: a variable has a value that is not supported.
    """
    for name, value in ONLY.items():
        if environ.get(name, value).strip() not in ("", value):
            raise UsageError(f"{name}={environ[name]}.", there_is=f"{name}={value}", remedy=f"unset it; {RANKS}")
    if environ.get("SERVICE_HTTP_PORT", "").strip() == "-1":
        raise UsageError("SERVICE_HTTP_PORT=-1 turns HTTP off, and there is no other service.", remedy="name a port")
    found: dict[str, tuple[str, Any]] = {}
    for name, meaning in NAMES.items():
        text = environ.get(name, "").strip()
        try:
            setting: Any = meaning.convert(text) if text else None
        except ValueError as error:
            raise UsageError(f"{name}={environ[name]}.", there_is=", ".join((*TRUE, *FALSE))) from error
        if setting is not None:
            found.setdefault(meaning.setting, (name, setting))
    notes = [f"{name} has no effect: {why}" for name, why in WITHOUT_EFFECT.items() if environ.get(name)]
    return found, notes
