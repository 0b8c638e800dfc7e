"""Speed and memory of an island, and how it starts."""
