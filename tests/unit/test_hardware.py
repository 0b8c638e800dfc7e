"""What a machine has, found without torch: memory within limits, and what CUDA's driver shows."""

import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from node import cli
from node.island.ranks.devices import free_bytes
from node.machine import hardware
from node.machine.gpus import DriverError, Gpu, gpus_of
from node.machine.hardware import (
    Hardware,
    _asked,
    _has_others,
    _of_answer,
    likely_devices,
    look_around,
    processes_for,
)
from protocol.errors import ConfigError, SystemRefusedError
from protocol.service.limits import require_processes, usable_cores

GIB = 1 << 30
TWO_GPUS = Hardware(
    memory_bytes=64 * GIB,
    gpus=(Gpu(name="one", free_bytes=8 * GIB), Gpu(name="two", free_bytes=6 * GIB)),
)
NO_GPU = Hardware(memory_bytes=64 * GIB, gpus=())
WHO_KNOWS = Hardware(memory_bytes=64 * GIB, gpus=None)


class MadeUpDriver:
    """Answers as libcuda does: through pointers, with 0 for success."""

    def __init__(
        self, free_bytes: tuple[int, ...], *, faults: dict[str, int] | None = None
    ) -> None:
        self._free_bytes = free_bytes
        self._faults = faults or {}
        self._current = -1

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            if name in self._faults:
                return self._faults[name]
            getattr(self, f"_{name}")(*arguments)
            return 0

        return call

    def _cuInit(self, flags: int) -> None:  # noqa: N802 — the driver's names, here and below
        assert flags == 0

    def _cuDeviceGetCount(self, count: Any) -> None:  # noqa: N802
        count._obj.value = len(self._free_bytes)

    def _cuDeviceGet(self, device: Any, index: int) -> None:  # noqa: N802
        device._obj.value = 10 + index

    def _cuDeviceGetName(self, name: Any, size: int, device: Any) -> None:  # noqa: N802
        name.value = f"GPU {device.value}".encode()[:size]

    def _cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> None:  # noqa: N802
        context._obj.value = 1000 + device.value

    def _cuCtxSetCurrent(self, context: Any) -> None:  # noqa: N802
        self._current = context.value - 1010

    def _cuMemGetInfo_v2(self, free: Any, total: Any) -> None:  # noqa: N802
        free._obj.value = self._free_bytes[self._current]
        assert ctypes.sizeof(total._obj) == ctypes.sizeof(ctypes.c_size_t)


def test_each_gpu_of_the_driver_has_its_name_and_its_own_free_memory() -> None:
    found = gpus_of(MadeUpDriver((7 * GIB, 80 * GIB)))
    assert found == (
        Gpu(name="GPU 10", free_bytes=7 * GIB),
        Gpu(name="GPU 11", free_bytes=80 * GIB),
    )


@pytest.mark.parametrize("nothing_there", [34, 100])
def test_a_driver_without_devices_is_no_gpu_and_no_fault(nothing_there: int) -> None:
    assert gpus_of(MadeUpDriver((), faults={"cuInit": nothing_there})) == ()


@pytest.mark.parametrize("call", ["cuInit", "cuDeviceGet", "cuMemGetInfo_v2"])
def test_a_driver_that_fails_is_told_with_its_number(call: str) -> None:
    with pytest.raises(DriverError, match=f"{call} gives error 803"):
        gpus_of(MadeUpDriver((GIB,), faults={call: 803}))


def test_what_the_program_prints_becomes_hardware() -> None:
    gpus = json.dumps({"gpus": [{"name": "one", "free_bytes": 5}]})
    assert _of_answer(gpus, 9).gpus == (Gpu(name="one", free_bytes=5),)
    broken = _of_answer(json.dumps({"problem": "cuInit gives error 3"}), 9)
    assert (broken.gpus, broken.problem) == ((), "cuInit gives error 3")


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        ("import os; os.abort()", "ends with -6"),
        ("import threading; threading.Event().wait()", "has not answered for 0.5 s"),
    ],
)
def test_a_driver_that_dies_or_hangs_is_a_problem_and_not_ours(program: str, problem: str) -> None:
    answer = _asked([sys.executable, "-c", program], seconds=60 if "abort" in program else 0.5)
    assert problem in _of_answer(answer, 9).problem


def test_without_a_driver_only_torch_knows_of_gpus_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "has_driver", lambda: False)
    root = machine(tmp_path, available_kib=1024, group="0::/\n")
    assert look_around("auto", root).gpus == ()
    (root / "dev").mkdir()
    (root / "dev" / "kfd").touch()
    assert look_around("auto", root).gpus is None
    assert look_around("cpu", root).gpus == ()


def test_gpus_that_only_torch_knows_are_seen_by_their_devices(tmp_path: Path) -> None:
    assert not _has_others(tmp_path)
    (tmp_path / "dev" / "dri").mkdir(parents=True)
    (tmp_path / "dev" / "dri" / "card0").touch()  # a server's screen
    assert not _has_others(tmp_path)
    (tmp_path / "dev" / "dri" / "renderD128").touch()
    assert _has_others(tmp_path)


@pytest.mark.parametrize(
    ("choice", "num_ranks", "hardware", "devices"),
    [
        ("cpu", 3, TWO_GPUS, ("cpu",) * 3),
        ("cpu", None, WHO_KNOWS, ("cpu",)),
        ("auto", None, NO_GPU, ("cpu",)),
        ("auto", 2, NO_GPU, ("cpu",) * 2),
        ("auto", None, TWO_GPUS, ("cuda:0", "cuda:1")),
        ("auto", 1, TWO_GPUS, ("cuda:0",)),
        ("cuda:1", 1, TWO_GPUS, ("cuda:1",)),
        ("cuda", 1, WHO_KNOWS, None),
        ("auto", 1, WHO_KNOWS, None),
    ],
)
def test_ranks_get_the_devices_that_are_there(
    choice: str, num_ranks: int | None, hardware: Hardware, devices: tuple[str, ...] | None
) -> None:
    assert likely_devices(choice, num_ranks, hardware) == devices


@pytest.mark.parametrize(
    ("choice", "num_ranks", "hardware", "words"),
    [
        ("cuda:7", 1, TWO_GPUS, "cuda:7 asked for, and this machine has 2"),
        ("cuda:2", 1, TWO_GPUS, "cuda:2 asked for, and this machine has 2"),
        ("cuda", 3, TWO_GPUS, "3 CUDA GPUs asked for, and this machine has 2"),
        ("auto", 3, TWO_GPUS, "3 CUDA GPUs asked for, and this machine has 2"),
        ("cuda", None, NO_GPU, "cuda asked for, and no CUDA GPU is usable here"),
        ("cuda", 2, NO_GPU, "2 CUDA GPUs asked for, and no CUDA GPU is usable here"),
        ("cuda:0", 2, TWO_GPUS, "2 ranks cannot share cuda:0"),
        ("gpu", 1, TWO_GPUS, "unknown device 'gpu'"),
    ],
)
def test_a_device_that_is_not_there_is_refused_with_what_is(
    choice: str, num_ranks: int | None, hardware: Hardware, words: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        likely_devices(choice, num_ranks, hardware)
    assert words in str(refused.value) and refused.value.next_step
    assert refused.value.exit_code == 78


def test_a_broken_driver_is_never_a_reason_to_train_on_the_cpu_in_silence() -> None:
    broken = Hardware(memory_bytes=GIB, gpus=(), problem="cuInit gives error 803")
    for choice in ("auto", "cuda"):
        with pytest.raises(ConfigError, match="cuInit gives error 803"):
            likely_devices(choice, 1, broken)
    assert likely_devices("cpu", 1, broken) == ("cpu",)


def machine(folder: Path, *, available_kib: int, group: str, **files: str) -> Path:
    """A root folder as the kernel shows one: memory, our control group, and files below it."""
    (folder / "proc" / "self").mkdir(parents=True)
    (folder / "proc" / "meminfo").write_text(
        f"MemTotal: 9 kB\nMemAvailable:   {available_kib} kB\nSwapFree: 3 kB\n"
    )
    (folder / "proc" / "self" / "cgroup").write_text(group)
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


def test_memory_without_limits_is_what_the_kernel_can_give(tmp_path: Path) -> None:
    root = machine(tmp_path, available_kib=2048, group="0::/\n")
    assert free_bytes(root) == 2 << 20
    assert look_around("cpu", root) == Hardware(memory_bytes=2 << 20, gpus=())


@pytest.mark.parametrize(
    ("limit", "used", "cached", "left"),
    [("5000", "3000", "100", 2100), ("5000", "7000", "0", 0), ("max", "3000", "0", 1 << 20)],
)
def test_a_containers_limit_counts_less_what_it_has_taken(
    tmp_path: Path, limit: str, used: str, cached: str, left: int
) -> None:
    group = "sys/fs/cgroup/pod/container"
    files = {
        f"{group}/memory.max": limit,
        f"{group}/memory.current": used,
        f"{group}/memory.stat": f"anon 17\ninactive_file {cached}\nactive_file 9\n",
    }
    root = machine(tmp_path, available_kib=1024, group="0::/pod/container\n", **files)
    assert free_bytes(root) == left


def test_the_tightest_limit_of_all_groups_around_us_counts(tmp_path: Path) -> None:
    files: dict[str, str] = {}
    for group, limit in (("pod/container", "900000"), ("pod", "600000")):
        files |= {
            f"sys/fs/cgroup/{group}/memory.max": limit,
            f"sys/fs/cgroup/{group}/memory.current": "1000",
            f"sys/fs/cgroup/{group}/memory.stat": "inactive_file 0\n",
        }
    root = machine(tmp_path, available_kib=1024, group="0::/pod/container\n", **files)
    assert free_bytes(root) == 599_000


@pytest.mark.parametrize(("limit", "left"), [("4000", 3500), ("9223372036854771712", 1 << 20)])
def test_limits_of_the_first_version_of_control_groups_count_too(
    tmp_path: Path, limit: str, left: int
) -> None:
    group = "sys/fs/cgroup/memory/docker/1a2b"
    files = {
        f"{group}/memory.limit_in_bytes": limit,
        f"{group}/memory.usage_in_bytes": "700",
        f"{group}/memory.stat": "cache 300\ntotal_inactive_file 200\n",
    }
    text = "9:name=systemd:/\n4:memory:/docker/1a2b\n0::/\n"
    assert free_bytes(machine(tmp_path, available_kib=1024, group=text, **files)) == left


IN_A_POD = "0::/pod/one\n"
IN_DOCKER = "4:cpu,cpuacct:/docker/1a2b\n0::/\n"


@pytest.mark.parametrize(
    ("group", "files", "cores"),
    [
        ("0::/\n", {}, 16),
        (IN_A_POD, {"pod/one/cpu.max": "max 100000", "pod/cpu.max": "max 100000"}, 16),
        (IN_A_POD, {"pod/one/cpu.max": "max 100000", "pod/cpu.max": "350000 100000"}, 4),
        (IN_A_POD, {"pod/one/cpu.max": "50000 100000"}, 1),
        (IN_A_POD, {"pod/one/cpu.max": "6400000 100000"}, 16),
        (IN_DOCKER, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 16),
        (IN_DOCKER, {"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2),
    ],
)
def test_ranks_take_no_more_threads_than_their_container_has_cores_worth_of_time(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    group: str,
    files: dict[str, str],
    cores: int,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))
    files = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    assert usable_cores(machine(tmp_path, available_kib=1024, group=group, **files)) == cores


def test_a_start_shares_the_cores_of_its_process_among_its_ranks_and_not_those_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(13)))
    monkeypatch.delenv("OMP_NUM_THREADS")
    threads: list[str] = []
    monkeypatch.setattr(cli, "_home_of", lambda role, folder: folder)
    monkeypatch.setattr(
        cli, "_run", lambda *settings, **how: threads.append(os.environ.pop("OMP_NUM_THREADS"))
    )
    assert not cli.start.main(["--dir", str(tmp_path), "--shard", "3"], standalone_mode=False)
    assert threads == ["4"]


@pytest.mark.parametrize(
    ("group", "folder"),
    [("0::/pod/one\n", "sys/fs/cgroup/pod"), ("3:pids:/pod/one\n0::/\n", "sys/fs/cgroup/pids/pod")],
)
def test_a_container_of_too_few_processes_is_told_before_grpc_aborts_in_it(
    tmp_path: Path, group: str, folder: str
) -> None:
    files = {f"{folder}/pids.max": "40", f"{folder}/pids.current": "17"}
    files |= {f"{folder}/one/pids.max": "max", f"{folder}/one/pids.current": "3"}
    root = machine(tmp_path, available_kib=1024, group=group, **files)
    require_processes(processes_for(0), of="the helper", root=root)
    with pytest.raises(SystemRefusedError, match="at least 24 processes and threads, and 23 more"):
        require_processes(processes_for(1), of="the node", root=root)


@pytest.mark.parametrize(("capabilities", "is_held"), [("0", True), ("1000000", False)])
def test_a_users_limit_counts_the_threads_of_all_its_processes_and_does_not_hold_root(
    tmp_path: Path, capabilities: str, is_held: bool
) -> None:
    own = f"Name:\tatoll\nUid:\t7\t7\t7\t7\nThreads:\t2\nCapEff:\t{capabilities}\n"
    files = {
        "proc/self/limits": "Limit    Soft Limit\nMax processes    30    30\n",
        "proc/self/status": own,
        "proc/100/status": own,
        "proc/101/status": "Uid:\t7\t7\t7\t7\nThreads:\t5\n",
        "proc/102/status": "Uid:\t8\t7\t7\t7\nThreads:\t900\n",  # another's
    }
    root = machine(tmp_path, available_kib=1024, group="0::/\n", **files)
    require_processes(processes_for(0), of="the helper", root=root)
    if not is_held:
        require_processes(processes_for(64), of="the node", root=root)
        return
    with pytest.raises(SystemRefusedError, match="at least 24 processes and threads, and 23 more"):
        require_processes(processes_for(1), of="the node", root=root)


@pytest.mark.parametrize("missing", ["Uid", "Threads"])
def test_a_sandbox_that_tells_less_of_processes_holds_nobody(tmp_path: Path, missing: str) -> None:
    lines = {"Name": "a\xff", "Uid": "7 7 7 7", "Threads": "2", "CapEff": "0"}
    told = "".join(f"{key}:\t{value}\n" for key, value in lines.items() if key != missing)
    root = machine(tmp_path, available_kib=1024, group="0::/\n")
    (root / "proc/self").mkdir(exist_ok=True)
    (root / "proc/self/limits").write_text("Max processes    30    30\n")
    for process in ("self", "100"):
        (root / "proc" / process).mkdir(exist_ok=True)
        (root / "proc" / process / "status").write_bytes(told.encode("latin-1"))
    require_processes(processes_for(1), of="the node", root=root)


def test_a_machine_that_limits_no_processes_has_enough(tmp_path: Path) -> None:
    require_processes(
        processes_for(64), of="the node", root=machine(tmp_path, available_kib=1, group="0::/\n")
    )
    require_processes(processes_for(64), of="the node", root=tmp_path / "without")
