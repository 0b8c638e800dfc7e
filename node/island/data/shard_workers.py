"""Processes that write shards, and the receipts by which a preparation that was ended goes on."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from node.island.data.manifest import State, check_pieces, check_sizes
from node.island.data.shard_writing import Encoding, Receipt, ShardJob, write_shard
from protocol.errors import AtollError, SystemRefusedError
from protocol.files.durable import sync_folder, write_atomically

_POLL_SECONDS = 0.5


def write_all(
    work: Path,
    jobs: Sequence[ShardJob],
    encoding: Encoding,
    num_processes: int,
    on_state: Callable[[State], None],
) -> list[Receipt]:
    """Has processes write the shards that are not there yet."""
    receipts = {job.number: _receipt_of(work, job) for job in jobs}
    left = [job for job in jobs if receipts[job.number] is None]
    total = sum(job.num_bytes for job in jobs)
    resumed = total - sum(job.num_bytes for job in left)
    on_state(State(done_bytes=resumed, total_bytes=total, resumed_bytes=resumed))
    context = multiprocessing.get_context("spawn")
    counter = context.Value("Q", 0)
    pool = ProcessPoolExecutor(
        max(1, min(num_processes, len(left))),
        mp_context=context,
        initializer=_begin_worker,
        initargs=(counter,),
    )
    try:
        futures: dict[Future[Receipt], ShardJob] = {
            pool.submit(_write_one, job, encoding, work): job for job in left
        }
        waiting = set(futures)
        while waiting:
            done, waiting = wait(waiting, timeout=_POLL_SECONDS, return_when=FIRST_COMPLETED)
            for future in done:
                receipts[futures[future].number] = future.result()
            on_state(
                State(done_bytes=resumed + counter.value, total_bytes=total, resumed_bytes=resumed)
            )
    except BrokenProcessPool as error:
        raise SystemRefusedError(
            "a process that writes shards has ended by itself; the machine may be out of memory",
            next_step="type the same again with fewer --jobs: it goes on from the finished shards",
        ) from error
    except BaseException:
        _end_workers(pool)
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    return [receipt for _, receipt in sorted(receipts.items()) if receipt is not None]


def _end_workers(pool: ProcessPoolExecutor) -> None:
    # They hold nothing that is not begun anew; Python 3.14 has terminate_workers for it.
    for process in list((pool._processes or {}).values()):
        process.terminate()


_counter: Any = None  # of a worker: bytes of input that all have read


def _begin_worker(counter: Any) -> None:
    global _counter
    _counter = counter
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which then ends us
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(0)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _tell(num_bytes: int) -> None:
    with _counter.get_lock():
        _counter.value += num_bytes


def _write_one(job: ShardJob, encoding: Encoding, work: Path) -> Receipt:
    receipt = write_shard(job, encoding, work, _tell)
    sync_folder(work)
    write_atomically(receipt_path(work, job.number), receipt.model_dump_json().encode())
    return receipt


def receipt_path(work: Path, number: int) -> Path:
    """Where a finished job says what it has written."""
    return work / f"{number:05}.receipt"


def _receipt_of(work: Path, job: ShardJob) -> Receipt | None:
    """The receipt of a finished job whose files are as it says."""
    path = receipt_path(work, job.number)
    if not path.exists():
        return None
    try:
        receipt = Receipt.model_validate_json(path.read_bytes())
        check_sizes(work, receipt.files)
        for name, entry in receipt.files.items():
            check_pieces(work / name, entry)
    except (AtollError, ValueError):
        return None  # it is written again
    return receipt
