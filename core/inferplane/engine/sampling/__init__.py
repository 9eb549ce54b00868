"""From logits to tokens: sampling parameters as tensors, random numbers, log-probabilities, compiled grammars."""
