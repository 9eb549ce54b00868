"""HTTP: the gate that every byte passes, the routes behind it, one module for each wire format."""
