"""`inferplane serve`: one engine behind HTTP.

    wire format --Ask--> Service.admit --Job--> pieces --> wire format

`service.py` is the one way in: every wire format (OpenAI's completions and chat, the native dialect, others)
states its request as an `GenerateCall`, gets a `Generation` or an `ApiError`, and renders the job's pieces. Limits, admission and
accounting live there and in `admission.py`, and nowhere else.

Needs the packages of the extra `serving`; `settings.py` and `configure.py` need none of them.
"""
