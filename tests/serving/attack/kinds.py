"""The kinds of misbehaving clients: what each does, its class of advisories, and the answers that it may get."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import NamedTuple

from tests.serving.attack import bodies, connections, generation
from tests.serving.attack.target import CLOSED, Target

REFUSED = frozenset({CLOSED, *range(400, 500)})
ANSWERED = REFUSED | {200}
BUSY = frozenset({503})
"""Too many large bodies at a time."""

AMPLIFIED = "CWE-405: much work for a small request"
EXHAUSTED = "CWE-770: resources without a limit"
SLOW = "CWE-400: slow clients that hold connections"
SMUGGLED = "CWE-444: HTTP that two servers read differently"
PARSED = "CWE-20: input that is no valid request"
NESTED = "CWE-674: recursion without a limit"
LISTED = "CWE-1284: quantities that are not checked"
INFLATED = "CWE-409: compressed data that grows"
COMPLEX = "CWE-1333: expressions that take exponential time"
FORCED = "CWE-307: attempts at keys without end"
BYPASSED = "CWE-288: another way to a route that needs a key"
REBOUND = "CWE-350: DNS rebinding"
INJECTED = "CWE-1336: templates and addresses in requests"
RAPID_RESET = "CWE-404: streams cancelled as soon as they are begun (CVE-2023-44487)"


class Kind(NamedTuple):
    """One kind of misbehaving client.

    Args:
        advisory: the class of advisories.
        run: does it once; returns the statuses of the answers that were read.
        allowed: statuses that it may get.
        is_load: it sends valid requests, as many and as long as there may be. Such clients have a key of their own:
            otherwise they would use up the share of sequences, and nothing that others send would be looked at.
    """

    advisory: str
    run: Callable[[Target, Random], list[int]]
    allowed: frozenset[int] = ANSWERED
    is_load: bool = False

    @property
    def name(self) -> str:
        return self.run.__name__.replace("_", " ")


KINDS = (
    # Connections.
    Kind(AMPLIFIED, connections.send_tiny_chunks_without_key, REFUSED | {200}),
    Kind(AMPLIFIED, connections.send_tiny_chunks, REFUSED),
    Kind(AMPLIFIED, connections.send_chunks_with_extensions, REFUSED),
    Kind(SLOW, connections.send_slow_headers, REFUSED),
    Kind(SLOW, connections.send_slow_body, REFUSED),
    Kind(SLOW, connections.half_close_bodies, REFUSED),
    Kind(SLOW, connections.hold_idle_connections, frozenset({CLOSED})),
    Kind(EXHAUSTED, connections.open_and_reset),
    Kind(SLOW, connections.read_slowly, is_load=True),
    Kind(SLOW, connections.never_read_streams, is_load=True),
    Kind(SLOW, connections.never_read_answers),
    Kind(EXHAUSTED, connections.leave_streams, is_load=True),
    Kind(EXHAUSTED, connections.leave_before_answers, is_load=True),
    Kind(EXHAUSTED, connections.pipeline_requests),
    Kind(EXHAUSTED, connections.pipeline_completions, is_load=True),
    Kind(PARSED, connections.send_malformed_requests, REFUSED),
    Kind(SMUGGLED, connections.send_ambiguous_requests, frozenset({CLOSED, 400})),
    Kind(REBOUND, connections.send_foreign_hosts, frozenset({CLOSED, 400, 403})),
    Kind(EXHAUSTED, connections.send_huge_headers, REFUSED),
    Kind(EXHAUSTED, connections.send_long_targets),
    Kind(FORCED, connections.try_keys, frozenset({CLOSED, 400, 401, 431})),
    Kind(BYPASSED, connections.try_paths_without_key, frozenset({CLOSED, 401})),
    Kind(BYPASSED, connections.walk_unknown_paths, frozenset({CLOSED, 404})),
    Kind(PARSED, connections.send_other_methods, REFUSED),
    Kind(SMUGGLED, connections.upgrade_connections, REFUSED),
    Kind(PARSED, connections.send_other_protocols, REFUSED),
    Kind(INFLATED, connections.send_compressed_bodies, frozenset({CLOSED, 408, 415, 429})),
    Kind(EXHAUSTED, connections.send_bodies_where_none_belong),
    # Bodies.
    Kind(LISTED, bodies.send_giant_lists, REFUSED | BUSY),
    Kind(LISTED, bodies.send_giant_mappings, REFUSED | BUSY),
    Kind(EXHAUSTED, bodies.send_large_bodies_of_values, REFUSED | BUSY),
    Kind(EXHAUSTED, bodies.send_large_bodies_of_text, REFUSED | BUSY),
    Kind(EXHAUSTED, bodies.send_bodies_beyond_the_limit, frozenset({CLOSED, 408, 413, 429})),
    Kind(NESTED, bodies.send_deep_values),
    Kind(PARSED, bodies.send_repeated_names),
    Kind(PARSED, bodies.send_numbers_that_are_none, REFUSED),
    Kind(PARSED, bodies.send_huge_numbers),
    Kind(PARSED, bodies.send_invalid_text, REFUSED),
    Kind(PARSED, bodies.send_escapes),
    Kind(LISTED, bodies.send_long_names, ANSWERED | BUSY),
    Kind(PARSED, bodies.send_other_types),
    Kind(LISTED, bodies.send_long_prompts),
    Kind(AMPLIFIED, bodies.flood_tokenize),
    Kind(AMPLIFIED, bodies.flood_detokenize),
    Kind(AMPLIFIED, bodies.flood_embeddings, is_load=True),
    Kind(LISTED, bodies.send_prompt_arrays),
    Kind(LISTED, bodies.send_stop_lists),
    Kind(LISTED, bodies.send_biases),
    Kind(INJECTED, bodies.send_conversations),
    Kind(NESTED, bodies.send_tools),
    Kind(INJECTED, bodies.send_template_fields),
    # Generation.
    Kind(COMPLEX, generation.send_new_constraints),
    Kind(COMPLEX, generation.send_constraints_too_complex),
    Kind(COMPLEX, generation.send_constraints_that_grow),
    Kind(COMPLEX, generation.send_large_schemas),
    Kind(COMPLEX, generation.send_invalid_constraints, REFUSED),
    Kind(LISTED, generation.ask_for_many_sequences, is_load=True),
    Kind(LISTED, generation.ask_for_many_logprobs, is_load=True),
    Kind(LISTED, generation.ask_for_many_tokens, is_load=True),
    Kind(AMPLIFIED, generation.echo_long_prompts, is_load=True),
    Kind(EXHAUSTED, generation.fill_cache, is_load=True),
    Kind(EXHAUSTED, generation.queue_requests, is_load=True),
    Kind(PARSED, generation.set_short_timeouts),
    Kind(PARSED, generation.repeat_request_ids, is_load=True),
    Kind(PARSED, generation.send_native_requests),
    Kind(LISTED, generation.mix_embeddings, is_load=True),
    Kind(AMPLIFIED, generation.poll_metrics),
    # gRPC.
    Kind(PARSED, generation.send_grpc_noise),
    Kind(RAPID_RESET, generation.reset_grpc_streams),
    Kind(PARSED, generation.send_grpc_messages),
    Kind(EXHAUSTED, generation.leave_grpc_streams, is_load=True),
)
