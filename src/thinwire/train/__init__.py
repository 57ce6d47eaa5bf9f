"""The reference trainer: the proof harness of the library, not its product.

Importing this package loads no torch: `loop`, `model` and their kind are imported where they run.
"""
