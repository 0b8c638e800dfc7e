"""Settings for all tests: one OpenMP thread for each process, as everywhere on small machines."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anything imports torch
