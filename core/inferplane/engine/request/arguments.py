"""What callers pass to `LLM`, checked before anything is loaded or run: each slip is one UsageError."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import fields
from difflib import get_close_matches
from reprlib import repr as short
from typing import TYPE_CHECKING, Any

from inferplane.engine.request.params import SamplingParams
from inferplane.errors import UsageError

if TYPE_CHECKING:
    from inferplane.engine.speculate import SpeculativeConfig

Prompt = str | Sequence[int]
LEAST_PRIORITY = -(2**31)


def whole(name: str, value: Any, least: int) -> int:
    """An argument as an integer; UsageError when it is none, or less than `least`."""
    try:
        found = None if isinstance(value, bool) else operator.index(value)
    except TypeError:  # also 1e6: a float is not silently rounded
        found = None
    if found is None:
        like = int(value) if isinstance(value, float) and value.is_integer() else max(least, 1)
        raise UsageError(
            f"{name} = {value!r}.",
            there_is=f"integers of {least} and more",
            remedy=f"pass an int, as in {name}={max(like, least)}",
        )
    if found < least:
        raise UsageError(f"{name} = {value!r}.", there_is=f"values of {least} and more")
    return found


def check_kinds(**given: Any) -> None:
    """Raise UsageError for an argument of `LLM` of a type that cannot be meant."""
    import torch  # here and below: whoever only asks an engine elsewhere checks his requests without it

    known: dict[str, tuple[tuple[type, ...], str]] = {
        "device": ((str,), "a backend's name, or 'auto'"),
        "dtype": ((str, torch.dtype), "a dtype's name, or a torch dtype"),
        "kv_dtype": ((str,), "a name"),
        "ops": ((Mapping, type(None)), "a mapping of site or op name -> provider"),
        "lock": ((str, os.PathLike, type(None)), "a path"),
        "progress": ((Callable, type(None)), "a function of (bytes done, bytes in all)"),  # type: ignore[dict-item]
    }
    for name, value in given.items():
        kinds, form = known[name]
        if not isinstance(value, kinds):
            raise UsageError(f"{name} = {value!r}.", there_is=form)
    for site, provider in (given["ops"] or {}).items():
        if not isinstance(site, str) or not isinstance(provider, str):
            raise UsageError(f"ops names {site!r}: {provider!r}.", there_is=known["ops"][1])


def speculation(given: Any) -> SpeculativeConfig | None:
    """The settings for speculation, also from a mapping with their names; UsageError when it is neither."""
    from inferplane.engine.speculate import METHODS, SpeculativeConfig

    if given is None or isinstance(given, SpeculativeConfig):
        return given
    known = {f.name: f.default for f in fields(SpeculativeConfig)}
    if not isinstance(given, Mapping):
        raise UsageError(f"speculative = {given!r}.", there_is="SpeculativeConfig, and mappings with its fields")
    if odd := [name for name in given if name not in known]:
        raise UsageError(f"speculative names {odd[0]!r}.", there_is=", ".join(known))
    if not isinstance(given.get("speculate_method"), str):
        raise UsageError(
            f"speculative has speculate_method = {given.get('speculate_method')!r}.",
            there_is=", ".join(METHODS),
        )
    for name, value in given.items():
        if type(known[name]) is int:
            whole(name, value, 0)
    return SpeculativeConfig(**given)


def sampling(params: Any) -> SamplingParams:
    """How to sample; the defaults for None."""
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise UsageError(
            f"params = {short(params)}.",
            there_is="SamplingParams, one for all or one a prompt",
            remedy="pass SamplingParams(**params)" if isinstance(params, Mapping) else "pass SamplingParams(...)",
        )
    return params


def place(index: Any, priority: Any, tenant: Any, alone: Any) -> tuple[int, int, str, str]:
    """Which of a prompt's sequences, how urgent and whose, as plain values."""
    priority = whole("priority", priority, LEAST_PRIORITY)
    for name, value in (("tenant", tenant), ("alone", alone)):
        if not isinstance(value, str):
            raise UsageError(f"{name} = {short(value)}.", there_is="strings")
    return whole("index", index, 0), priority, "".join(tenant), "".join(alone)  # plain, also of an enumeration's


def sampling_list(params: Any, prompts: int) -> list[SamplingParams]:
    """How to sample each of several prompts, from one for all or one a prompt."""
    if not isinstance(params, Sequence) or isinstance(params, str):
        return [sampling(params)] * prompts
    if len(params) != prompts:
        raise UsageError(f"{len(params)} sampling params for {prompts} prompts.", remedy="pass one, or one a prompt")
    return [sampling(p) for p in params]


def conversation(messages: Any) -> Sequence[Mapping[str, Any]]:
    """A conversation, as given; UsageError when it is none."""
    if (
        isinstance(messages, str)
        or not isinstance(messages, Sequence)
        or not all(isinstance(m, Mapping) for m in messages)
    ):
        raise UsageError(
            f"messages = {short(messages)}.",
            there_is='lists of {"role": ..., "content": ...}',
            remedy="use generate for a plain prompt",
        )
    for i, message in enumerate(messages):
        for name in ("role", "content"):
            if name in message or (name == "content" and "tool_calls" in message):
                continue
            close = get_close_matches(name, map(str, message), n=1)
            raise UsageError(
                f"Message {i} lacks {name!r}: messages[{i}] = {short(dict(message))}.",
                there_is='lists of {"role": ..., "content": ...}',
                remedy=f"write {name!r} in place of {close[0]!r}" if close else f"give it a {name}",
            )
        if not isinstance(message["role"], str):
            raise UsageError(
                f"messages[{i}] has the role {short(message['role'])}.",
                there_is="words, as 'system', 'user' and 'assistant'",
            )
    return messages


_NO_PROMPTS = (bytes, bytearray, memoryview, Mapping, Set)
"""What can be iterated over and yields integers or strings all the same."""


def prompt_list(prompts: Any) -> list[Prompt]:
    """One prompt or several as a list; ids may also be an array or a tensor."""
    if isinstance(prompts, str):
        return [prompts]
    many = _listed(prompts)
    if many is None:
        raise _no_prompt(prompts)
    if not many:
        raise UsageError("No prompts were given.", remedy="pass at least one")
    alone = all(isinstance(p, int) or getattr(p, "ndim", None) == 0 for p in many)
    if not alone and (odd := [p for p in many if not hasattr(p, "__iter__") or isinstance(p, _NO_PROMPTS)]):
        raise _no_prompt(odd[0], " among the prompts")
    return [many] if alone else many


def check_ids(prompt: Sequence[int], vocab: int) -> None:
    """Raise UsageError for an empty prompt, or token ids that are not of 0 to `vocab` - 1."""
    if not prompt:
        raise UsageError("The prompt is empty.", remedy="pass at least one token")
    bad: list[Any] = [t for t in prompt if type(t) is not int or not 0 <= t < vocab]
    if bad:
        raise UsageError(f"Token id {short(bad[0])} is not in the vocabulary.", there_is=f"ids 0 to {vocab - 1}")


def one_prompt(prompt: Any) -> Prompt:
    """A single prompt, with ids as a list."""
    if isinstance(prompt, str):
        return prompt
    ids = _listed(prompt)
    if ids is None:
        raise _no_prompt(prompt)
    if any(isinstance(p, (str, bytes, list, tuple)) for p in ids):
        raise UsageError(
            f"stream takes one prompt, not {short(prompt)}.",
            there_is="a string, or a list of token ids",
            remedy="use generate, or one stream a prompt",
        )
    return ids


def _listed(prompts: Any) -> list[Any] | None:
    """What an iterable, an array or a tensor holds; None for what is none of them."""
    if isinstance(prompts, _NO_PROMPTS) or not hasattr(prompts, "__iter__"):
        return None
    many = prompts.tolist() if hasattr(prompts, "tolist") else list(prompts)
    return many if isinstance(many, list) else None  # an array without dimensions holds one number


def _no_prompt(found: Any, where: str = "") -> UsageError:
    remedy = "decode bytes first" if isinstance(found, (bytes, bytearray)) else ""
    return UsageError(f"{short(found)}{where} is no prompt.", there_is="strings, and lists of token ids", remedy=remedy)
