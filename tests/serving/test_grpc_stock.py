"""Clients of Triton's vLLM backend, as they are: flags about the outputs, numbers as strings."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator
from typing import Any

import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from tests.serving.live import Live
from tests.serving.test_grpc import PROMPT, address, tensor, tokens_of, typed


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with Live("--max-num-seqs", "16", "--grpc-port", "0") as live:
        yield live
        live.at_rest()
        assert live.stop() == 0


@pytest.fixture
def client(server):
    with triton.InferenceServerClient(address(server)) as client:
        yield client


def stock(text: str = PROMPT, stream: bool = False, exclude: bool = True, **parameters: Any) -> list[triton.InferInput]:
    """The inputs that the sample client of Triton's vLLM backend sends."""
    return [
        tensor("text_input", "BYTES", text.encode()),
        tensor("stream", "BOOL", stream),
        tensor("sampling_parameters", "BYTES", json.dumps(parameters).encode()),
        tensor("exclude_input_in_output", "BOOL", exclude),
    ]


STOCK = {"temperature": "0", "top_p": "0.95", "max_tokens": "12"}


@pytest.mark.parametrize(
    "parameters",
    [
        STOCK,
        {"temperature": 0.0, "max_tokens": 12},
        {**STOCK, "top_k": "-1", "frequency_penalty": "0.0", "ignore_eos": "False", "min_tokens": "0"},
        {**STOCK, "use_beam_search": "false", "skip_special_tokens": "True", "best_of": "1", "length_penalty": "1.0"},
        {**STOCK, "stop": "123456", "seed": "5", "logit_bias": '{"1": -1}'},
    ],
)
def test_stock_clients_of_tritons_vllm_backend_are_served(client, parameters):
    want = client.infer("model", typed()).as_numpy("text_output")[0]
    whole = client.infer("model", stock(**parameters))
    assert whole.as_numpy("text_output")[0] == want
    assert (
        client.infer("model", stock(exclude=False, **parameters)).as_numpy("text_output")[0] == PROMPT.encode() + want
    )


def test_a_stock_client_streams_and_counts_tokens(client, server):
    counts = [tensor(f"return_num_{way}_tokens", "BOOL", True) for way in ("input", "output")]
    answers: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    client.async_stream_infer("model", [*stock(stream=True, exclude=False, **STOCK), *counts], request_id="s")
    text, made, final = b"", 0, False
    while not final:
        result, error = answers.get(timeout=60)
        assert error is None, error
        text += result.as_numpy("text_output")[0]
        made += int(result.as_numpy("num_output_tokens")[0])
        final = result.get_response().parameters["triton_final_response"].bool_param
    client.stop_stream()
    whole = client.infer("model", [*typed(), *counts])
    assert text == PROMPT.encode() + whole.as_numpy("text_output")[0]
    assert made == whole.as_numpy("num_output_tokens")[0] == len(whole.as_numpy("token_ids"))
    assert whole.as_numpy("num_input_tokens").tolist() == [len(tokens_of(server))]


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"temperature": "warm"}, "temperature"),
        ({"top_k": "9223372036854775808"}, "top_k"),
        ({"max_tokens": "12.5"}, "max_tokens"),
        ({"use_beam_search": "True"}, "use_beam_search"),
        ({"temprature": "0.5"}, "Perhaps temperature was meant"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"frobs": "1"}, "no input 'frobs'"),
    ],
)
def test_what_a_stock_client_cannot_have_is_refused(client, parameters, said):
    with pytest.raises(InferenceServerException, match=said):
        client.infer("model", stock(**{**STOCK, **parameters}))
