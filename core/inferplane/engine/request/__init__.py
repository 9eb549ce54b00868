"""What a caller asks for, a request while it lives, and what comes back: parameters, text, seeds, results.

The lowest package of the engine. Callers in a process of their own use `params`, `arguments`, `results`, `text` and
`seeds`, none of which imports torch.
"""
