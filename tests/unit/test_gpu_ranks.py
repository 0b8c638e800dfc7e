"""What a rank does for a GPU, as far as a machine without one can show it."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 — its usual name
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from node.island.models.decoder_modules import for_each_head
from node.island.parallel import mesh
from node.island.parallel.mesh import Box, Held, Mesh, blend_boxes, rebase_boxes
from node.island.parallel.mesh_shape import MeshShape
from node.island.parallel.modules import GradientClipping
from node.island.ranks import accelerator, forkserver, rank
from node.island.ranks.accelerator import Pair, bind_to_near_cores, cores_of, dtype_of
from node.island.ranks.commands import MeetingPoint
from node.island.ranks.faults import OutOfMemoryError, RankFailedError
from node.island.training.trainer import LOOK_SECONDS, steps_until_next_look
from protocol.errors import ConfigError, ExitCode
from protocol.run.models import TensorPlace
from protocol.run.run_spec import RunSpec
from tests.run_functions import failing

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")


@pytest.mark.parametrize(
    ("listed", "cores"),
    [("0-3\n", {0, 1, 2, 3}), ("0-1,8,10-11", {0, 1, 8, 10, 11}), ("\n", set()), ("5", {5})],
)
def test_the_kernels_lists_of_cores_are_read(listed: str, cores: set[int]) -> None:
    assert cores_of(listed) == cores


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """What a rank was bound to; it may use cores 2 to 5, and its GPU is 0001:1a:00.0."""
    bound: list[set[int]] = []
    place = SimpleNamespace(pci_domain_id=1, pci_bus_id=0x1A, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: place)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 3, 4, 5})
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: bound.append(set(cores)))
    return bound


def near(root: Path, cores: str) -> None:
    folder = root / "sys/bus/pci/devices/0001:1a:00.0"
    folder.mkdir(parents=True)
    (folder / "local_cpulist").write_text(cores)


def test_a_rank_stays_on_the_cores_next_to_its_gpu(tmp_path: Path, bound: list[set[int]]) -> None:
    near(tmp_path, "0-3\n")
    bind_to_near_cores(GPU, tmp_path)
    assert bound == [{2, 3}]


def test_a_rank_is_not_bound_where_no_near_core_is_its_to_use(
    tmp_path: Path, bound: list[set[int]]
) -> None:
    bind_to_near_cores(GPU, tmp_path)  # the kernel does not say
    near(tmp_path, "8-15\n")
    bind_to_near_cores(GPU, tmp_path)
    bind_to_near_cores(CPU, tmp_path)
    assert bound == []


def test_tf32_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="has no TF32"):
        dtype_of("tf32", CPU)
    monkeypatch.setattr(accelerator, "name_of", lambda device: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(ConfigError, match=r"Tesla T4 .*has no TF32"):
        dtype_of("tf32", GPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert dtype_of("tf32", GPU) == torch.float32


class JoinedError(Exception):
    """The process group would be joined now."""


@pytest.mark.parametrize(
    ("meeting", "interface"),
    [
        (Path("store"), "lo"),
        (MeetingPoint(host="10.0.0.1", port=1, interface="eth7", num_hosts=2), "eth7"),
    ],
)
def test_collectives_meet_on_loopback_or_on_the_islands_link_alone(
    meeting: Path | MeetingPoint, interface: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "any")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "any")
    monkeypatch.setattr(mesh, "_store_at", lambda meeting, num_ranks: None)

    def stop(**options: object) -> None:
        raise JoinedError

    monkeypatch.setattr(dist, "init_process_group", stop)
    with pytest.raises(JoinedError):
        Mesh.joined(shape=MeshShape(replicate=2), rank=0, device=CPU, meeting=meeting)
    assert os.environ["GLOO_SOCKET_IFNAME"] == os.environ["NCCL_SOCKET_IFNAME"] == interface


def test_a_group_of_gloo_is_made_by_its_members_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else those who are no members would split NCCL's group, and wait for members who do not."""
    asked: list[tuple[list[int], Any]] = []

    def new_group(ranks: list[int], *, backend: str | None, use_local_synchronization: bool) -> str:
        asked.append((ranks, use_local_synchronization))
        return "group"

    monkeypatch.setattr(dist, "new_group", new_group)
    four = Mesh(shape=MeshShape(replicate=4), rank=3, num_hosts=2)
    assert four.new_host_group() is not None
    assert asked == [([0, 1], True), ([2, 3], True)]
    assert four.new_group("replicate") is not None
    assert asked[2:] == [([0, 1, 2, 3], False)]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. If reserved but …"),
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_too_little_memory_is_no_bug_and_says_what_takes_less(error: Exception) -> None:
    setup: Any = SimpleNamespace(rank=2, device="cuda:2")
    said = rank._as_people_see_it(error, setup)
    assert isinstance(said, OutOfMemoryError) and said.exit_code == ExitCode.SYSTEM
    assert "rank 2 has no memory left on cuda:2" in str(said)
    assert "micro_batch = 1" in str(said) and "report it" not in str(said)


def test_another_error_of_a_rank_is_a_bug() -> None:
    setup: Any = SimpleNamespace(rank=0, device="cpu")
    said = rank._as_people_see_it(RuntimeError("shapes differ"), setup)
    assert isinstance(said, RankFailedError)
    assert "report it" in str(said)


def failure_of(call: Callable[[], object]) -> Exception:
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("it did not fail")


def test_an_error_of_a_runs_own_code_is_its_owners_and_no_bug_of_atoll() -> None:
    of_a_function = RunSpec.model_validate(
        {"model": {"source": "function", "function": "tests.run_functions:net"}}
    )
    setup: Any = SimpleNamespace(rank=1, device="cpu", spec=of_a_function)
    own = failure_of(failing)
    said = rank._as_people_see_it(own, setup)
    assert isinstance(said, ConfigError)
    assert "own code failed on rank 1: ZeroDivisionError: at depth 1 (run_functions.py" in said.what
    nothing: Any = "nothing"
    ours = failure_of(lambda: Mesh(shape=MeshShape(replicate=4), rank=3).new_group(nothing))
    assert isinstance(rank._as_people_see_it(ours, setup), RankFailedError), "it passed Atoll last"
    without: Any = SimpleNamespace(rank=1, device="cpu", spec=RunSpec())
    assert isinstance(rank._as_people_see_it(own, without), RankFailedError)


def test_grouped_heads_in_fp32_on_a_gpu_are_repeated_for_its_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q = torch.empty(2, 6, 5, 4, device="meta")
    k = v = torch.empty(2, 2, 5, 4, device="meta")
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: False)
    assert [each.shape for each in for_each_head(k, v, q)] == [q.shape, q.shape]
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: True)
    assert for_each_head(k, v, q)[0] is k  # half precision has kernels for grouped heads
    on_cpu = torch.ones(2, 2, 5, 4)
    assert for_each_head(on_cpu, on_cpu, torch.ones(2, 6, 5, 4))[0] is on_cpu


def test_repeated_heads_attend_as_grouped_ones_do() -> None:
    q, k, v = torch.randn(1, 6, 5, 4), torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4)
    grouped = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    each_k, each_v = (each.repeat_interleave(3, dim=1) for each in (k, v))
    torch.testing.assert_close(
        F.scaled_dot_product_attention(q, each_k, each_v, is_causal=True), grouped
    )


def held_elsewhere() -> Held:
    place = TensorPlace(name="weight", shape=(2, 3), offset=0, num_elements=6)
    box = Box(place=place, start=(0, 0), size=(2, 3))
    return Held(box=box, local=torch.empty(2, 3, device="meta"), publishes=True)


def test_blending_and_rebasing_on_a_gpu_go_through_its_pinned_buffers() -> None:
    copied: list[tuple[str, str]] = []

    def copies(pairs: Iterable[Pair]) -> None:
        copied.extend((target.device.type, source.device.type) for target, source in pairs)

    ones = np.ones(6, dtype=np.float32)
    whole = slice(0, 6)
    blend_boxes([held_elsewhere()], ones, whole, local_share=0.5, copies=copies)
    assert copied == [("meta", "cpu")]
    rebase_boxes([held_elsewhere()], ones, ones, whole, copies=copies)
    assert copied == [("meta", "cpu")] * 3


def test_ranks_agree_on_whether_to_go_on_a_few_times_a_second_and_in_time() -> None:
    assert steps_until_next_look(60.0, per_step=LOOK_SECONDS / 20, num_ranks=2) == 20
    assert steps_until_next_look(60.0, per_step=5.0, num_ranks=2) == 1
    assert steps_until_next_look(LOOK_SECONDS / 4, per_step=LOOK_SECONDS / 20, num_ranks=2) == 5
    assert steps_until_next_look(60.0, per_step=0.0, num_ranks=2) == 1
    assert steps_until_next_look(60.0, per_step=1e-6, num_ranks=1) == 1


def test_clipping_puts_no_new_tensor_onto_the_device_in_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(str(tmp_path / "store"), 1)  # type: ignore[attr-defined]  # is public
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        devices = init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
        weights = [
            torch.nn.Parameter(distribute_tensor(torch.ones(3), devices, [Replicate()]))
            for _ in range(2)
        ]
        clip = GradientClipping(weights, mesh=Mesh(shape=MeshShape(has_offload=True)))

        def clipped() -> Tensor:
            for weight in weights:
                weight.grad = distribute_tensor(torch.full((3,), 2.0), devices, [Replicate()])
            return clip(1.0)

        first = clipped()
        assert first.item() == pytest.approx(24**0.5)
        made: list[object] = []
        monkeypatch.setattr(torch, "tensor", lambda *values, **options: made.append(values))
        assert torch.equal(clipped(), first)
        assert made == []
    finally:
        dist.destroy_process_group()


def test_ranks_allocate_by_segments_that_grow_unless_their_owner_says_how(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("multiprocessing.forkserver._forkserver.ensure_running", lambda: None)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    os.environ.pop("PYTORCH_ALLOC_CONF", None)
    forkserver.prepare_forkserver()
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert os.environ["TEARDOWN_CUPTI"] == "1"
    del os.environ["PYTORCH_ALLOC_CONF"]
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "backend:cudaMallocAsync"
    forkserver.prepare_forkserver()
    assert "PYTORCH_ALLOC_CONF" not in os.environ
