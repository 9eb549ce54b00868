"""Portable kernels of recurrent layers: in decode steps convolutions, the gated delta rule and scans; gates; norms."""
