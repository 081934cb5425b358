"""Quantization: the on-disk format (`affine`), and one file per method of choosing scales and zero-points."""
