"""HTTP: connections, the gate, the routes, and one module per wire format.

A request's way: `protocol.LimitedConnection` -> `gate.Gate` -> `fast_path.AdmissionFastPath` (a slot) -> `app` ->
`generate` (the dialect) -> `chat`, `completions`, `embeddings` or `serving.native` (a `GenerateCall`) ->
`responses.GenerateResponse` -> `Service.admit` (a `Generation`), whose pieces go back through `chunks.ChunkWriter`.
"""
