"""How fast a node writes to its owner's disk, on average: an SSD wears out by what is written."""

BYTES_PER_SECOND = 20e6
"""600 TB a year, what a consumer's SSD endures. Snapshots and checkpoints may have as much each."""

LONGEST_SECONDS = 3600.0
"""However large a file is, it is not older than that."""


def seconds_between(num_bytes: int) -> float:
    """After how long as many bytes may be written again."""
    return min(num_bytes / BYTES_PER_SECOND, LONGEST_SECONDS)
