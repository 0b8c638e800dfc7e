"""A small internet on one machine."""
