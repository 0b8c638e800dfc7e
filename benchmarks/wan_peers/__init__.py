"""What benchmarks/wan.py compares: each contender in a file of its own, behind one small interface."""
