"""KServe's inference protocol, version 2, over gRPC, with Triton's extension for streams."""
