"""What a step takes beside weights and cache, and the settings that memory allows."""
