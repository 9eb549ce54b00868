"""What of the vendor's has to be installed, as features."""

from __future__ import annotations

OPERATORS, FLASH = ("vllm-gcu",), ("flash-attn",)
"""The operators of vllm-gcu's extension, and Enflame's build of flash attention."""
