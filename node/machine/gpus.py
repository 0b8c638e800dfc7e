"""Which GPUs CUDA shows, asked of the driver's own library: seconds before torch could say so.

A program of its own (python -m node.machine.gpus prints JSON), so that the context which free memory can only
be asked through is gone with it, and the daemon never holds one. Tested with a driver that is made
up, never with a GPU.
"""

import ctypes
import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

LIBRARY = "libcuda.so.1"

_NAME_BYTES = 256
_NOTHING_THERE = (34, 100)  # CUDA_ERROR_STUB_LIBRARY, CUDA_ERROR_NO_DEVICE


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One that CUDA_VISIBLE_DEVICES leaves visible; the first is what torch calls cuda:0."""

    name: str
    free_bytes: int


class DriverError(Exception):
    """The driver is there and does not work."""


def gpus_of(driver: Any) -> tuple[Gpu, ...]:
    """Asks a driver library. Raises DriverError with the name of the call and its number."""

    def asked(name: str, *arguments: Any) -> None:
        if error := getattr(driver, name)(*arguments):
            raise DriverError(f"{name} gives error {error}")

    error = driver.cuInit(0)
    if error in _NOTHING_THERE:
        return ()
    if error:
        raise DriverError(f"cuInit gives error {error}")
    count = ctypes.c_int()
    asked("cuDeviceGetCount", ctypes.byref(count))
    found = []
    for index in range(count.value):
        device, context = ctypes.c_int(), ctypes.c_void_p()
        name = ctypes.create_string_buffer(_NAME_BYTES)
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        asked("cuDeviceGet", ctypes.byref(device), index)
        asked("cuDeviceGetName", name, _NAME_BYTES, device)
        asked("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        asked("cuCtxSetCurrent", context)
        asked("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        found.append(Gpu(name=name.value.decode(errors="replace"), free_bytes=free.value))
    return tuple(found)


def has_driver() -> bool:
    """Whether the library is there: most machines without a GPU have none."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return True


def main() -> None:
    """Prints a list of GPUs, or a problem."""
    answer: dict[str, Any]
    try:
        answer = {"gpus": [asdict(gpu) for gpu in gpus_of(ctypes.CDLL(LIBRARY))]}
    except DriverError as error:
        answer = {"problem": str(error)}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
