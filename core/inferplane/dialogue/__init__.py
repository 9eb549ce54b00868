"""Conversations: the forms of messages, and chat templates; without torch."""
