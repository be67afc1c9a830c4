"""Measuring speed, with a check of the answers in the same run.

`plan` says what is measured, `engine` runs it on the engine's real path, `accuracy` compares logits, `traffic` counts
the bytes that decoding reads, `ceilings` measures what the GPU can do, `machine` names what it was measured on.
"""
