"""Reads the settings from flags, variables and a file, and remembers where each came from.

The first source that names a setting decides: a flag, a variable `INFERPLANE_<NAME>`, a variable of the source system
(`source_names.py`), the YAML file, the default.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import Field, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from inferplane.engine.clients.options import PLAIN_PARTS
from inferplane.engine.request.arguments import NO_DRAFTS, quantization_remedy
from inferplane.engine.request.other_engines import advice
from inferplane.errors import UsageError
from inferplane.serving import source_names
from inferplane.serving.settings import ALIASES, FIELDS, ServerSettings
from inferplane.units import size_of

PREFIX = "INFERPLANE_"
FILE_VARIABLE = f"{PREFIX}CONFIG"
PLUGIN_GROUP = "inferplane.plugins"
"""Defined in `inferplane.plugins` too, whose import would import torch."""
NOT_SETTINGS = {FILE_VARIABLE, f"{PREFIX}PLUGINS", f"{PREFIX}NO_NATIVE", f"{PREFIX}MODELS", f"{PREFIX}SERVER_DIR"}
"""Variables with the prefix that are not settings of the server. A plugin's begin with the prefix and its name."""


@dataclass(frozen=True)
class ResolvedSettings:
    """The settings and the origin of each.

    Args:
        settings: the values.
        origins: setting -> "default", "flag --x", "variable X" or "file: path".
        notes: what the user should know, as sentences.
        launch: the processes that share the model, by the source system's variables; None: these name none.
    """

    settings: ServerSettings
    origins: Mapping[str, str]
    notes: tuple[str, ...] = ()
    launch: source_names.LaunchRequest | None = None

    def mask_secrets(self) -> dict[str, Any]:
        """Return all values, with secrets masked."""
        out = {}
        for name, f in FIELDS.items():
            value = getattr(self.settings, name)
            is_secret = f.metadata.get("secret") and value
            out[name] = ["***"] * len(value) if is_secret else list(value) if isinstance(value, tuple) else value
        return out


def resolve(flags: Mapping[str, Any], environ: Mapping[str, str], path: str | None = None) -> ResolvedSettings:
    """Resolve the settings.

    Args:
        flags: the settings given as flags, converted or as text.
        environ: environment variables.
        path: of a YAML file; None: the variable INFERPLANE_CONFIG names it.

    Raises:
        UsageError: an unknown name (with the nearest known one), a value out of range, a file that cannot be read.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    source = source_names.read(environ)
    sources, notes = _sources(flags, environ, path, source.found)
    for given in sources:
        named: dict[str, tuple[str, str]] = {}  # setting -> its name as given and its origin, of this source
        for given_name, (origin, value) in given.items():
            name = ALIASES.get(given_name, given_name)
            if name in named:
                first, where = named[name]
                raise UsageError(
                    f"{first} and {given_name} are the same setting ({where}, {origin}).", remedy="keep one of them"
                )
            named[name] = given_name, origin
            if name not in values:
                values[name], origins[name] = _convert(FIELDS[name], value, origin), origin
    drafts = source_names.settle_drafts(values, origins)
    settings = ServerSettings(**values)
    _check_together(settings)
    notes += [*source.notes, *drafts, *_find_unused_parts(settings, origins)]
    every_origin = {name: origins.get(name, "default") for name in FIELDS}
    return ResolvedSettings(settings, every_origin, tuple(notes), source.launch)


_Given = dict[str, tuple[str, Any]]


def _sources(
    flags: Mapping[str, Any], environ: Mapping[str, str], path: str | None, by_source: _Given
) -> tuple[list[_Given], list[str]]:
    """Return the given settings by source, the source that decides first, and notes; `by_source` are those of the
    source system's variables."""
    by_flag = {name: (_flag_origin(name, value), value) for name, value in flags.items()}
    by_variable: _Given = {}
    notes = []
    points = metadata.entry_points(group=PLUGIN_GROUP)
    plugins = tuple(f"{PREFIX}{point.name.upper().replace('-', '_').replace('.', '_')}_" for point in points)
    for variable, text in environ.items():
        name = variable.removeprefix(PREFIX).lower()
        if not variable.startswith(PREFIX) or variable in NOT_SETTINGS or not text:
            continue
        if name in FIELDS or name in ALIASES:
            by_variable[name] = (f"variable {variable}", text)
        elif not variable.startswith(plugins):
            near = difflib.get_close_matches(name, [*FIELDS, *ALIASES], n=1)
            hint = f"; perhaps {PREFIX}{near[0].upper()} was meant" if near else ""
            hint = f"; {found}" if (found := advice(name)) else hint
            notes.append(f"the variable {variable} names no setting of the server{hint}")
    named = {name: (f"variable {variable}", value) for name, (variable, value) in by_source.items()}
    path = path or environ.get(FILE_VARIABLE)
    return [by_flag, by_variable, named, _read_file(path) if path else {}], notes


def _flag_origin(name: str, value: Any) -> str:
    no = "no-" if value is False else ""
    return f"flag --{no}{name.replace('_', '-')}"


def _read_file(path: str) -> _Given:
    import yaml

    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"{path} cannot be read: {' '.join(str(error).split())}.", remedy="mend the file") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise UsageError(f"{path} is no list of settings.", there_is="lines as `max_num_seqs: 32`")
    found: _Given = {}
    for key, value in data.items():
        name = str(key).replace("-", "_")
        if name not in FIELDS and name not in ALIASES:
            near = difflib.get_close_matches(name, [*FIELDS, *ALIASES], n=1)
            remedy = f"perhaps {near[0]} was meant" if near else "see `inferplane config show`"
            remedy = advice(name) or remedy
            raise UsageError(f"{path} names {str(key)!r}, which is no setting.", remedy=remedy)
        if value is not None:
            found[name] = (f"file {path}", value)
    return found


# -- one value


def _convert(field: Field[Any], value: Any, origin: str) -> Any:
    """Return a value as the setting's type; raise UsageError if it is out of range."""
    kind = str(field.type).removesuffix(" | None")
    try:
        out = _PARSERS["bytes" if field.metadata.get("bytes") else kind](value)
    except (TypeError, ValueError) as error:
        raise _error(field, value, origin, _describe_expected(field, kind)) from error
    low, high = field.metadata.get("range", (None, None))
    if (low is not None and out < low) or (high is not None and out > high) or out != out:
        raise _error(field, value, origin, _describe_expected(field, kind))
    choices = field.metadata.get("choices")
    if field.name == "speculative_method" and choices and out not in choices:
        from inferplane import plugins  # imports torch, so not for other values

        choices = (*choices, *plugins.host().proposers())
    if choices and out not in choices:
        unknown = _error(field, value, origin, ", ".join(choices))
        unknown.remedy = quantization_remedy(out) if field.name == "quantization" else ""
        raise unknown
    return out


def _error(field: Field[Any], value: Any, origin: str, expected: str) -> UsageError:
    masked = "***" if field.metadata.get("secret") else repr(value)[:80]
    return UsageError(f"{field.name} = {masked} ({origin}).", there_is=expected)


def _describe_expected(field: Field[Any], kind: str) -> str:
    if field.metadata.get("bytes"):
        kind = "bytes"
    kinds = {"bytes": "bytes, as 1048576 or 64MiB,", "int": "whole numbers", "float": "numbers", "bool": "true, false"}
    words = kinds.get(kind, "text")
    low, high = field.metadata.get("range", (None, None))
    if low is not None:
        words += f" from {low} to {high}" if high is not None else f" of {low} and more"
    return words


def _parse_int(value: Any) -> int:
    if isinstance(value, (bool, float)):
        raise TypeError
    return int(value)


def _parse_bytes(value: Any) -> int:
    return size_of(value) if isinstance(value, str) else _parse_int(value)


def _parse_float(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError
    return float(value)


def _parse_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower()
    if word not in (*source_names.TRUE, *source_names.FALSE):
        raise ValueError
    return word in source_names.TRUE


def _parse_str(value: Any) -> str:
    if isinstance(value, (bool, list, dict)) or not str(value).strip():
        raise TypeError
    return str(value)


def _parse_list(value: Any) -> tuple[str, ...]:
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, (list, tuple)):
        raise TypeError
    return tuple(_parse_str(v).strip() for v in items)


_PARSERS: dict[str, Any] = {
    "int": _parse_int,
    "bytes": _parse_bytes,
    "float": _parse_float,
    "bool": _parse_bool,
    "str": _parse_str,
    "tuple[str, ...]": _parse_list,
}


def _check_together(settings: ServerSettings) -> None:
    if (settings.tls_cert is None) != (settings.tls_key is None):
        have, other = ("key", "cert") if settings.tls_cert is None else ("cert", "key")
        raise UsageError(f"tls_{have} without tls_{other}: TLS needs both.", remedy=f"also pass tls_{other}")
    grpc_ports = settings.grpc_port, settings.grpc_health_port
    ports = [p for p in (settings.port, settings.health_port, settings.metrics_port, *grpc_ports) if p and p > 0]
    if settings.port < 0 and settings.grpc_port is None:
        what = f"port = {settings.port} turns HTTP off, and there is no other service."
        raise UsageError(what, remedy="name a port, or a grpc_port")
    if settings.port < 0 and settings.http_workers > 1:
        raise UsageError(f"http_workers = {settings.http_workers} without HTTP.", remedy="leave it out, or name a port")
    if settings.kv_cache_bytes is not None and settings.kv_cache_tokens is not None:
        raise UsageError(
            "kv_cache_bytes and kv_cache_tokens are two sizes of one cache.", remedy="leave one of them out (BLOCK_BS)"
        )
    if len(set(ports)) != len(ports):
        raise UsageError(
            f"Two services on one port ({', '.join(map(str, ports))}).",
            remedy="leave out health_port and metrics_port, which port serves as well; gRPC needs a port of its own",
        )


def _find_unused_parts(settings: ServerSettings, origins: Mapping[str, str]) -> list[str]:
    """Notes on parts of speculation that were given without a method."""
    if settings.speculative_method not in (None, *NO_DRAFTS):
        return []
    parts = ("num_speculative_tokens", "speculative_model", "speculative_quantization", *PLAIN_PARTS)
    given = [name for name in parts if name in origins]
    return [f"{name} has no effect without speculative_method ({origins[name]})" for name in given]
