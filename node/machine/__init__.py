"""What the machine has, and what a node may take of it."""
