"""Other libraries beside thinwire: same model, batches, seeds and links."""
