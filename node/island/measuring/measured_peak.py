"""The most FLOP/s of a device that no table names, measured by matrix products.

Best of some, in a tenth of a second. A CPU's is by the time that the thread itself had a core: others that
want the same core meanwhile do not lower it. On other devices they do; so whoever shows it says that it was
measured.
"""

import time
from collections.abc import Callable

import torch

_SIZES = {"cpu": 512}
_SIZE_ELSEWHERE = 4096
_MOST_PRODUCTS = 8
_MOST_SECONDS = 0.1

Key = tuple[str, torch.dtype]

_peaks: dict[Key, float] = {}  # of this process


def measure_peak(
    device: torch.device, dtype: torch.dtype, clock: Callable[[], float] | None = None
) -> float:
    """Measures and keeps the peak of a device, in FLOP/s; a rank has one device."""
    if clock is None:
        clock = time.thread_time if device.type == "cpu" else time.perf_counter
    size = _SIZES.get(device.type, _SIZE_ELSEWHERE)
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product = left @ right  # libraries load and choose at the first one
    _wait_for(device)
    began_at = clock()
    least = float("inf")
    for _ in range(_MOST_PRODUCTS):
        started_at = clock()
        torch.mm(left, right, out=product)
        _wait_for(device)
        least = min(least, clock() - started_at)
        if clock() - began_at >= _MOST_SECONDS:
            break
    _peaks[device.type, dtype] = 2 * size**3 / least
    return _peaks[device.type, dtype]


def measured_peak_of(device: torch.device, dtype: torch.dtype) -> float | None:
    """What was measured; None when nothing was."""
    return _peaks.get((device.type, dtype))


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
