"""Read-only pages of a process, and what it tells of itself as metrics: when they are asked for."""
