"""The names of the source system: the one place that says what each means here.

"The source system" is PaddleNLP's serving stack, whose clients the native dialect (`native.py`) accepts. Its names are
aliases here. New code and new settings use Inferplane's names:

| name of the source system | Inferplane's name | where the alias is accepted |
|---|---|---|
| environment variables, such as `MAX_SEQ_LEN` | a setting: `NAMES` below | `inferplane serve`, `inferplane config` |
| fields of a request, such as `max_dec_len`, `penalty_score` | `native.WORDS` | the native dialect |
| gauges, such as `available_resource` | `metrics.py` | /metrics |
| names of models | `source_models.py` | the variable `model_name`, `start_server`, `python -m inferplane.source` |
| `speculate_method` | `speculative_method`, in Python `method` | flags and settings; `speculative_config` |
| `speculate_max_draft_token_num` | `num_speculative_tokens` | flags and settings; `speculative_config` |
| `speculate_max_ngram_size` | `prompt_lookup_max` | flags and settings; `speculative_config` |
| `draft_model_name_or_path` | `speculative_model`, in Python `model` | flags and settings; `speculative_config` |
| `draft_model_quant_type` | `speculative_quantization`, in Python `draft_quantization` | as these |
| the method `inference_with_reference` | the method `ngram` | flags and settings; `speculative_config` |

Source: https://paddlenlp.readthedocs.io, "llm/server", tables of service and model parameters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from inferplane.engine.request.arguments import NO_DRAFTS
from inferplane.errors import UsageError
from inferplane.serving.source_models import EXPORTED, SourceModel, find_known_model, find_source_model

TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
"""Accepted spellings of a switch, in upper or lower case."""
DEFAULT_PORT, DEFAULT_FOLDER, DEFAULT_LENGTH = 9965, "/models/", 8192
"""Where `start_server` serves and finds models without variables, and the length for which models were exported."""
MAX_DRAFTS = 5
"""The source system's limit of SPECULATE_MAX_DRAFT_TOKEN_NUM; `num_speculative_tokens` has its own."""


class Meaning(NamedTuple):
    """A setting, and how a variable's text becomes its value; if `convert` returns None, the setting is not set.
    `convert` raises ValueError with what there is."""

    setting: str
    convert: Callable[[str], Any] = str


class SourceSettings(NamedTuple):
    """What the source system's variables say.

    Args:
        found: setting -> the variable, and the value.
        notes: what the user should know, as sentences.
        launch: the processes that share the model; None: the variables name none.
    """

    found: dict[str, tuple[str, Any]]
    notes: list[str]
    launch: LaunchRequest | None


class LaunchRequest(NamedTuple):
    """Processes that share a model, as MP_NUM and its companions request them.

    Args:
        processes: on all machines together.
        nodes: machines.
        addresses: of the machines, the first one's first; empty for one machine.
        port: at which the processes find each other; None: any.
    """

    processes: int
    nodes: int = 1
    addresses: tuple[str, ...] = ()
    port: int | None = None


def _if_true(value: Any) -> Callable[[str], Any]:
    """Return a converter of a switch: `value` if it is on, None if it is off."""

    def convert(text: str) -> Any:
        if text.lower() not in (*TRUE, *FALSE):
            raise ValueError(", ".join((*TRUE, *FALSE)))
        return value if text.lower() in TRUE else None

    return convert


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    """Return a converter of whole numbers from `low` to `high`."""

    def convert(text: str) -> int:
        number = int(text) if re.fullmatch("-?[0-9]{1,18}", text) else low - 1
        if number < low or (high is not None and number > high):
            raise ValueError(f"whole numbers from {low} to {high}" if high else f"whole numbers of {low} and more")
        return number

    return convert


def _none_if_named_so(text: str) -> str | None:
    return None if text == "None" else text


NAMES: dict[str, Meaning] = {
    "MODEL_DIR": Meaning("model"),
    "PUSH_MODE_HTTP_PORT": Meaning("port"),
    "SERVICE_HTTP_PORT": Meaning("port"),
    "HTTP_PORT": Meaning("health_port"),
    "HEALTH_HTTP_PORT": Meaning("health_port"),
    "METRICS_PORT": Meaning("metrics_port"),
    "METRICS_HTTP_PORT": Meaning("metrics_port"),
    "PUSH_MODE_HTTP_WORKERS": Meaning("http_workers"),
    "GRPC_PORT": Meaning("grpc_port"),
    "SERVICE_GRPC_PORT": Meaning("grpc_port"),
    "MAX_SEQ_LEN": Meaning("max_prompt_tokens"),
    "MAX_DEC_LEN": Meaning("max_output_tokens"),
    "BATCH_SIZE": Meaning("max_num_seqs"),
    "MAX_CACHED_TASK_NUM": Meaning("max_waiting"),
    "CHECK_HEALTH_INTERVAL": Meaning("stall_s"),
    "DISABLE_STREAMING": Meaning("disable_streaming", _if_true(True)),
    "USE_CACHE_KV_INT8": Meaning("kv_cache_dtype", _if_true("int8")),
    "USE_HF_TOKENIZER": Meaning("native_text", _if_true("raw")),
    "SPECULATE_METHOD": Meaning("speculative_method", _none_if_named_so),
    "SPECULATE_MAX_DRAFT_TOKEN_NUM": Meaning("num_speculative_tokens", integer(1, MAX_DRAFTS)),
    "SPECULATE_MODEL_PATH": Meaning("speculative_model"),
    "SPECULATE_MODEL_QUANT_TYPE": Meaning("speculative_quantization", _none_if_named_so),
}
"""Variable -> setting. The first of two variables for one setting wins: as in the source system, the older one."""
OLDER = {
    "HTTP_PORT": "HEALTH_HTTP_PORT",
    "GRPC_PORT": "SERVICE_GRPC_PORT",
    "METRICS_PORT": "METRICS_HTTP_PORT",
    "PUSH_MODE_HTTP_PORT": "SERVICE_HTTP_PORT",
    "INTER_QUEUE_PORT": "INTER_PROC_PORT",
    "INFER_QUEUE_PORT": "INTER_PROC_PORT",
}
"""Name of a variable before version 3.0.0 -> its name since."""
LAUNCH = ("MP_NUM", "MP_NNODE", "POD_IPS", "POD_0_IP", "INTER_PROC_PORT", "INTER_QUEUE_PORT", "INFER_QUEUE_PORT")
"""Variables that say which processes share the model: `_read_launch`."""
DERIVED = ("model_name", "BLOCK_BS")
"""Variables of which several settings, or other variables, are part: see `read`."""
WITHOUT_EFFECT = {
    "BLOCK_RATIO": "prompts and generated tokens share one pool of blocks, which needs no division",
    "USE_WARMUP": "kernels are tried out at every start",
    "OUTPUT_LOG_TO_CONSOLE": "the log always goes to standard error, and `start_server` writes it to a file as well",
    "MODEL_PATH": "it is the folder outside of a container; MODEL_DIR names the one inside",
    "MODEL_MTP_PATH": "it is the folder outside of a container; SPECULATE_MODEL_PATH names the one inside",
    "tag": "models are quantized while they are read, so no release of exported folders is chosen",
}
"""Variables that are known and have no effect, with the reason."""


def read(environ: Mapping[str, str]) -> SourceSettings:
    """Read the settings that the source system's variables give.

    Raises:
        UsageError: a variable has a value that is not supported.
    """
    given = {name: text for name, value in environ.items() if (text := value.strip())}
    found: dict[str, tuple[str, Any]] = {}
    notes = [f"{name} has no effect: {why}" for name, why in WITHOUT_EFFECT.items() if name in given]
    for name, meaning in NAMES.items():
        if (setting := _convert(name, given, meaning.convert)) is not None:
            first, value = found.setdefault(meaning.setting, (name, setting))
            if value != setting:
                notes.append(f"{name}={given[name]} has no effect: {first}={given[first]} is the same setting")
    for old in (name for name in OLDER if name in given):
        notes.append(f"{old} is the older name of {OLDER[old]}, and is taken as it")
    _read_cache(given, found, notes)
    _read_model(given, found, notes)
    launch = _read_launch(given, notes)
    return SourceSettings(found, notes, launch)


def _convert(name: str, given: Mapping[str, str], convert: Callable[[str], Any]) -> Any:
    """The value of a variable; None if it is not set, or sets nothing."""
    if name not in given:
        return None
    try:
        return convert(given[name])
    except ValueError as error:
        raise UsageError(f"{name}={given[name]}.", there_is=str(error)) from error


def _read_cache(given: Mapping[str, str], found: dict[str, tuple[str, Any]], notes: list[str]) -> None:
    """BLOCK_BS: the cache holds so many sequences of the full length."""
    sequences = _convert("BLOCK_BS", given, integer(1))
    if sequences is not None:
        length = _convert("MAX_SEQ_LEN", given, integer(1)) or DEFAULT_LENGTH
        found["kv_cache_tokens"] = ("BLOCK_BS", sequences * length)
        total = f"{sequences} x {length} = {sequences * length}"
        notes.append(f"BLOCK_BS={sequences}: the KV cache holds {total} tokens (MAX_SEQ_LEN)")


def _read_model(given: Mapping[str, str], found: dict[str, tuple[str, Any]], notes: list[str]) -> None:
    """model_name: a name of the source system is a repository and how to start it, any other one a model."""
    place = Path(given.get("MODEL_DIR", DEFAULT_FOLDER))
    name = given.get("model_name")
    if name is None:
        if (model := EXPORTED.get("/".join(place.parts[-3:]))) is not None:  # as download_model.py names its folders
            _choose_model(model, given, found, notes)
        return
    folder = place / name
    lies_there = (folder / "config.json").is_file()
    find = find_known_model if lies_there else find_source_model
    model = None if Path(name).expanduser().exists() else find(name)
    found["model"] = ("model_name", str(folder) if lies_there else name if model is None else model.repository)
    if model is not None:
        _choose_model(model, given, found, notes)


def _choose_model(
    model: SourceModel, given: Mapping[str, str], found: dict[str, tuple[str, Any]], notes: list[str]
) -> None:
    chosen: dict[str, Any] = {"quantization": model.quantization, "dtype": model.dtype}
    if model.drafts and "SPECULATE_METHOD" not in given:
        chosen |= {"speculative_method": "mtp", "speculative_quantization": model.draft_quantization}
    for setting, value in chosen.items():
        if value is not None:
            found.setdefault(setting, ("model_name", value))
    words = ", ".join(f"{setting} {value}" for setting, value in chosen.items() if value is not None)
    notes.append(f"the model {model.name} is {model.repository}" + (f" with {words}" if words else ""))
    if str(model.nodes) != given.get("MP_NNODE", "1"):
        notes.append(
            f"the model {model.name} is made for {model.nodes} machine{'s' * (model.nodes > 1)} in the source system; "
            f"here a model is divided when it starts, by MP_NNODE={given.get('MP_NNODE', '1')}"
        )


def settle_drafts(values: dict[str, Any], origins: dict[str, str]) -> list[str]:
    """Remove settings of drafts that the source system's variables give in vain, once all sources are merged.

    Without a method they have no effect; and prediction layers may be in the model's own files.

    Returns:
        A note for each.
    """
    method = values.get("speculative_method")
    drafts = method not in (None, *NO_DRAFTS)
    notes = []
    for variable, meaning in NAMES.items():
        name = meaning.setting
        if origins.get(name) != f"variable {variable}" or not variable.startswith("SPECULATE_"):
            continue
        if not drafts and name != "speculative_method":
            notes.append(f"{variable} has no effect without SPECULATE_METHOD")
        elif name == "speculative_model" and method == "mtp" and not (Path(values[name]) / "config.json").is_file():
            where = "the prediction layers of the model's own files draft"
            notes.append(f"{variable}={values[name]} has no model: {where}")
        else:
            continue
        del values[name], origins[name]
    return notes


def _read_launch(given: Mapping[str, str], notes: list[str]) -> LaunchRequest | None:
    """MP_NUM, MP_NNODE, POD_IPS, POD_0_IP and INTER_PROC_PORT: the processes that share the model."""
    processes, nodes = (_convert(name, given, integer(1)) for name in ("MP_NUM", "MP_NNODE"))
    ports = [name for name in LAUNCH if name.endswith("_PORT") and name in given]
    port = _convert(ports[-1], given, integer(1, 65535)) if ports else None
    nodes = nodes or 1
    if nodes == 1:
        for name in ("POD_IPS", "POD_0_IP", *ports):
            if name in given:
                notes.append(f"{name} has no effect on one machine; MP_NNODE says how many there are")
        return None if processes is None else LaunchRequest(processes)
    addresses = [part.strip() for part in given.get("POD_IPS", "").split(",") if part.strip()]
    if len(set(addresses)) != nodes:
        raise UsageError(
            f"MP_NNODE={nodes} with POD_IPS={given.get('POD_IPS', '')!r}.",
            there_is=f"{len(set(addresses))} addresses",
            remedy="set POD_IPS to the address of each machine, separated by commas, on all of them alike",
        )
    first = given.get("POD_0_IP", "")
    if first not in addresses:
        raise UsageError(f"POD_0_IP={first!r} is none of POD_IPS.", there_is=", ".join(addresses))
    processes = nodes if processes is None else processes
    if processes % nodes:
        raise UsageError(f"MP_NUM={processes} with MP_NNODE={nodes}.", there_is=f"multiples of {nodes}")
    return LaunchRequest(processes, nodes, (first, *(a for a in addresses if a != first)), port)
