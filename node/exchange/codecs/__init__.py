"""Codecs: fp32 values of a slice to bytes and back. A file for each family, a registry by name."""
