"""Replies of models: tells reasoning, content and tool calls apart in text, by tables of marks; without torch."""
