"""python -m benchmarks.wan: see command."""

from benchmarks.wan.command import main
from lab.processes.family import nothing_left

if __name__ == "__main__":
    with nothing_left():
        main()
