"""Chat: OpenAI's conversations, from the request's fields to the answer, independent of the transport."""
