"""Which mesh a node's ranks form, or why they cannot: said before torch is loaded, with the numbers.

Pure, but for a look at the run's own code. Asked twice: with what the system says of its devices
(node.machine.hardware), and with what torch says once it is there (node.assembly), which may be less.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from node.config import NodeSettings, has_snapshots
from node.island.data.opening import look_at_data
from node.island.data.places import refusal_without_a_loop
from node.island.models.code import check_functions
from node.island.parallel.auto_mesh import (
    Choice,
    DeviceKind,
    check_holds,
    check_memory,
    check_node_memory,
    choose,
    in_words,
    need_of,
    node_bytes,
)
from node.island.parallel.mesh_shape import (
    LocalTraining,
    MeshShape,
    check_batch,
    check_combination,
    check_local,
    check_shape,
)
from node.island.ranks.devices import check_offload, kind_of
from node.machine.hardware import Hardware, least_free_bytes, likely_devices
from node.models.reading import look_at_first
from node.outer_state import require_shared_memory
from protocol.errors import ConfigError, NoInputError
from protocol.files.durable import expanded
from protocol.run.models import DecoderModel, layout_of
from protocol.run.node_memory import helper_bytes
from protocol.run.run_spec import RunSpec

HELPER_PROCESS_BYTES = 350 << 20
"""A helper's daemon with its kernels loaded, and p2pd, without the state (docs/results/roles.jsonl)."""


def mesh_for(
    settings: NodeSettings, spec: RunSpec, *, devices: tuple[str, ...], bytes_per_rank: int
) -> Choice:
    """The mesh asked for, or the one that `auto` picks; raises ConfigError when it cannot work."""
    shape, kind = settings.mesh_shape, kind_of(devices)
    local, is_copied = _trained_on(kind, settings)
    if kind == "cpu":
        # The node itself shares that memory.
        bytes_per_rank = max(0, bytes_per_rank - node_bytes(spec) // len(devices))
    if settings.mesh == "auto":
        return choose(
            spec,
            num_ranks=len(devices),
            bytes_per_rank=bytes_per_rank,
            kind=kind,
            local=local,
            is_copied=is_copied,
        )
    check_offload(has_offload=shape.has_offload, kind=kind)
    check_memory(
        shape, spec, bytes_per_rank=bytes_per_rank, local=local, is_copied=is_copied, kind=kind
    )
    return Choice(shape=shape, reason="it is asked for")


def _trained_on(kind: DeviceKind, settings: NodeSettings) -> tuple[LocalTraining, bool]:
    """How ranks train there, and whether what checkpoints are written from is in the same memory."""
    local = settings.local_training
    if kind == "cpu" and local.precision == "auto":  # which never is a lower one there
        local = replace(local, precision="fp32")
    return local, kind == "cpu" and settings.checkpoint_every_rounds > 0


def training_bytes(settings: NodeSettings, spec: RunSpec, devices: Sequence[str]) -> int | None:
    """About what a rank takes of its device's memory; None where that is not known before it starts."""
    if settings.loop or settings.mesh == "auto" or not devices or spec.data.source == "loop":
        return None
    local, is_copied = _trained_on(kind_of(tuple(devices)), settings)
    return need_of(settings.mesh_shape, spec, local, is_copied=is_copied).num_bytes


def system_bytes(
    settings: NodeSettings, spec: RunSpec, devices: Sequence[str], shape: MeshShape
) -> int:
    """What ranks on GPUs take of the system's memory: what they offload, and write checkpoints from."""
    if kind_of(tuple(devices)) in ("cpu", "mps"):  # where all is in one memory
        return 0
    local = settings.local_training
    offloaded = need_of(shape, spec, local).offloaded
    copied = need_of(replace(shape, has_offload=False), spec, local).moments
    return len(devices) * (offloaded + (copied if settings.checkpoint_every_rounds else 0))


def _check_system_memory(
    settings: NodeSettings, spec: RunSpec, devices: Sequence[str], shape: MeshShape, free: int
) -> None:
    own, of_ranks = node_bytes(spec), system_bytes(settings, spec, devices, shape)
    if own + of_ranks <= free:
        return
    without = [
        *(["offload = false"] if shape.has_offload else []),
        *(["checkpoint_every_rounds = 0"] if settings.checkpoint_every_rounds else []),
    ]
    raise ConfigError(
        f"this node takes about {in_words(own + of_ranks)} of the system's memory, of which {in_words(free)} "
        f"are free: {in_words(own)} for the outer state, and {in_words(of_ranks)} that its ranks keep there",
        next_step=f"free memory, raise the container's limit, or set {' or '.join(without)} in node.toml",
    )


def parted_batch(spec: RunSpec, shape: MeshShape, local: LocalTraining) -> str:
    """Why this node trains another loss than the run file's; empty where it does not.

    A loss that compares samples of a batch sees those alone that go through a model together.
    """
    if spec.description is None or not spec.description.compares_samples:
        return ""
    share = spec.inner.batch // shape.num_data
    rows = min(share, local.micro_batch or share) // shape.pipeline
    if rows == spec.inner.batch:
        return ""
    return (
        f"the run's loss compares samples of a batch with each other, and here {rows} of {spec.inner.batch} "
        "go through the model together: it is another loss than where all do; remove micro_batch, copies "
        "and shards from node.toml, or have all nodes part their batches alike"
    )


COMPILES_FROM = 50_000_000
"""Parameters: on an H100 compiled layers of 85 million train 1.8 times as fast (docs/performance.md). What is
smaller may be done before half a minute of compiling has paid."""


def local_training_of(
    settings: NodeSettings,
    spec: RunSpec,
    shape: MeshShape,
    *,
    kind: DeviceKind,
    has_compilers: Callable[[], bool],
) -> LocalTraining:
    """What the ranks are told, with what "auto" comes to: only what was tried is compiled unasked."""
    local = settings.local_training
    if settings.compile != "auto" or kind != "cuda":
        return local
    compiled = replace(local, compile=True)
    is_own = isinstance(spec.model, DecoderModel) and spec.adapters is None
    is_known = is_own and spec.num_parameters >= COMPILES_FROM and not local.deterministic
    try:
        compiled.check()
        check_combination(shape, compiled)
    except ConfigError:
        return local
    return compiled if is_known and has_compilers() else local


def what_a_start_checks(
    folder: Path, settings: NodeSettings, spec: RunSpec, hardware: Hardware
) -> list[Callable[[], None]]:
    """Each of what 'atoll node start' looks at first raises AtollError, with what its owner may do.

    All of it is seen in a moment: the seconds that torch, kernels and ranks take come after it.
    """
    checks: list[Callable[[], None]] = [
        lambda: refuse_what_cannot_work(settings, spec, hardware),
        lambda: require_shared_memory(layout_of(spec)),
    ]
    if settings.weights and not has_snapshots(folder):  # else they are not read
        checks.append(lambda: look_at_first(expanded(settings.weights), spec))
    if not settings.loop:  # else nothing here runs the run's code, or reads its data
        if spec.data.source == "loop":
            return checks[:1]  # of which that is the answer
        code = settings.code_folder(Path.cwd())
        checks.insert(0, lambda: check_functions(spec, allowed=settings.allow_functions, code=code))
        places = settings.data_places(home=folder, folder=Path.cwd())
        checks.append(lambda: look_at_data(spec, places))
    return checks


def refuse_what_cannot_work(settings: NodeSettings, spec: RunSpec, hardware: Hardware) -> None:
    """Raises ConfigError for a mesh, a device or a memory with which this run cannot be trained.

    Where only torch can tell what the devices are, the mesh alone is looked at.
    """
    if settings.loop:  # how it trains, and in which memory, is its program's business
        check_node_memory(spec, hardware.memory_bytes)
        return
    if spec.data.source == "loop":
        raise refusal_without_a_loop(spec)
    shape = settings.mesh_shape
    if spec.adapters is not None and not settings.base:
        raise NoInputError(
            f"run {spec.run.name!r} adapts a model that each node has, and node.toml does not say where",
            next_step='write base = "FOLDER" into node.toml, the transformers folder of that model, or start '
            "with --base FOLDER",
        )
    check_local(spec, settings.local_training)
    if settings.mesh == "sizes":
        check_shape(shape, spec)
        check_batch(shape, spec)
        check_combination(shape, settings.local_training)
    check_node_memory(spec, hardware.memory_bytes)
    devices = likely_devices(settings.device, num_ranks_of(settings), hardware)
    if devices is None:
        return
    on_cpu = kind_of(devices) == "cpu"
    choice = mesh_for(
        settings,
        spec,
        devices=devices,
        bytes_per_rank=hardware.memory_bytes // len(devices)
        if on_cpu
        else least_free_bytes(devices, hardware),
    )
    _check_system_memory(settings, spec, devices, choice.shape, hardware.memory_bytes)


def refuse_small_helper(spec: RunSpec, hardware: Hardware) -> None:
    """Raises ConfigError where a helper that reduces alone would not fit into the machine's memory.

    Of contributions it counts those of as many nodes as a round opens with.
    """
    exchange = spec.exchange
    need = HELPER_PROCESS_BYTES + helper_bytes(
        num_elements=spec.num_parameters,
        largest_fragment=layout_of(spec).largest_fragment,
        num_contributions=spec.run.min_nodes,
        keeps_error=exchange.reducer_error == "keep",
        uplink=exchange.uplink,
        downlink=exchange.downlink,
        is_audited=spec.outer.audit > 0,
    )
    check_holds(spec, need, hardware.memory_bytes)


def num_ranks_of(settings: NodeSettings) -> int | None:
    """How many devices to take of this machine; None for all that there are."""
    is_given = settings.mesh == "sizes" or settings.mesh_shape.num_ranks > 1
    return settings.ranks_here if is_given else None


def may_need_compiler(settings: NodeSettings, hardware: Hardware) -> bool:
    """Whether ranks may load torch's compiler: those that compile, compute again or share a model do."""
    devices = likely_devices(settings.device, num_ranks_of(settings), hardware)
    if devices is None or len(devices) > 1 or settings.hosts > 1:
        return True
    may_compile = settings.compile is True or (
        settings.compile == "auto" and kind_of(devices) == "cuda"
    )
    return may_compile or settings.activation_checkpointing != "none"
