"""The life of a server's processes: start, ports, signals, draining, and further processes for HTTP."""
