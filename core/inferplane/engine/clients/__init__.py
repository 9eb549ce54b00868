"""How an engine is used: `LLM` in the caller's thread, `AsyncLLM` over one in a thread or a process."""
