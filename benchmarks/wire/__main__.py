"""python -m benchmarks.wire: see command."""

import sys

from benchmarks.wire.command import main

if __name__ == "__main__":
    sys.exit(main())
