"""What a rank did, and what its device could do."""
