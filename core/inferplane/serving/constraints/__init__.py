"""Constraints that requests put on the generated text, and the JSON schemas in them."""
