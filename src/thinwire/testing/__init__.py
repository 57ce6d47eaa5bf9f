"""Helpers for tests of thinwire and of code that uses it; nothing in the library imports them."""
