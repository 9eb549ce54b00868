"""What backends share whose kernels are fused operators of a vendor: needs, packings, operands, call forms."""
