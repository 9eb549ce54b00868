"""Reads a checkpoint's config.json as plain data. Code inside a checkpoint is never run."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from inferplane.errors import CheckpointError, UnsupportedModelError, UsageError
from inferplane.hub.paddle_files import refuse_paddle_folder
from inferplane.models.reading.json_object import read_object
from inferplane.models.reading.mistral_format import PARAMS, config_entries, has_mistral_format
from inferplane.models.reading.normalize import normalize
from inferplane.models.reading.quant_files import settle_quantization

_REMEDY = "correct the entry, or fetch the file again"
MAX_SIZE = 2**31
MAX_SIZES = {
    "num_hidden_layers": 4096,
    "num_nextn_predict_layers": 64,
    "n_routed_experts": 2**16,
    "num_experts": 2**16,
    "num_local_experts": 2**16,
    "max_position_embeddings": 2**24,
}
"""Entries beyond these are taken for damage: some are used as loop bounds before any tensor is checked."""


OTHER_KINDS = (
    (
        "adapter_config.json",
        ": it is a LoRA adapter",
        "merge it into its base model (peft: merge_and_unload), save that",
    ),
    ("*.gguf", ", but a GGUF file", "pass this file"),
    (
        "params.json",
        ", but the params.json of Mistral's or Meta's own layout",
        "fetch the model in the Hugging Face layout",
    ),
    ("model_index.json", ": it is a pipeline of several models", "pass the folder of its language model"),
)
"""What a folder without a config may be, by a file's name: words for the error, and what to do."""


class Config(dict[str, Any]):
    """The entries of a config.json, in one spelling and with the defaults of its family (`normalize`).

    Args:
        entries: the file's content, or `config.to_dict()` of a transformers config.
        name: the file or class that the entries came from, for errors.

    Raises:
        CheckpointError: `max_position_embeddings` is not a positive integer.
    """

    def __init__(self, entries: Mapping[str, Any], name: str = "config") -> None:
        super().__init__(normalize(entries))
        self.name = name
        self.size("max_position_embeddings", 1)

    @classmethod
    def read(cls, folder: str | Path) -> Config:
        """Read `config.json` in a folder, or Mistral's `params.json`.

        Raises:
            CheckpointError: there is none, it is not a JSON object, or files beside it state another quantization.
        """
        path = Path(folder) / "config.json"
        if not os.path.lexists(path) and has_mistral_format(path.parent):
            path = path.parent / PARAMS
            return cls(config_entries(read_object(path), str(path)), str(path))
        if not os.path.lexists(path):
            if (refused := refuse_paddle_folder(path.parent)) is not None:
                raise refused
            what, remedy = next((words for name, *words in OTHER_KINDS if any(Path(folder).glob(name))), ("", ""))
            raise CheckpointError(
                f"{folder} holds no config.json{what}.", remedy=remedy or "point to a folder in the Hugging Face layout"
            )
        return cls(settle_quantization(read_object(path), path.parent, str(path)), str(path))

    def need(self, key: str) -> Any:
        """The value of `key`.

        Raises:
            CheckpointError: it is missing or null.
        """
        value = self.get(key)
        if value is None:
            raise CheckpointError(f"{self.name} lacks {key!r}.", remedy="check that the config belongs to this family")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """A positive integer.

        Raises:
            CheckpointError: missing without a default, or not a positive integer.
        """
        value = self.get(key)
        value = default if value is None else value
        if value is None:
            return int(self.need(key))
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._wrong_entry(key, "not a positive integer")
        return self._check_limit(key, value)

    def count(self, key: str) -> int:
        """An integer from 0; 0 when it is missing or null.

        Raises:
            CheckpointError: it is something else.
        """
        value = self.get(key)
        if value is None:
            return 0
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self._wrong_entry(key, "not an integer from 0")
        return self._check_limit(key, value)

    def _check_limit(self, key: str, value: int) -> int:
        limit = MAX_SIZES.get(key, MAX_SIZE)
        if value > limit:
            raise self._wrong_entry(key, f"more than {limit}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0; `default` when it is missing or null.

        Raises:
            CheckpointError: missing without a default, or something else.
        """
        return self._read_number(key, default, lambda value: value > 0, "not a number above 0")

    def number_from_zero(self, key: str, default: float | None = None) -> float:
        """A finite number that is 0 or more, as an epsilon may be; `default` when it is missing or null.

        Raises:
            CheckpointError: missing without a default, or something else.
        """
        return self._read_number(key, default, lambda value: value >= 0, "not a number from 0")

    def _read_number(
        self, key: str, default: float | None, is_allowed: Callable[[float], bool], otherwise: str
    ) -> float:
        value = self.get(key)
        value = default if value is None else value
        if value is None:
            return float(self.need(key))
        if not is_number(value) or not is_allowed(value):
            raise self._wrong_entry(key, otherwise)
        return float(value)

    def factor(self, key: str) -> float:
        """A finite number that multiplies what a model computes; it may be 0 or below.

        Raises:
            CheckpointError: missing, or something else.
        """
        value = self.need(key)
        if not is_number(value):
            raise self._wrong_entry(key, "not a finite number")
        return float(value)

    def attention_factor(self, key: str) -> float:
        """A factor of attention's scores.

        Raises:
            CheckpointError: missing, or no finite number.
            UnsupportedModelError: it is 0 or below, for which kernels are wrong that find the largest score, or mask,
                before they multiply: FlashAttention 2 is one.
        """
        value = self.factor(key)
        if value <= 0:
            raise UnsupportedModelError(
                f"{self.name}: {key} is {value:g}; attention with scores times 0 or less is not implemented.",
                there_is="factors above 0",
            )
        return value

    def divisor(self, key: str) -> float:
        """A finite number that divides what a model computes.

        Raises:
            CheckpointError: missing, or no finite number.
            UnsupportedModelError: it is 0.
        """
        value = self.factor(key)
        if value == 0:
            raise UnsupportedModelError(
                f"{self.name}: {key} is 0, by which the model would divide.", there_is="numbers other than 0"
            )
        return value

    def numbers(self, key: str, count: int, default: float) -> list[float]:
        """A list of finite numbers; `default` in each place when it is missing or null.

        Raises:
            CheckpointError: it is something else, or does not have `count` numbers.
        """
        found = self.get(key)
        if found is None:
            return [default] * count
        if not isinstance(found, (list, tuple)) or len(found) != count or not all(map(is_number, found)):
            raise self._wrong_entry(key, f"not a list of {count} numbers")
        return [float(number) for number in found]

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false; `default` when it is missing or null.

        Raises:
            CheckpointError: it is something else.
        """
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong_entry(key, "neither true nor false")
        return value

    def _wrong_entry(self, key: str, why: str) -> CheckpointError:
        return CheckpointError(f"{self.name}: {key} is {self.get(key)!r}, {why}.", remedy=_REMEDY)

    @property
    def architecture(self) -> str:
        """The first entry of `architectures`.

        Raises:
            CheckpointError: the entry is not a list of names.
            UnsupportedModelError: there is none.
        """
        found = self.get("architectures") or []
        if not isinstance(found, (list, tuple)) or not all(isinstance(name, str) for name in found):
            raise self._wrong_entry("architectures", "not a list of names")
        if not found:
            raise UnsupportedModelError(
                f"{self.name} names no architecture.", remedy='add e.g. "architectures": ["LlamaForCausalLM"]'
            )
        return str(found[0])

    @property
    def rope(self) -> dict[str, Any]:
        """`rotary()` with the default base of 10000."""
        return self.rotary()

    def rotary(self, theta: float = 10000.0, kind: str = "") -> dict[str, Any]:
        """The rotary settings: `rope_type`, `rope_theta` and the type's own entries.

        Args:
            theta: the base if neither the config nor its family states one.
            kind: a kind of layer, whose own settings count if the config states settings by kind.

        Raises:
            CheckpointError: the settings are not a mapping.
            UnsupportedModelError: each kind of layer has settings of its own, and `kind` names none of them.
        """
        for key in ("rope_scaling", "rope_parameters"):
            if self.get(key) is not None and not isinstance(self[key], Mapping):
                raise self._wrong_entry(key, "not an object with entries")
        out = {"rope_theta": theta, **self["rope_parameters"]}
        if nested := {key: value for key, value in out.items() if isinstance(value, Mapping)}:
            if kind not in nested:
                raise UnsupportedModelError(
                    f"{self.name}: rotary settings of their own for {', '.join(nested)} are not implemented.",
                    there_is="one object rope_parameters for all layers",
                )
            own = {key: value for key, value in nested[kind].items() if value is not None}
            kinds = own.get("rope_type") or own.get("type") or "default"
            out = {"rope_theta": out["rope_theta"], **own, "rope_type": kinds}
        return out

    @property
    def has_rotary_kinds(self) -> bool:
        """Whether the config states rotary settings by kind of layer."""
        settings = self.get("rope_parameters")
        return isinstance(settings, Mapping) and any(isinstance(value, Mapping) for value in settings.values())

    def refuse(self, **implemented: tuple[Any, ...]) -> None:
        """Raise UnsupportedModelError if an entry has a value that this family's constructor does not implement.

        Args:
            implemented: entry -> the values that are implemented; absent and null entries pass.
        """
        for key, known in implemented.items():
            if self.get(key) is not None:
                self.check(key, self[key], known)

    def check(self, key: str, value: Any, known: tuple[Any, ...]) -> None:
        """Raise UnsupportedModelError unless `value`, the entry `key`, is one of the implemented values `known`."""
        if value not in known:
            raise UnsupportedModelError(
                f"{self.name}: {key} = {value!r} is not implemented for {self.architecture}.",
                there_is=", ".join(map(repr, known)) or "models without this entry",
                remedy="load a checkpoint that has one of these, or ask for it in an issue",
            )

    @property
    def positions(self) -> int | None:
        """The longest sequence in tokens: `max_position_embeddings`, or the context after rotary scaling.

        Configs with "dynamic" scaling state the unscaled number, those with "yarn" state either. None: the config
        states no length.
        """
        if self.get("max_position_embeddings") is None:
            return None
        farthest = "compress" if self.has_rotary_kinds and "compress" in self["rope_parameters"] else "full_attention"
        rope = self.rotary(kind=farthest)
        stated, kind, factor = self.size("max_position_embeddings"), rope["rope_type"], rope.get("factor")
        if kind not in ("dynamic", "yarn") or not is_number(factor) or factor is None or factor <= 0:
            return stated
        context = rope.get("original_max_position_embeddings") if kind == "yarn" else None
        context = stated if context is None else context
        if context is None or not is_number(context):
            return stated
        return max(stated, int(min(context * factor, MAX_SIZES["max_position_embeddings"])))


def as_config(source: Any) -> Config:
    """Make a `Config` from a folder, a mapping, or a transformers config object.

    Raises:
        UsageError: `source` is none of these.
        CheckpointError: the folder holds no readable config, or an entry has an impossible value.
    """
    if isinstance(source, Config):
        return source
    if isinstance(source, (str, Path)):
        return Config.read(source)
    if isinstance(source, Mapping):
        return Config(source)
    if isinstance(source, type) or not callable(getattr(source, "to_dict", None)):
        raise UsageError(
            f"{source!r} is no model.",
            there_is="folders in the Hugging Face layout, mappings with a config's entries, and transformers configs",
        )
    return Config(source.to_dict(), type(source).__name__)


def is_number(value: Any) -> bool:
    """Whether a config's entry is a finite number that torch can hold: integers have at most 64 bits."""
    if isinstance(value, int):
        return not isinstance(value, bool) and -(2**63) <= value < 2**63
    return isinstance(value, float) and math.isfinite(value)
