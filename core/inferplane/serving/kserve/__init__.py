"""KServe's inference protocol, version 2, independent of the transport: names, tensors, requests."""
