"""Experiments around the trainer: loss parity over seeds, shaped links, codec speed."""
