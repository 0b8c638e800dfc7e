"""`--watch --json`: one line for each update, each closed round once, and nothing else on standard output."""

import json
from collections.abc import Iterable
from unittest.mock import patch

import pytest
from click.testing import CliRunner

from protocol.errors import UnavailableError
from protocol.terminal import watch as watching
from protocol.terminal.cli import root
from protocol.terminal.query import StatusLink
from protocol.terminal.watch import NewRounds
from protocol.v1 import status_pb2 as pb


def a_status(committed: int, *, is_finished: bool = False) -> pb.GetStatusResponse:
    phase = pb.RUN_PHASE_FINISHED if is_finished else pb.RUN_PHASE_TRAINING
    run = pb.RunStatus(run_name="run", phase=phase, committed_round=committed, total_rounds=9)
    nodes = [pb.NodeStatus(node_id="1", node_name="attic")]
    return pb.GetStatusResponse(run=run, nodes=nodes, unix_seconds=100.0 + committed)


def listed(newest: int, *, unsettled: bool = False) -> list[pb.RoundSummary]:
    """All rounds, newest first."""
    return [
        pb.RoundSummary(round=n, outer_digest=b"" if unsettled and n == newest else b"d")
        for n in range(newest, 0, -1)
    ]


def streamed(
    monkeypatch: pytest.MonkeyPatch, told: Iterable[pb.GetStatusResponse | Exception], *words: str
) -> tuple[list[dict[str, object]], str]:
    """What a command prints, line by line, while these are what the coordinator tells."""
    answers = iter(told)
    newest = [0]

    def status(link: StatusLink) -> pb.GetStatusResponse:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        newest[0] = answer.run.committed_round
        return answer

    monkeypatch.setattr(watching, "REFRESH_SECONDS", 0.0)
    with (
        patch.object(StatusLink, "status", status),
        patch.object(
            StatusLink,
            "rounds",
            lambda link, limit: pb.ListRoundsResponse(rounds=listed(newest[0])[:limit]),
        ),
    ):
        result = CliRunner().invoke(root, [*words, "--watch", "--json"])
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()], result.stderr


def test_the_status_and_the_nodes_are_a_line_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    told = [a_status(1), a_status(2), a_status(2, is_finished=True)]
    lines, _ = streamed(monkeypatch, told, "status")
    assert [line["run"]["committed_round"] for line in lines] == [1, 2, 2]  # type: ignore[index]
    lines, _ = streamed(monkeypatch, told, "nodes")
    assert [(line["unix_seconds"], len(line["nodes"])) for line in lines] == [  # type: ignore[arg-type]
        *((101.0, 1), (102.0, 1), (102.0, 1))
    ]


def test_an_absence_is_told_beside_the_stream_once(monkeypatch: pytest.MonkeyPatch) -> None:
    away = UnavailableError("nobody answers")
    told: list[pb.GetStatusResponse | Exception]
    told = [a_status(1), away, away, a_status(2, is_finished=True)]
    lines, said = streamed(monkeypatch, told, "status")
    assert len(lines) == 2
    assert said == "coordinator away, retrying: nobody answers\n"


def test_each_round_comes_once_from_the_latest_on(monkeypatch: pytest.MonkeyPatch) -> None:
    told = [a_status(n) for n in (5, 5, 6, 8)] + [a_status(9, is_finished=True)]
    lines, _ = streamed(monkeypatch, told, "rounds", "--limit", "2")
    assert [line["round"] for line in lines] == [4, 5, 6, 7, 8, 9]


def test_a_round_that_nodes_still_apply_comes_when_it_is_settled() -> None:
    told = [listed(3, unsettled=True), listed(3), listed(4)]
    new = NewRounds(lambda limit: pb.ListRoundsResponse(rounds=told[0][:limit]), limit=20)
    seen = []
    for committed in (3, 3, 4):
        new.look(pb.RunStatus(committed_round=committed))
        seen.append([closed.round for closed in new.take()])
        told.pop(0)
    assert seen == [[1, 2], [3], [4]]


def test_rounds_of_a_run_that_went_back_come_again_when_they_are_made_again() -> None:
    new = NewRounds(lambda limit: pb.ListRoundsResponse(rounds=told[:limit]), limit=20)
    seen = []
    for committed in (4, 2, 3):
        told = listed(committed)
        new.look(pb.RunStatus(committed_round=committed))
        seen.append([closed.round for closed in new.take()])
    assert seen == [[1, 2, 3, 4], [], [3]]
