"""python -m benchmarks.convergence: see command."""

from benchmarks.convergence.command import main
from lab.processes.family import nothing_left

if __name__ == "__main__":
    with nothing_left():
        main()
