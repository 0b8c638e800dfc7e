"""A swarm of real processes under faults."""
