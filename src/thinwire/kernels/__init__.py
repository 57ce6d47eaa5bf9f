"""Hot operations: a plain torch reference and fused kernels behind one custom op each."""
