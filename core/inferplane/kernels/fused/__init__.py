"""What kernels on a vendor's fused operators share: needs, packings, operands, call forms, kernels by vLLM's names.

Promised to backends like `inferplane.plugin`: names keep their meaning within one API major.
"""
