"""What optimizers have learnt of gradients, kept in the node's folder from one start of a loop to the next.

An optimizer that begins anew takes other steps than one whose second moments remember a thousand steps: of a
model that has nearly learnt its data twenty times as far, which the swarm leaves out for rounds. A rise of
the learning rate only puts that off.

Weights are not here: of copies of them, as fp32 masters, only how far they are from the model's. Nor are
learning rates, which are the loop's own.
"""

import logging
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from atoll.log_file import LoopLog
from atoll.optimizers import Optimizers, is_apart
from atoll.ranks import Ranks
from atoll.weights import local_of

FOLDER = "loop-optimizer"

VERSION = 1

LEAST_SECONDS = 60.0
"""Between two times that they are kept."""

MOST_SHARE = 0.02
"""Of the loop's time that keeping them may take."""

BYTES_PER_SECOND = 40e6
"""That are written on average at most, as a node's own checkpoints: an SSD endures so much for years."""

OF_SCHEDULES = frozenset(
    {"lr", "initial_lr", "max_lr", "min_lr", "swa_lr", "max_momentum", "base_momentum"}
)
"""What schedulers write into groups: rates, and between what they move them."""

MOVED_BY_SCHEDULES = frozenset({"momentum", "betas"})
"""What OneCycleLR and CyclicLR move as well, and no optimizer itself."""

Group = dict[str, Any]
Parts = list[dict[str, Any]]


class _UnfitError(Exception):
    """Why a state cannot be kept; without words where there is none."""


class Moments:
    """The state of all optimizers that `join` was given, in one file for each rank."""

    def __init__(self, folder: Path, *, optimizers: Optimizers, ranks: Ranks, log: LoopLog) -> None:
        self._path = folder / FOLDER / f"rank-{ranks.rank}-of-{ranks.world_size}.pt"
        self._optimizers = optimizers
        self._ranks = ranks
        self._log = log
        self._kept = optimizers.given
        self._began = [_groups_of(each) for each in self._kept]
        self._due_at = 0.0
        self._told = ""  # why they were not kept, the last time
        self.why_not = ""
        """Why those that are in the folder were not taken up."""

    def take_up(self, weights: Mapping[str, Tensor], run_digest: str) -> bool:
        """Lets optimizers that have no state yet go on from what was kept, on all ranks or on none."""
        kept, self.why_not = self._read(weights, run_digest)
        stamp = (0, 0) if kept is None else (kept["round"], kept["steps"])
        if stamp != self._ranks.same_for_all(stamp):
            kept, self.why_not = None, "ranks have kept theirs at different steps"
        if self._ranks.said_by_any(float(kept is None)) or kept is None:
            return False
        for each, part in zip(self._kept, kept["optimizers"], strict=True):
            self._install(each, part, weights)
        self._began = [part["began"] for part in kept["optimizers"]]
        self._log.tell(
            logging.INFO,
            "the optimizer goes on from the state that was kept",
            kept_at_round=stamp[0],
            path=str(self._path),
        )
        return True

    def is_due(self, now: float) -> bool:
        """Whether it is time to keep them, on all ranks."""
        return bool(self._ranks.said_by_first(lambda: now >= self._due_at))

    def keep(
        self, weights: Mapping[str, Tensor], run_digest: str, *, round: int, steps: int
    ) -> None:
        """Writes the file anew. A disk that does not take it costs that and no training, and is told once.

        A state that is more than tensors and numbers, or holds what is none, is not kept. What was kept
        before goes then: the next start would take it for what the optimizer knows now.
        """
        began_at = time.monotonic()
        num_bytes = 0
        stamp = {"version": VERSION, "run": run_digest, "round": round, "steps": steps}
        try:
            try:
                num_bytes = _write(self._path, {**stamp, "optimizers": self._parts(weights)})
                self._remove_those_of_other_starts()
            except _UnfitError as unfit:
                self._remove(str(unfit))
        except OSError as error:
            begins = "goes on from an older one" if self._path.is_file() else "begins with none"
            self._tell(
                f"the optimizer's state could not be kept in {self._path} ({error}): a loop that starts "
                f"again {begins}. Make room there",
                why=str(error),
            )
        now = time.monotonic()
        rest = max((now - began_at) / MOST_SHARE, num_bytes / BYTES_PER_SECOND, LEAST_SECONDS)
        self._due_at = now + rest

    def _remove(self, why: str) -> None:
        """Removes what was kept, and tells why, unless there was never anything to keep."""
        had_any = self._path.exists()
        self._path.unlink(missing_ok=True)
        if why or had_any:
            why = why or "it has none now"
            removed = "; what was kept before is removed" * had_any
            self._tell(
                f"the optimizer's state is not kept ({why}){removed}: a loop that "
                "starts again begins with none",
                why=why,
            )

    def _remove_those_of_other_starts(self) -> None:
        """What more or fewer ranks have kept is older than this, and must not be taken up after it."""
        for path in self._path.parent.glob("rank-*-of-*.pt") if self._ranks.rank == 0 else ():
            if not path.stem.endswith(f"-of-{self._ranks.world_size}"):
                path.unlink(missing_ok=True)

    def _tell(self, words: str, *, why: str) -> None:
        if why != self._told:
            self._told = why
            self._log.tell(logging.WARNING, words)

    def _parts(self, weights: Mapping[str, Tensor]) -> Parts:
        """What is kept. Raises _UnfitError, without words where there is nothing."""
        names = {id(tensor): name for name, tensor in weights.items()}
        parts: Parts = []
        for each, began in zip(self._kept, self._began, strict=True):
            states: dict[str, dict[str, Any]] = {}
            for group in each.param_groups:
                for parameter in group["params"]:
                    state = each.state.get(parameter)
                    if state and (name := names.get(id(parameter))) is not None:
                        values = {
                            k: self._kept_of(f"{k} of {name}", k, v, parameter)
                            for k, v in state.items()
                        }
                        states[name] = {"shape": list(local_of(parameter).shape), "state": values}
            groups = _groups_of(each)
            for key in (k for group in groups for k, v in group.items() if _is_no_number(v)):
                raise _UnfitError(f"{key} of a group is no number")
            told = {"kind": _kind_of(each), "began": began, "groups": groups}
            parts.append({**told, "states": states})
        if not any(part["states"] for part in parts):
            raise _UnfitError
        return parts

    def _kept_of(self, what: str, key: str, value: Any, parameter: Tensor) -> dict[str, Any]:
        """One value of a state. Raises _UnfitError for what is not kept."""
        if not isinstance(value, Tensor):
            if not _is_simple(value):
                raise _UnfitError(
                    f"{what} is of type {type(value).__name__}, no tensor and no number"
                )
            if _is_no_number(value):
                raise _UnfitError(f"{what} is no number")
            return {"plain": value}
        from torch.distributed.tensor import DTensor

        is_sharded = isinstance(value, DTensor)
        if type(value) not in (Tensor, nn.Parameter) and not is_sharded:
            raise _UnfitError(f"{what} is of type {type(value).__name__}, no plain tensor")
        local = local_of(value)
        is_copy = key in self._optimizers.copies and is_apart(value, parameter)
        if is_copy:
            local = local - local_of(parameter).to(local)
        if local.is_floating_point() and not bool(local.isfinite().all()):
            raise _UnfitError(f"{what} has values that are no finite numbers")
        return {
            "values": local.to("cpu", copy=True).contiguous(),
            "is_copy": is_copy,
            "is_of_the_cpu": local.device.type == "cpu",
            "is_sharded": is_sharded,
        }

    def _read(
        self, weights: Mapping[str, Tensor], run_digest: str
    ) -> tuple[dict[str, Any] | None, str]:
        if not self._path.exists():
            return None, ""
        try:
            kept = torch.load(self._path, map_location="cpu", weights_only=True)
            is_readable = kept["version"] == VERSION
        except Exception as error:  # whatever a damaged file makes torch raise
            return None, f"it cannot be read ({type(error).__name__})"
        if not is_readable:
            return None, "another version of Atoll has written it"
        if kept["run"] != run_digest:
            return None, "it is of another run"
        why = self._why_not(kept["optimizers"], weights)
        return None if why else kept, why

    def _why_not(self, parts: Parts, weights: Mapping[str, Tensor]) -> str:
        """Why a state does not fit these optimizers; empty where it does."""
        kinds, own = [part["kind"] for part in parts], [_kind_of(each) for each in self._kept]
        if kinds != own:
            return f"it is of {' and '.join(kinds)}, and this loop has {' and '.join(own)}"
        for part, began in zip(parts, self._began, strict=True):
            if len(part["began"]) != len(began):
                return "the optimizer has other groups of parameters"
            for was, now in zip(part["began"], began, strict=True):
                for key in (was.keys() | now.keys()) - OF_SCHEDULES:
                    if not _are_alike(was.get(key), now.get(key)):
                        return f"{key} is {now.get(key)}, and was {was.get(key)}"
            for name, kept in part["states"].items():
                if name not in weights or kept["shape"] != list(local_of(weights[name]).shape):
                    return f"it has another {name}"
        return ""

    @torch.no_grad()
    def _install(self, optimizer: Any, part: dict[str, Any], weights: Mapping[str, Tensor]) -> None:
        for name, kept in part["states"].items():
            parameter = weights[name]
            optimizer.state[parameter] = {
                key: told["plain"] if "plain" in told else self._made_of(key, told, parameter)
                for key, told in kept["state"].items()
            }
        for group, began, then in zip(
            optimizer.param_groups, part["began"], part["groups"], strict=True
        ):
            # What the optimizer itself has changed, as counts of steps; else the loop's word counts.
            own = then.keys() - OF_SCHEDULES - MOVED_BY_SCHEDULES
            group.update({k: then[k] for k in own if then[k] != began.get(k) == group.get(k)})

    def _made_of(self, key: str, told: dict[str, Any], parameter: Tensor) -> Tensor:
        values: Tensor = told["values"]
        if told["is_copy"]:
            self._optimizers.copies.add(key)
            values = values + local_of(parameter).to(values)
        if told["is_sharded"]:
            whole = torch.empty_like(parameter, dtype=values.dtype, requires_grad=False)
            local_of(whole).copy_(values)
            return whole
        return values if told["is_of_the_cpu"] else values.to(parameter.device)


def _write(path: Path, kept: dict[str, Any]) -> int:
    """Puts it in the place of what was there; returns how many bytes it has."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    new = path.with_suffix(".new")
    try:
        new.touch(mode=0o600)
        with new.open("wb") as file:
            torch.save(kept, file)
            file.flush()
            os.fsync(file.fileno())
        num_bytes = new.stat().st_size
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
    return num_bytes


def _kind_of(optimizer: Any) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _groups_of(optimizer: Any) -> list[Group]:
    """What groups say beside parameters and schedules."""
    return [
        {k: v for k, v in group.items() if k not in ("params", *OF_SCHEDULES) and _is_plain(v)}
        for group in optimizer.param_groups
    ]


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return _is_simple(value)


def _is_simple(value: Any) -> bool:
    return value is None or type(value) in (bool, int, float, str)


def _is_no_number(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _are_alike(was: Any, now: Any) -> bool:
    """Whether a state fits both: another number does, and another kind of optimizer (AMSGrad) does not."""
    return was == now or (type(was) is type(now) is not bool and bool(was) == bool(now))
