"""python -m benchmarks.codec: see command."""

from benchmarks.codec.command import main

if __name__ == "__main__":
    main()
