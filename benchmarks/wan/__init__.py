"""Atoll beside its peers, over the same links."""
