"""`inferplane serve`: one engine behind HTTP and gRPC.

    wire format -> GenerateCall -> Service.admit -> Generation -> the engine's client; its pieces -> wire format

`service.py` is the one way to the engine: every wire format (OpenAI's completions and chat, the native dialect, gRPC's
tensors) states its request as a `GenerateCall`, gets a `Generation` or an `ApiError`, and renders the generation's
pieces. Limits, admission and accounting are there, in `admission.py` and in `slots.py`, and nowhere else.

    lifecycle/      start, signals, draining, further processes for HTTP
    http/, grpc/    the transports, and the formats that only one of them has
    chat_template/  the process that renders chat templates (inferplane.dialogue)
    page/           the status page

Needs the packages of the extra `serving`; `settings.py`, `configure.py` and `source_names.py` need none of them.
"""
