"""Fields of requests that a format does not have: refused, or ignored and named in the answer.

A field that would change the answer is refused, as is one that looks like a mistyped known field: an answer that
silently ignores it looks right and is not. The tables name the fields of OpenAI's API, vLLM and SGLang, and those of
llama.cpp, TGI, Ollama, Anthropic, Qwen, DeepSeek and transformers that change the answer.

Source: https://platform.openai.com/docs/api-reference, https://docs.vllm.ai "OpenAI-Compatible Server",
https://docs.sglang.ai "Sampling Parameters", llama.cpp's tools/server/README.md, TGI's `GenerateParameters`, Ollama's
docs/api.md, https://docs.anthropic.com "Messages", transformers' `GenerationConfig`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from inferplane.dialogue.near_names import find_nearest
from inferplane.serving.errors import invalid

MAX_UNKNOWN = 64
"""Most unknown fields of a request: each is compared with all known names."""


CONSTRAINTS = (
    *("response_format", "regex", "grammar", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("structured_outputs", "json_schema", "ebnf", "format"),
)
"""Fields that constrain the text, under the names of this and other servers: they are never ignored."""


class Refused(NamedTuple):
    """A field that would change the answer.

    Args:
        instead: what to use in its place; "" for nothing.
        neutral: values that change nothing, and so are accepted; null always is.
    """

    instead: str = ""
    neutral: tuple[Any, ...] = ()


_NO, _OFF, _ON = Refused(), Refused(neutral=(False,)), Refused(neutral=(True,))
_EMPTY = Refused(neutral=([], {}))

REFUSED: Mapping[str, Refused] = {
    # Constraints, under the names of other servers.
    **dict.fromkeys(("guided_json", "json_schema"), Refused("response_format")),
    **dict.fromkeys(("guided_regex", "guided_choice", "stop_regex"), Refused("regex")),
    **dict.fromkeys(("guided_grammar", "ebnf"), Refused("grammar")),
    "structured_outputs": Refused("response_format, regex or grammar"),
    **dict.fromkeys(("structural_tag", "guided_whitespace_pattern", "guided_decoding_backend"), _NO),
    # OpenAI.
    "functions": Refused("tools"),
    "function_call": Refused("tool_choice"),
    **dict.fromkeys(("audio", "web_search_options", "previous_response_id", "conversation"), _NO),
    "reasoning": Refused("reasoning_effort, in a chat"),
    "verbosity": Refused(neutral=("medium",)),
    "instructions": Refused("a message of the role system"),
    "truncation": Refused(neutral=("disabled",)),
    # vLLM and SGLang.
    **dict.fromkeys(("use_beam_search", "early_stopping", "include_stop_str_in_output", "no_stop_trim"), _OFF),
    **dict.fromkeys(("return_tokens_as_token_ids", "return_hidden_states", "continue_final_message", "echo"), _OFF),
    **dict.fromkeys(("skip_special_tokens", "include_reasoning", "separate_reasoning", "stream_reasoning"), _ON),
    **dict.fromkeys(("add_generation_prompt", "detokenize", "normalize"), _ON),
    **dict.fromkeys(("bad_words", "allowed_token_ids", "logits_processors", "chat_template_kwargs"), _EMPTY),
    **dict.fromkeys(("documents", "custom_params", "vllm_xargs", "mm_processor_kwargs"), _EMPTY),
    **dict.fromkeys(("add_special_tokens", "truncate_prompt_tokens", "prompt_logprobs", "chat_template"), _NO),
    **dict.fromkeys(("prompt_embeds", "input_embeds", "image_data", "video_data", "audio_data", "lora_path"), _NO),
    **dict.fromkeys(("custom_logit_processor", "session_params", "thinking_token_budget", "reasoning_effort"), _NO),
    "length_penalty": Refused(neutral=(1,)),
    "num_beams": Refused(neutral=(1,)),
    "repetition_detection": _NO,
    "embed_dtype": Refused(neutral=("float32",)),
    "endianness": Refused(neutral=("native", "little")),
    "use_activation": _ON,
    "sampling_seed": Refused("seed"),
    "sampling_params": Refused("its fields beside the others"),
    "extra_body": Refused("its fields beside the others"),
    # llama.cpp, TGI and Ollama.
    **dict.fromkeys(("n_predict", "num_predict"), Refused("max_tokens", (-1,))),
    "repeat_penalty": Refused("repetition_penalty", (1,)),
    **dict.fromkeys(("typical_p", "tfs_z"), Refused(neutral=(1,))),
    **dict.fromkeys(("mirostat", "dry_multiplier", "xtc_probability", "no_repeat_ngram_size"), Refused(neutral=(0,))),
    **dict.fromkeys(("dynatemp_range", "epsilon_cutoff", "eta_cutoff"), Refused(neutral=(0,))),
    "top_n_sigma": Refused(neutral=(-1,)),
    "do_sample": Refused("temperature", (True,)),
    **dict.fromkeys(("options", "parameters"), Refused("its fields beside the others", ({},))),
    "format": Refused("response_format", ("",)),
    "think": Refused("enable_thinking or reasoning_effort, in a chat"),
    "watermark": _OFF,
    "adapter_id": Refused(neutral=("",)),
    # transformers' generation fields.
    **dict.fromkeys(("max_length", "max_tokens_to_sample"), Refused("max_tokens")),
    "min_length": Refused("min_tokens", (0,)),
    "num_return_sequences": Refused("n", (1,)),
    **dict.fromkeys(("eos_token_id", "forced_eos_token_id"), Refused("stop_token_ids", ([],))),
    **dict.fromkeys(("stop_token", "stop_words", "stop_strings"), Refused("stop", ([], ""))),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "bad_words_ids"), Refused("logit_bias", ([],))),
    **dict.fromkeys(("sequence_bias", "bad_token_ids"), Refused("logit_bias", ([], {}))),
    "force_words_ids": Refused("regex or grammar", ([],)),
    "constraints": Refused("response_format, regex or grammar", ([],)),
    **dict.fromkeys(("forced_bos_token_id", "decoder_start_token_id", "history_ask"), _EMPTY),
    **dict.fromkeys(("exponential_decay_length_penalty", "negative_prompt", "negative_prompt_ids"), _EMPTY),
    **dict.fromkeys(("guidance_scale", "encoder_repetition_penalty", "num_beam_groups"), Refused(neutral=(1,))),
    **dict.fromkeys(("penalty_alpha", "diversity_penalty", "encoder_no_repeat_ngram_size"), Refused(neutral=(0,))),
    "beam_width": Refused(neutral=(1,)),
    "top_a": Refused(neutral=(0,)),
    "max_time": Refused("timeout"),
    "generation_config": Refused("its fields beside the others", ({},)),
    # Anthropic, Qwen and DeepSeek.
    **dict.fromkeys(("stop_sequences", "stopping_strings"), Refused("stop", ([],))),
    "system": Refused("a message of the role system", ("",)),
    **dict.fromkeys(("enable_thinking", "thinking", "thinking_budget"), Refused("chat_template_kwargs")),
    # Fields that only some formats have; a format's own fields are not looked up here.
    **dict.fromkeys(("max_new_tokens", "max_output_tokens", "max_completion_tokens"), Refused("max_tokens")),
    "min_new_tokens": Refused("min_tokens"),
    "best_of": Refused("n", (1,)),
    "suffix": Refused(neutral=("",)),
    "tools": Refused("the route /v1/chat/completions", ([],)),
    "tool_choice": Refused("the route /v1/chat/completions", ("none", "auto")),
    "top_logprobs": Refused("logprobs", (0,)),
}
"""Field -> why it is refused, in the formats that do not have it."""
IGNORED = (
    *("metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"),
    *("prediction", "moderation", "priority", "request_id", "rid", "cache_salt", "extra_key", "kv_transfer_params"),
    *("data_parallel_rank", "spaces_between_special_tokens", "bootstrap_host", "bootstrap_port", "bootstrap_room"),
    *("return_cached_tokens_details", "user", "parallel_tool_calls"),
    *("prompt", "messages"),  # beside the format's own, which is required
)
"""Fields that do not change the answer: ignored, and named in it."""


def check_unknown(
    given: Mapping[str, Any], known: Collection[str], refused: Mapping[str, Refused], path: str = ""
) -> None:
    """Refuse a request with a field that its format does not have and that would change the answer.

    Args:
        given: the fields of the request, or of an object in it.
        known: the format's fields.
        refused: the refused fields.
        path: where in the request the object is; it ends with a full stop. "" for the request itself.

    Raises:
        ApiError: 400, naming the field.
    """
    unknown = [name for name in given if name not in known]
    if len(unknown) > MAX_UNKNOWN:
        raise invalid(f"{len(unknown)} unknown fields; at most {MAX_UNKNOWN}.", path[:-1] or None, "too_many")
    for name in unknown:
        value, at = given[name], path + name[:100]
        if value is None or name in IGNORED:
            continue
        if name in refused:
            if not _is_neutral(value, refused[name]):
                use = f": use {refused[name].instead}" if refused[name].instead else ""
                raise invalid(f"{at}: Not supported{use}.", at, "unsupported")
        elif near := find_nearest(name, (*known, *refused)):
            raise invalid(f"{at!r} is no field of this request. Perhaps {path}{near} was meant.", at, "unsupported")


def list_ignored(given: Mapping[str, Any], own: Mapping[str, Refused]) -> list[str]:
    """Return which unknown fields of a checked request have no effect: all but those with a neutral value."""
    return sorted(name for name, value in given.items() if value is None or (name not in REFUSED and name not in own))


def _is_neutral(value: Any, field: Refused) -> bool:
    return any(value == n and isinstance(value, bool) == isinstance(n, bool) for n in field.neutral)
