"""What a node does, one thing after the other, and what its ranks are asked for."""
