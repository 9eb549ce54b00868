"""An engine in a process of its own: typed messages over a Unix socket, never pickle. `remote` is the caller's side."""
