"""Training loops without Atoll: the same model, batches and optimizer, as torch's own users write them.

Ranks are forked like Atoll's, so both run on the same libraries with the same number of threads. What
compares them is in benchmarks/island.
"""

import contextlib
import multiprocessing
import os
import statistics
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from node.island.data.dataset import SampleOrder, read_corpus
from node.island.models.architecture import copy_parameters
from node.island.models.decoder_modules import Decoder, Objective
from node.island.models.first_weights import initial_parameters
from node.island.parallel.mesh_shape import LocalTraining
from node.island.training.optimizers import inner_optimizers
from protocol.run.models import layout_of
from protocol.run.run_spec import RunSpec

Kind = Literal["plain", "ddp", "fsdp2"]

PATIENCE_SECONDS = 600.0  # for a hang only
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSetup:
    """What a rank of a loop is told."""

    kind: Kind
    spec: RunSpec
    rank: int
    num_ranks: int
    device: str
    num_threads: int
    local: LocalTraining
    folder: Path
    meeting: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Some inner steps in a row."""

    first_sample: int
    inner_steps: int


class Loop:
    """Ranks of a plain training loop, asked for some steps at a time."""

    def __init__(
        self,
        kind: Kind,
        spec: RunSpec,
        devices: tuple[str, ...],
        local: LocalTraining,
        folder: Path,
        meeting: Path,
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        self._members = []
        for rank, device in enumerate(devices):
            ours, theirs = context.Pipe()
            setup = LoopSetup(
                kind=kind,
                spec=spec,
                rank=rank,
                num_ranks=len(devices),
                device=device,
                num_threads=1,
                local=local,
                folder=folder,
                meeting=meeting,
            )
            process = context.Process(target=run_loop, args=(theirs, setup), daemon=True)
            process.start()
            theirs.close()
            self._members.append((process, ours))
        for _, pipe in self._members:
            _received(pipe)  # it is ready

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Of its ranks."""
        return tuple(process.pid or 0 for process, _ in self._members)

    def train(self, chunk: Chunk) -> float:
        """Takes the steps; returns the mean loss of all ranks' samples."""
        for _, pipe in self._members:
            pipe.send(chunk)
        return statistics.mean([_received(pipe) for _, pipe in self._members])

    def close(self) -> None:
        """Ends the ranks."""
        for process, pipe in self._members:
            pipe.close()
            process.join()


def _received(pipe: "Connection[Chunk, float]") -> float:
    if not wait([pipe], timeout=PATIENCE_SECONDS):
        raise TimeoutError("a loop without Atoll hangs")
    return pipe.recv()


def run_loop(pipe: "Connection[float, Chunk]", setup: LoopSetup) -> None:
    """The life of a rank of a loop; it ends with the pipe."""
    torch.set_num_threads(setup.num_threads)
    device = torch.device(setup.device)
    spec, inner = setup.spec, setup.spec.inner
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if setup.num_ranks > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group(
            backend="nccl" if device.type == "cuda" else "gloo",
            store=dist.FileStore(str(setup.meeting), setup.num_ranks),  # type: ignore[attr-defined]  # is public
            rank=setup.rank,
            world_size=setup.num_ranks,
            device_id=device if device.type == "cuda" else None,
        )
    corpus = read_corpus(
        spec.data, context=spec.model.context, batch=inner.batch, folder=setup.folder
    )
    order = SampleOrder(seed=spec.run.seed, num_samples=corpus.num_samples)
    decoder = Decoder(spec.decoder)
    copy_parameters(decoder, layout_of(spec), initial_parameters(spec))
    decoder.to(device)
    dtype = _DTYPES[setup.local.precision]
    if setup.local.compile:
        for layer in decoder.model.layers.values():
            layer.compile()
    trained = _wrapped(setup.kind, decoder, device, dtype)
    optimizers = inner_optimizers(decoder, inner)
    share = inner.batch // setup.num_ranks
    pipe.send(0.0)
    with contextlib.suppress(EOFError):
        while True:
            chunk = pipe.recv()
            loss_sum = torch.zeros((), device=device)
            for step in range(chunk.inner_steps):
                indices = order.indices(chunk.first_sample + step * inner.batch, inner.batch)
                own = indices[setup.rank * share : (setup.rank + 1) * share]
                windows = torch.from_numpy(corpus.windows(corpus.training, own)).to(device)
                with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
                    loss: Tensor = trained(windows[:, :-1], windows[:, 1:])
                loss.backward()  # type: ignore[no-untyped-call]
                nn.utils.clip_grad_norm_(decoder.parameters(), inner.clip)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
                loss_sum += loss.detach()
            pipe.send(loss_sum.item() / chunk.inner_steps)


def _wrapped(kind: Kind, decoder: Decoder, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The loss as a module, with its gradients averaged over the ranks."""
    objective = Objective(decoder)
    match kind:
        case "plain":
            return objective
        case "ddp":
            ids = [device.index] if device.type == "cuda" else None
            return DistributedDataParallel(
                objective, device_ids=ids, broadcast_buffers=False, gradient_as_bucket_view=True
            )
        case "fsdp2":
            policy = MixedPrecisionPolicy(
                param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32
            )
            for layer in (*decoder.model.layers.values(), decoder):
                fully_shard(layer, mp_policy=policy)
            return objective
