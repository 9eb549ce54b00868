"""The source system's own commands, with its flags: `python -m inferplane.source predictor --model_name_or_path MODEL`.

Scripts that were written for it run as they stand. New ones use `inferplane generate`, `export`, `pull` and `serve`.
"""
