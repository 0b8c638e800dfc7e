"""What benchmarks/wan compares: each contender in a file of its own, behind one small interface."""
