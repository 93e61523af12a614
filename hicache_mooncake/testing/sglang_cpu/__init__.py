"""The real SGLang on CPU cores, for the demo and the end-to-end tests.

`shims` goes on PYTHONPATH of the SGLang processes, nothing of it is imported here; `servers` starts and asks them; `processes`
keeps children that leave nothing behind; `tiny_model` makes the checkpoint, `reference` says what it answers.
"""
