"""python -m benchmarks.exchange: see command."""

from benchmarks.exchange.command import main
from lab.processes.family import nothing_left

if __name__ == "__main__":
    with nothing_left():
        main()
