"""The control plane: membership, plans, commits. No weights pass through it, and no torch."""
