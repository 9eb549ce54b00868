"""State that all processes of one server share: counters, and the slots that limit running and waiting sequences."""
