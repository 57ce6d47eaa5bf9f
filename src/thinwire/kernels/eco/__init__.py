"""Quantized weight storage and the optimizer steps that keep no master copy."""
