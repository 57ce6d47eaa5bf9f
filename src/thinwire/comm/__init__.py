"""Collectives that carry codec buffers, and the ledger that counts them."""

from thinwire.comm.ledger import Ledger

__all__ = ["Ledger"]
