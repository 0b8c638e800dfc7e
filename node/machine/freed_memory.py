"""Memory that a process frees stays with it, for it will need as much again.

glibc gives freed memory back to the kernel, which zeroes it and hands it out again page by page. A
rank frees its gradients in each inner step: for a model of 3 million parameters that was 2,800 page
faults, and some per cent of a step where faults are dear, as in virtual machines. A daemon frees the
vectors of each round.
"""

import ctypes

# malloc.h's names for mallopt(3).
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3

_NEVER = 2**31 - 1
_LARGEST_MMAP_THRESHOLD = 32 << 20  # glibc takes no larger one; tensors above it are mapped anew


def keep_freed_memory() -> bool:
    """Asks the C library for it; False where it is not glibc, and all stays as it is."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    is_kept: bool = mallopt(_TRIM_THRESHOLD, _NEVER) == 1
    is_on_heap: bool = mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD) == 1
    return is_kept and is_on_heap
