"""Results on disk are what a commit names, or nothing."""

from pathlib import Path

import numpy as np
import pytest

from node.disk.history import ResultLog
from protocol.errors import CannotCreateError
from protocol.wire.payload import Payload
from protocol.wire.rounds import BLOCK, Digest
from tests.unit.exchange_scene import A, B, result_of


def result_at(round: int, index: int = 0) -> Payload:
    values = np.arange(BLOCK, dtype=np.float32) * (round + 10 * index)
    return result_of(values, sender_id=(A, B)[index], round=round, index=index)


def found(log: ResultLog, payload: Payload) -> Payload | None:
    return log.find(payload.header.round, payload.header.slice_index, payload.digest)


def test_each_result_comes_back_to_the_bit_and_only_by_its_digest(tmp_path: Path) -> None:
    log = ResultLog(tmp_path / "results")
    first, second = result_at(3), result_at(3, 1)
    log.write(3, [first, second])
    assert log.folder.held_bytes() > 2 * 4 * BLOCK
    assert (found(log, first), found(log, second)) == (first, second)
    assert log.find(3, 0, second.digest) is None
    assert log.find(3, 2, first.digest) is None
    assert log.find(4, 0, first.digest) is None
    assert found(ResultLog(tmp_path / "nowhere"), first) is None


def test_a_flipped_byte_anywhere_is_found(tmp_path: Path) -> None:
    log = ResultLog(tmp_path)
    payload = result_at(1)
    log.write(1, [payload])
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    header_end = len(content) - len(payload.body)
    for place in (*range(header_end), *range(header_end, len(content), 997), len(content) - 1):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert found(log, payload) is None, place
    for end in (0, 3, 8, 10, header_end - 1, header_end, len(content) - 1):
        path.write_bytes(content[:end])
        assert found(log, payload) is None, end


def test_a_round_that_is_written_again_takes_later_ones_with_it(tmp_path: Path) -> None:
    log = ResultLog(tmp_path)
    for number in (1, 2, 3):
        log.write(number, [result_at(number)])
    other = result_at(2, 1)
    log.write(2, [other])
    assert [found(log, result_at(number)) for number in (1, 2, 3)] == [result_at(1), None, None]
    assert found(log, other) == other
    log.write(1, [])  # a void round has none
    assert found(log, other) is None


def test_old_rounds_and_what_a_killed_process_left_go(tmp_path: Path) -> None:
    log = ResultLog(tmp_path)
    (tmp_path / ".round-00000001.results.abc").write_bytes(b"half")
    for number in (1, 2, 3):
        log.write(number, [result_at(number)])
    log.folder.forget_before(3)
    assert [path.name for path in tmp_path.iterdir()] == ["round-00000003.results"]


def test_a_folder_that_cannot_be_written_to_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CannotCreateError):
        ResultLog(tmp_path / "file" / "results").write(1, [result_at(1)])


def test_a_result_of_nobody_is_not_found(tmp_path: Path) -> None:
    log = ResultLog(tmp_path)
    log.write(1, [result_at(1)])
    assert log.find(1, 0, Digest(bytes(32))) is None
