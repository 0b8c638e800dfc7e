"""python -m benchmarks.chaos: see command."""

import sys

from benchmarks.chaos.command import main
from lab.processes.family import nothing_left

if __name__ == "__main__":
    with nothing_left():
        sys.exit(main())
