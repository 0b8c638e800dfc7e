"""A swarm in one process, with production's code and a clock that jumps."""
