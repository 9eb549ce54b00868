"""Kernels that several backends share. They name no device and are declared by backends, never used by core itself."""
