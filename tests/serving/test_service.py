"""Admission, accounting and draining of a service, without a wire format."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from inferplane.engine import AsyncLLM
from inferplane.errors import CheckpointError
from inferplane.serving.admission import GenerateCall
from inferplane.serving.errors import ApiError
from inferplane.serving.generation import Generation
from inferplane.serving.grpc import schema, servicer
from inferplane.serving.keys import Keys
from inferplane.serving.service import Service
from inferplane.serving.settings import ServerSettings

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
}
LONG = GenerateCall(prompts=[[5, 9, 11]], sampling={"temperature": 0}, max_tokens=200)


def open_engine() -> AsyncLLM:
    return AsyncLLM(CONFIG, device="cpu", dtype="float32", load_format="dummy", max_num_seqs=4)


@contextlib.asynccontextmanager
async def running(**settings: Any):
    service = Service(ServerSettings(max_num_seqs=4, max_waiting=4, **settings))
    await service.load(open_engine)
    try:
        yield service
        await at_rest(service)
    finally:
        await service.drain(0)


async def at_rest(service: Service) -> None:
    """No slot and no block is in use."""
    for _ in range(200):
        stats = await service.stats()
        if not stats["num_requests_running"] + stats["num_requests_waiting"] + service.slots.in_use:
            break
        await asyncio.sleep(0.01)
    assert service.slots.in_use == 0
    assert not service._generations
    assert stats["kv_blocks_free"] + stats["kv_blocks_cached"] == stats["kv_blocks_total"]


async def read(generation: Generation) -> dict[int, tuple[list[int], list[str]]]:
    found: dict[int, tuple[list[int], list[str]]] = {}
    async for piece in generation.pieces():
        tokens, reasons = found.setdefault(piece.choice, ([], []))
        tokens += piece.delta.token_ids
        reasons += [piece.delta.finish_reason] if piece.delta.finish_reason else []
    return found


async def served(service: Service, ask: GenerateCall) -> dict[int, tuple[list[int], list[str]]]:
    async with service.admit(ask) as generation:
        return await read(generation)


def check(work) -> None:
    asyncio.run(work())


def test_every_sequence_ends_once_and_is_what_it_would_be_alone():
    async def work() -> None:
        async with running() as service:
            prompts = [[5, 9, 11], [7] * 20]
            many = await served(service, GenerateCall(prompts, {"seed": 3}, max_tokens=9, n=2))
            assert {i: reasons for i, (_, reasons) in many.items()} == {i: ["length"] for i in range(4)}
            alone = await served(service, GenerateCall([prompts[1]], {"seed": 3}, max_tokens=9))
            assert alone[0] == many[2]
            assert many[2] != many[3]

    check(work)


def test_cached_tokens_are_counted_once_for_a_prompt():
    async def work() -> None:
        async with running() as service:
            block = service.ready_model.info.block_tokens
            prompts = [[5] * (3 * block + 1), [6] * (2 * block + 1)]
            await served(service, GenerateCall(prompts[:1], max_tokens=1))
            async with service.admit(GenerateCall(prompts, max_tokens=1, n=2)) as generation:
                await read(generation)
            assert (generation.prompt_tokens, generation.cached_tokens) == (5 * block + 2, 3 * block)

    check(work)


@pytest.mark.parametrize(
    ("ask", "param", "code"),
    [
        (GenerateCall([]), "prompt", "invalid_value"),
        (GenerateCall([[]]), "prompt", "invalid_value"),
        (GenerateCall([[97]]), "prompt", "invalid_value"),
        (GenerateCall([[-1]]), "prompt", "invalid_value"),
        (GenerateCall([[1]] * 65), "prompt", "too_many"),
        (GenerateCall([[1]], n=65), "n", "too_many"),
        (GenerateCall([[1], [2]], n=5), "n", "too_many"),  # ten sequences, where four run and four wait
        (GenerateCall([[1] * 512]), "prompt", "context_length_exceeded"),
        (GenerateCall([[1]], max_tokens=512), "max_tokens", "context_length_exceeded"),
        (GenerateCall([[1]], {"min_tokens": 4}, max_tokens=3), "min_tokens", "invalid_value"),
        (GenerateCall([[1]], {"temperature": -1}), "temperature", "invalid_value"),
        (GenerateCall([[1]], {"logit_bias": {97: 1}}), "logit_bias", "invalid_value"),
        (GenerateCall([[1]], {"regex": "("}), "regex", "invalid_value"),
        (GenerateCall(["text"]), "prompt", "invalid_value"),  # the model has no tokenizer
        (
            GenerateCall([[1]], max_tokens=512, words={"max_tokens": "max_dec_len"}),
            "max_dec_len",
            "context_length_exceeded",
        ),
    ],
)
def test_what_is_refused_leaves_nothing(ask, param, code):
    async def work() -> None:
        async with running() as service:
            with pytest.raises(ApiError) as refused:
                async with service.admit(ask) as generation:
                    await generation.wait_for_first_piece(20)
            assert (refused.value.status, refused.value.param, refused.value.code) == (400, param, code)
            assert await served(service, GenerateCall([[1]], max_tokens=2))

    check(work)


def test_limits_of_the_server_hold():
    async def work() -> None:
        async with running(max_prompt_tokens=5, max_output_tokens=7, max_n=2) as service:
            for ask in (GenerateCall([[1] * 6]), GenerateCall([[1]], max_tokens=8), GenerateCall([[1]], n=3)):
                with pytest.raises(ApiError) as refused:
                    await served(service, ask)
                if ask.max_tokens is not None:  # no shorter prompt would help
                    assert (refused.value.param, refused.value.code) == ("max_tokens", "invalid_value")
            (tokens, _) = (await served(service, GenerateCall([[1] * 5], {"temperature": 0})))[0]
            assert len(tokens) <= 7

    check(work)


def test_a_full_queue_refuses_at_once_and_takes_again():
    async def work() -> None:
        async with running() as service:
            streams = [asyncio.create_task(served(service, LONG)) for _ in range(8)]
            while service.slots.in_use < 8:
                await asyncio.sleep(0.001)
            begun = asyncio.get_running_loop().time()
            with pytest.raises(ApiError) as refused:
                await served(service, LONG)
            assert asyncio.get_running_loop().time() - begun < 0.1  # nothing is awaited before the refusal
            assert (refused.value.status, refused.value.retry_after_s) == (429, 1)
            streams[0].cancel()
            await asyncio.gather(streams[0], return_exceptions=True)
            while service.slots.in_use == 8:  # the slot is free when the engine has confirmed the end
                await asyncio.sleep(0.001)
            assert (await served(service, GenerateCall([[1]], max_tokens=2)))[0][1] == ["length"]
            for stream in streams[1:]:
                assert (await stream)[0][1] == ["length"]
            assert service.counters["requests_aborted_total", "disconnect"] == 1
            assert service.counters["requests_rejected_total", "queue_full"] == 1

    check(work)


def test_an_id_lives_once_at_a_time():
    async def work() -> None:
        async with running() as service:
            ask = GenerateCall([[1]], max_tokens=400, request_id="mine", words={"request_id": "req_id"})
            async with service.admit(ask):
                with pytest.raises(ApiError) as refused:
                    await served(service, ask)
                assert (refused.value.status, refused.value.param) == (409, "req_id")
                assert service.slots.in_use == 1
            assert (await served(service, GenerateCall([[1]], max_tokens=2, request_id="mine")))[0][1] == ["length"]

    check(work)


def test_a_request_that_runs_out_of_time_says_so():
    async def work() -> None:
        async with running() as service:
            with pytest.raises(ApiError) as late:
                await served(service, GenerateCall([[1]], max_tokens=500, timeout_s=0.02))
            assert (late.value.status, late.value.code) == (408, "timeout")
        async with running(request_timeout_s=0.02) as service:
            for own in (None, 60):
                with pytest.raises(ApiError) as late:
                    await served(service, GenerateCall([[1]], max_tokens=500, timeout_s=own))
                assert (late.value.status, late.value.code) == (504, "timeout")

    check(work)


def test_an_unread_grpc_stream_releases_its_slots(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(servicer, "MAX_CONCURRENT_REQUESTS", 2)

    class Caller:
        def invocation_metadata(self) -> tuple[()]:
            return ()

    async def ask() -> AsyncIterator[Any]:
        make = schema.message("ModelInferRequest")(model_name="model")
        make.inputs.add(name="input_ids", datatype="INT64", shape=[1]).contents.int64_contents.append(5)
        make.parameters["max_tokens"].int64_param = 200
        yield make.SerializeToString()
        await asyncio.Event().wait()

    async def work() -> None:
        async with running(write_timeout_s=0.1) as service:

            async def leave_unread() -> None:
                async for _ in servicer.Servicer(service, Keys(())).ModelStreamInfer(ask(), Caller()):
                    await asyncio.Event().wait()

            call = asyncio.create_task(leave_unread())
            while not service.slots.in_use:
                await asyncio.sleep(0.001)
            await asyncio.wait([call], timeout=20)
            assert call.cancelled()

    check(work)


@pytest.mark.parametrize("after", [0.0, 0.001, 0.005, 0.02, 0.1])
def test_leaving_at_any_moment_gives_everything_back(after):
    async def work() -> None:
        async with running() as service:
            for _ in range(3):
                task = asyncio.create_task(served(service, GenerateCall([[1] * 300, [2]], max_tokens=200, n=2)))
                await asyncio.sleep(after)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
                while service.slots.in_use > 4:  # until the engine has confirmed an end
                    await asyncio.sleep(0.001)
            await at_rest(service)

    check(work)


def test_draining_lets_live_requests_end_and_refuses_new_ones():
    async def work() -> None:
        service = Service(ServerSettings(max_num_seqs=4, max_waiting=4))
        with pytest.raises(ApiError) as refused:
            await served(service, LONG)
        assert (refused.value.status, refused.value.code) == (503, "loading")
        await service.load(open_engine)
        stream = asyncio.create_task(served(service, LONG))
        while not service.slots.in_use:
            await asyncio.sleep(0.001)
        draining = asyncio.create_task(service.drain(60))
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as refused:
            await served(service, LONG)
        assert (refused.value.status, refused.value.code) == (503, "shutting_down")
        assert not service.condition().ready
        assert (await stream)[0][1] == ["length"]
        await draining
        assert service.state == "ended"

    check(work)


def test_a_drain_that_takes_too_long_aborts_with_an_error():
    async def work() -> None:
        service = Service(ServerSettings(max_num_seqs=4, max_waiting=4))
        await service.load(open_engine)
        streams = [asyncio.create_task(served(service, LONG)) for _ in range(6)]
        while service.slots.in_use < 6:
            await asyncio.sleep(0.001)
        await service.drain(0)
        for stream in streams:
            with pytest.raises(ApiError) as ended:
                await stream
            assert ended.value.status == 503

    check(work)


def test_a_model_that_cannot_be_loaded_is_reported():
    async def work() -> None:
        service = Service(ServerSettings())

        def fail() -> AsyncLLM:
            raise CheckpointError("no such file")

        with pytest.raises(CheckpointError):
            await service.load(fail)
        assert service.failed.is_set()
        condition = service.condition()
        assert (condition.live, condition.ready, condition.status) == (False, False, "failed")
        assert "no such file" in condition.detail
        await service.drain(0)

    check(work)


def test_an_engine_that_dies_fails_its_requests_and_the_service():
    async def work() -> None:
        service = Service(ServerSettings(max_num_seqs=4, max_waiting=4))
        await service.load(open_engine)
        engine = service.engine
        assert engine is not None
        stream = asyncio.create_task(served(service, LONG))
        while not (await service.stats())["num_requests_running"]:
            await asyncio.sleep(0.001)

        def crash(*_: object) -> None:
            raise SystemError("struck by lightning")

        engine.llm.engine.step = crash  # type: ignore[method-assign,assignment]
        with pytest.raises(ApiError) as ended:
            await stream
        assert ended.value.status in (500, 503)
        await asyncio.wait_for(service.failed.wait(), 20)
        assert not service.condition().live
        with pytest.raises(ApiError):
            await served(service, LONG)
        await service.drain(0)

    check(work)


def test_an_engine_that_stalls_is_not_ready_until_it_moves():
    async def work() -> None:
        service = Service(ServerSettings(max_num_seqs=4, max_waiting=4, stall_s=0.3))
        await service.load(open_engine)
        engine = service.engine
        assert engine is not None
        gate, step = asyncio.Event(), engine.llm.engine.step

        def slow() -> Any:
            while not gate.is_set():
                import time

                time.sleep(0.01)
            return step()

        engine.llm.engine.step = slow  # type: ignore[method-assign]
        stream = asyncio.create_task(served(service, GenerateCall([[1]], max_tokens=3)))
        limit = asyncio.get_running_loop().time() + 20
        while service.condition().ready and asyncio.get_running_loop().time() < limit:
            await asyncio.sleep(0.02)
        assert service.condition().status == "stalled"
        gate.set()
        assert (await stream)[0][1] == ["length"]
        while not service.condition().ready and asyncio.get_running_loop().time() < limit:
            await asyncio.sleep(0.02)
        assert service.condition().ready
        await service.drain(0)

    check(work)
