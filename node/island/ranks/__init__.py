"""A node's training processes: their start, their orders, their ends, their devices."""
