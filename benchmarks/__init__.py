"""What the README's figures come from. Run one with `python -m benchmarks.NAME`."""
