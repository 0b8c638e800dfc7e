"""What people see of a run, and what is worth a new line."""

import json
from collections.abc import Callable
from unittest.mock import patch

import pytest
from click.testing import CliRunner, Result

from protocol.errors import NotPermittedError, UnavailableError, UsageError
from protocol.terminal import nodes as nodes_command
from protocol.terminal.node_words import (
    copies_in_words,
    device_in_words,
    memory_in_words,
    mfu_in_words,
    node_details,
    node_facts,
    time_in_words,
)
from protocol.terminal.query import StatusLink
from protocol.terminal.status_words import (
    clock_in_words,
    sparkline,
    summary_line,
    undone_in_words,
    what_people_wait_for,
)
from protocol.terminal.watch import LineScreen, watch
from protocol.v1 import session_pb2, status_pb2
from tests.unit.status_scene import a_node, a_status, drawn


@pytest.fixture
def three_nodes() -> tuple[status_pb2.NodeStatus, ...]:
    training = a_node(
        "node-1", activity="training", inner_step=17, loss=2.1, tokens_per_second=9100.0
    )
    training.heartbeat.wire.add(kind="contribution", sent_bytes=1_000_000, received_bytes=900_000)
    training.heartbeat.wire.add(kind="control", sent_bytes=200_000)
    training.inner_steps = 20  # it is slower than the fastest, which takes 30
    waiting = a_node(
        "node-2", activity="waiting", waiting_for="the result of slice 2 from node-3", loss=2.3
    )
    gone = a_node("node-3", status_pb2.NODE_STATE_LOST, activity="training", loss=9.0)
    return training, waiting, gone


def test_a_device_is_shown_with_the_mesh_of_its_ranks() -> None:
    node = a_node("node-1", mesh="shard 2 (ZeRO 3)")
    node.device, node.num_ranks = "cuda:0", 2
    assert device_in_words(node) == "cuda:0 ×2, shard 2 (ZeRO 3)"
    node.heartbeat.mesh = ""  # it has not said so yet
    assert device_in_words(node) == "cuda:0 ×2"
    node.heartbeat.mesh, node.num_ranks = "1 rank", 1
    assert device_in_words(node) == "cuda:0 ×1"


@pytest.mark.parametrize("width", [80, 120])
def test_the_picture_tells_all_and_fits(
    three_nodes: tuple[status_pb2.NodeStatus, ...], width: int
) -> None:
    status = a_status(*three_nodes)
    for round_, loss in ((0, 5.561), (5, 2.31)):
        status.run.held_out_losses.add(round=round_, loss=loss, tokens=1000)
    picture = drawn(status, width=width)
    assert max(map(len, picture.splitlines())) <= width
    words = " ".join(picture.split())
    for expected in (
        "round 7 of 12 training",
        "training 2.200 held-out 5.561 → 2.310 1.2M tokens",  # the lost node's loss is not counted
        "000102030405 at round 6, the same on all nodes",
        "training: 1 of 3 nodes are done",
        "node-1 ready training 17/20 2.100 9.1k 1.2 MB 900.0 kB",
        "node-2 ready waiting 2.300 - - - the result of",  # what it sent it has not said yet
        "node-3 lost - - -",
    ):
        assert expected in words


@pytest.mark.parametrize("width", [40, 60])
def test_a_narrow_terminal_gets_whole_columns_and_the_names_of_the_others(
    three_nodes: tuple[status_pb2.NodeStatus, ...], width: int
) -> None:
    picture = drawn(a_status(*three_nodes), width=width)
    assert max(map(len, picture.splitlines())) <= width and "…" not in picture
    head, _, below = picture.partition("waits for")
    shown = head.splitlines()[-1].split()
    assert shown[:2] == ["node", "state"]
    left_out = " ".join(below.split()).partition("left out: ")[2].partition(";")[0].split(", ")
    every = ["node", "state", "does", "loss", "tok/s", "sent", "received"]
    assert [*shown, *left_out] == every and "received" in left_out


def test_a_slow_upload_explains_itself_beside_what_the_node_waits_for(
    three_nodes: tuple[status_pb2.NodeStatus, ...],
) -> None:
    _, waiting, gone = three_nodes
    waiting.heartbeat.upload_pace.CopyFrom(session_pb2.UploadPace(held_by="answers", num_peers=3))
    gone.heartbeat.upload_pace.held_by = "limit"
    words = " ".join(drawn(a_status(waiting, gone), width=200).split())
    assert "the result of slice 2 from node-3; upload: waiting for answers of 3 peers" in words
    assert "limit" not in words
    waiting.heartbeat.upload_pace.held_by = "of a newer version"
    assert "upload" not in drawn(a_status(waiting), width=200)


def test_long_names_and_figures_still_fit_80_columns() -> None:
    node = a_node(
        "a-machine-with-a-very-long-name",
        status_pb2.NODE_STATE_DIVERGED,
        activity="contributing",
        waiting_for="the committed state at round 12345 from node-17",
        loss=10.123,
        tokens_per_second=999_900.0,
    )
    node.heartbeat.wire.add(kind="result", sent_bytes=999_900_000, received_bytes=999_900_000)
    picture = drawn(a_status(node))
    assert max(map(len, picture.splitlines())) <= 80
    assert all(w in picture for w in ("diverged", "contributing", "10.123", "999.9k", "999.9 MB"))


def test_long_names_that_differ_at_their_end_are_told_apart() -> None:
    name = "a-machine-with-a-very-long-name"
    picture = drawn(a_status(a_node(name), a_node(f"{name}-2")))
    rows = [line.split()[0] for line in picture.splitlines()[-2:]]
    assert rows == ["a-machine-…-name", "a-machine-…ame-2"]


def test_what_is_too_long_for_a_line_goes_on_below_its_beginning() -> None:
    status = a_status(a_node("node-1"), reason="training: " + "2 of 3 nodes are done, " * 6)
    status.run.wire.counts.add(kind="result", sent_bytes=250_800)
    status.run.wire.all_reduce_bytes = 1678 * 250_800
    lines = drawn(status).splitlines()
    wire = next(i for i, line in enumerate(lines) if line.startswith("wire   250.8 kB"))
    assert lines[wire + 1].startswith("       ") and lines[wire + 1].strip()
    reason = next(i for i, line in enumerate(lines) if "training: 2 of 3" in line)
    assert all(line.startswith("       ") for line in lines[reason : reason + 2])


def test_a_node_that_runs_twice_is_named() -> None:
    once, twice = a_node("node-1"), a_node("node-2")
    assert "copies" not in drawn(a_status(once, twice))
    twice.has_waiting_copy = True
    told = "node-2 has a second process with its key waiting: stop one of the two"
    assert f"copies {told}" in drawn(a_status(once, twice))
    assert told in summary_line(a_status(once, twice))
    once.has_waiting_copy = True
    assert "node-1, node-2 have a second process with their key waiting" in copies_in_words(
        [once, twice]
    )


def test_evaluators_that_find_other_losses_of_one_state_stand_in_the_line_of_evaluations() -> None:
    assert " eval" not in drawn(a_status())
    assert "eval   a finds 2.0 and b 2.5" in drawn(a_status(differing="a finds 2.0 and b 2.5"))
    assert "data   a and b have trained" in drawn(a_status(alike="a and b have trained"))


def test_the_clock_reads_well_before_in_and_after_a_run() -> None:
    run = a_status(elapsed_seconds=70.0).run
    assert clock_in_words(run) == "1 min 10 s so far; the time left is known after some rounds"
    run.estimated_seconds_left = 3700.0
    assert clock_in_words(run) == "1 min 10 s so far, about 1 h 1 min left"
    run.phase = status_pb2.RUN_PHASE_FINISHED
    assert clock_in_words(run) == "1 min 10 s in all"


def test_a_run_that_stands_says_so_in_the_place_of_a_time_that_runs_down() -> None:
    status = a_status(elapsed_seconds=70.0, phase=status_pb2.RUN_PHASE_WAITING, open_round=0)
    run = status.run
    assert clock_in_words(run) == "1 min 10 s so far; waiting"
    assert "; the run is waiting;" in f"{summary_line(status)};"
    run.estimated_seconds_left = 3700.0
    words = "waiting, with about 1 h 1 min left once it goes on"
    assert clock_in_words(run) == f"1 min 10 s so far; {words}"
    assert f"the run is {words}" in summary_line(status)
    run.paused = "paused by ada"
    assert clock_in_words(run).endswith("; paused, with about 1 h 1 min left once it goes on")
    run.estimated_seconds_left = 0.0  # the last round is closed, and its model is measured
    assert clock_in_words(run) == "1 min 10 s so far; paused"


def test_nodes_that_differ_and_nodes_that_are_silent_are_told() -> None:
    node = a_node("node-1", activity="training")
    node.silent_seconds = 12.0
    picture = drawn(a_status(node, digests_agree=False), notice="coordinator away for 4.0 s")
    assert "NOT the same on all nodes" in picture
    assert "silent 12 s" in picture
    assert picture.startswith("coordinator away for 4.0 s\n")


def test_nodes_stand_in_the_order_of_their_names() -> None:
    picture = drawn(a_status(a_node("node-2"), a_node("node-1")))
    assert picture.index("node-1") < picture.index("node-2")


def test_an_empty_status_can_be_drawn() -> None:
    assert "round 0 of 0" in drawn(status_pb2.GetStatusResponse())


def test_the_line_says_it_all_in_one(three_nodes: tuple[status_pb2.NodeStatus, ...]) -> None:
    assert summary_line(a_status(*three_nodes)) == (
        "round 7 of 12, training; loss 2.200; 2 of 3 nodes ready; "
        "000102030405 at round 6, the same on all nodes; training: 1 of 3 nodes are done"
    )


def test_a_loop_with_data_of_its_own_trains_on_no_other_text_than_it_should() -> None:
    loop, ranks = a_node("loop"), a_node("ranks")
    loop.device, ranks.device = "own loop", "cpu"
    assert [node_facts(node)["text"] for node in (loop, ranks)] == ["its loop's", "other"]
    loop.same_corpus = True  # it has the run's
    assert node_facts(loop)["text"] == "same"


def test_after_the_end_the_training_loss_is_that_of_those_who_stayed_to_it() -> None:
    gone = status_pb2.NODE_STATE_LEFT
    early = a_node("early", gone, loss=9.0, outer_round=3)
    one, other = (a_node(n, gone, loss=loss, outer_round=12) for n, loss in (("a", 2), ("b", 3)))
    helper = a_node("helper", outer_round=12)
    assert "training 2.500" in drawn(a_status(early, one, other, helper))
    here = a_node("here", loss=4.0, outer_round=12)
    assert "training 4.000" in drawn(a_status(early, one, other, here))
    assert "training -" in drawn(a_status(helper))


def test_a_loss_below_zero_is_a_loss() -> None:
    """As those of likelihoods of what is continuous, and of rewards."""
    node = a_node("flow", loss=-1.5)
    assert "training -1.500" in drawn(a_status(node))
    assert node_details(node, a_status(node))["loss"] == "-1.500"


def answers(
    *items: status_pb2.GetStatusResponse | Exception,
) -> Callable[[], status_pb2.GetStatusResponse]:
    remaining = iter(items)

    def ask() -> status_pb2.GetStatusResponse:
        item = next(remaining)
        if isinstance(item, Exception):
            raise item
        return item

    return ask


def test_watching_prints_changes_only_and_survives_an_absent_coordinator(
    capsys: pytest.CaptureFixture[str],
) -> None:
    finished = a_status(phase=status_pb2.RUN_PHASE_FINISHED, committed_round=12, open_round=0)
    pauses: list[float] = []
    watch(
        answers(
            a_status(),
            a_status(reason="training: 2 of 3 nodes are done, 11 s left"),
            UnavailableError("no coordinator answers at 127.0.0.1:7700"),
            UnavailableError("no coordinator answers at 127.0.0.1:7700"),
            a_status(),
            finished,
        ),
        LineScreen(),
        pause=pauses.append,
    )
    starts = [line[:36] for line in capsys.readouterr().out.splitlines()]
    assert starts == [
        "round 7 of 12, training; 0 of 0 node",
        "coordinator away, retrying: no coord",
        "round 7 of 12, training; 0 of 0 node",
        "round 12 of 12, finished; 0 of 0 nod",
    ]
    assert pauses == [1.0] * 5


def test_watching_does_not_wait_for_a_coordinator_that_never_answered() -> None:
    with pytest.raises(UnavailableError):
        watch(answers(UnavailableError("nobody")), LineScreen(), pause=lambda _: None)


def test_watching_ends_when_waiting_cannot_help() -> None:
    with pytest.raises(NotPermittedError):
        watch(answers(a_status(), NotPermittedError("expired")), LineScreen(), pause=lambda _: None)


def test_where_no_node_is_here_none_holds_the_same() -> None:
    gone = a_node("node-1", status_pb2.NODE_STATE_LEFT)
    for status in (a_status(), a_status(gone)):
        assert "at round 6, and no node is here" in summary_line(status)
        assert "the same" not in drawn(status)
    assert "at round 6, the same on all nodes;" in summary_line(a_status(a_node("node-1")))


def test_a_state_that_nobody_holds_or_not_everybody_yet_is_not_the_same_on_all_nodes() -> None:
    holds = a_node("node-1")
    waits = a_node("node-2", outer_round=0, outer_digest=bytes(32))
    assert "at round 6, and no node here holds it" in summary_line(a_status(waits))
    assert "at round 6, the same on all nodes at that round" in summary_line(a_status(holds, waits))
    assert "NOT the same on all nodes" in summary_line(a_status(waits, digests_agree=False))


def test_a_node_that_is_draining_is_leaving() -> None:
    node = a_node("node-1", activity="contributing")
    node.is_draining = True
    assert "node-1 leaving contributing" in " ".join(drawn(a_status(node)).split())


def test_the_picture_tells_what_links_carry_and_what_was_saved(
    three_nodes: tuple[status_pb2.NodeStatus, ...],
) -> None:
    status = a_status(*three_nodes)
    assert "rates" not in drawn(status)
    assert "all-reduce" not in drawn(status)
    status.nodes[1].link_rates.up_bytes_per_second = 11_800_000
    status.nodes[2].link_rates.up_bytes_per_second = 1  # it is gone
    status.run.wire.counts.add(kind="result", sent_bytes=3_000_000)
    status.run.wire.counts.add(kind="contribution", sent_bytes=1_000_000)
    status.run.wire.all_reduce_bytes = 800_000_000
    picture = drawn(status)
    assert max(map(len, picture.splitlines())) <= 80
    words = " ".join(picture.split())
    assert "rates node-2 11.8 MB/s up, ? down" in words
    assert "node-3 1" not in words
    assert "4.0 MB sent by all, 200 times less than a ring all-reduce in fp32" in words


def test_people_see_where_the_time_of_rounds_went_and_what_was_not_measured() -> None:
    one, two = a_node("node-1"), a_node("node-2")
    for node, compute in ((one, 0.5), (two, 0.7)):
        made = node.heartbeat.utilisation
        made.compute_share, made.publish_share, made.adopt_share = compute, 0.01, 0.02
        made.exchange_share, made.waiting_share = 0.07, 0.2
        made.peak_memory_bytes = 3_000_000
    assert "60% compute, 10% exchange, 20% waiting; local not measured on 2 of 2" in " ".join(
        drawn(a_status(one, two)).split()
    )
    one.heartbeat.utilisation.local_communication_share = 0.2
    assert time_in_words(one) == "50% compute, 20% local, 10% exchange, 20% waiting"
    assert time_in_words(two) == "70% compute, local not measured, 10% exchange, 20% waiting"
    assert "10% local" in drawn(a_status(one, two))
    two.heartbeat.utilisation.local_communication_share = 0.0  # it has one rank
    picture = drawn(a_status(one, two))
    assert "not measured" not in picture
    assert max(map(len, picture.splitlines())) <= 80
    two.heartbeat.utilisation.mfu, two.heartbeat.utilisation.is_peak_measured = 0.4, True
    assert (mfu_in_words(one), mfu_in_words(two)) == ("-", "40.0% of a measured peak")
    assert memory_in_words(one) == "3.0 MB"
    gone = a_node("node-3", status_pb2.NODE_STATE_LOST)
    gone.heartbeat.CopyFrom(two.heartbeat)
    assert (time_in_words(gone), mfu_in_words(gone)) == ("-", "-")


def test_people_see_how_much_of_the_time_is_spent_in_inner_steps() -> None:
    one, two = a_node("node-1"), a_node("node-2", activity="training ahead", inner_step=4)
    gone = a_node("node-3", status_pb2.NODE_STATE_LOST)
    for node, share in ((one, 0.9), (two, 0.6), (gone, 0.1)):
        node.heartbeat.utilisation.compute_share = share
    two.inner_steps = 20
    status = a_status(one, two, gone)
    assert "computing 75% of the time" in summary_line(status)
    picture = drawn(status)
    assert "computing 75%" in picture
    assert "training ahead 4/20" in picture
    assert max(map(len, picture.splitlines())) <= 80


def test_a_loss_per_token_is_told_in_bits_per_byte_where_the_bytes_are_known() -> None:
    losses = [status_pb2.HeldOutLoss(round=r, loss=loss) for r, loss in ((0, 6.0), (2, 3.0))]
    status = a_status(held_out_losses=losses, held_out_bytes_per_token=4.0)
    assert "6.000 → 3.000, 1.082 bits a byte" in drawn(status, width=100)
    assert "bits" not in drawn(a_status(held_out_losses=losses), width=100)


def test_a_score_of_a_loop_below_zero_is_told_in_no_bits_and_a_small_loss_in_its_digits() -> None:
    losses = [status_pb2.HeldOutLoss(round=r, loss=loss) for r, loss in ((0, 0.000312), (2, -0.25))]
    status = a_status(held_out_losses=losses, held_out_bytes_per_token=4.0)
    told = drawn(status, width=100)
    assert "0.000312 → -0.250" in told
    assert "bits" not in told


@pytest.mark.parametrize(
    ("reached", "said"), [(0, ""), (1000, ""), (1001, "epoch 2"), (2001, "epoch 3")]
)
def test_it_says_which_time_the_data_are_gone_through(reached: int, said: str) -> None:
    data = status_pb2.DataStatus(epoch_samples=1000, frontier=reached)
    status = a_status(data=data)
    for told in (drawn(status, width=120), summary_line(status)):
        assert said in told and (said or "epoch" not in told)
    assert "epoch" not in drawn(a_status(data=status_pb2.DataStatus(frontier=5)), width=120)


def test_the_latest_loss_of_private_data_is_told_of_each_holder_or_from_the_least_to_the_most() -> (
    None
):
    status = a_status(held_out_losses=[status_pb2.HeldOutLoss(round=2, loss=3.0)])
    holders = status.run.held_out_losses[0].holders
    for name, loss in (("clinic", 2.0), ("", 4.0)):
        holders.add(node_id="ab" * 16, node_name=name, loss=loss)
    assert "held-out 3.000 (clinic 2.000, abababababab 4.000)" in drawn(status, width=120)
    for loss in (1.5, 1.0, 7.25):
        holders.add(node_id="cd" * 16, loss=loss)
    assert "3.000 (5 data holders, 1.000 to 7.250)" in drawn(status, width=120)


def test_of_one_node_all_that_is_known_is_told_and_nothing_that_is_not(
    three_nodes: tuple[status_pb2.NodeStatus, ...],
) -> None:
    training, waiting, *_ = three_nodes
    training.heartbeat.unreachable_ids.append(waiting.node_id)
    told = node_details(training, a_status(*three_nodes))
    assert told["does"] == "training 17/20"
    assert told["speed"] == "9.1k tokens a second"
    assert f"{waiting.node_name} not reached" in told["reaches"].split(", ")
    assert "mfu" not in told and "let go" not in told
    assert all(words not in ("", "-") for words in told.values())


def test_a_course_is_drawn_from_its_least_to_its_most_and_only_when_there_is_one() -> None:
    assert sparkline([3.0, 2.0]) == ""
    assert sparkline([3.0, 2.0, 1.0]) == "█▅▁"
    assert sparkline([1.0, 1.0, float("nan"), 1.0]) == "▁▁▁"
    assert len(sparkline(range(1000))) == 40
    losses = [status_pb2.HeldOutLoss(round=r, loss=5.0 - r) for r in range(4)]
    assert "█▆▃▁  held-out" in drawn(a_status(held_out_losses=losses))


def show(status: status_pb2.GetStatusResponse, *arguments: str) -> Result:
    with patch.object(StatusLink, "status", lambda _: status):
        return CliRunner().invoke(nodes_command.show_node, arguments)


def test_a_node_is_found_by_its_name_or_the_beginning_of_its_id_and_else_all_are_named(
    three_nodes: tuple[status_pb2.NodeStatus, ...],
) -> None:
    status = a_status(*three_nodes)
    for name in ("node-1", "node-1-01"):
        shown = show(status, name)
        assert shown.exit_code == 0 and "training 17/20" in shown.output
    assert json.loads(show(status, "node-1", "--json").output)["node_name"] == "node-1"
    unknown = show(status, "node-9").exception
    assert isinstance(unknown, UsageError)
    assert "no node is 'node-9'" in unknown.what and "node-1" in unknown.next_step
    several = show(status, "node-").exception
    assert isinstance(several, UsageError) and "may be 3 nodes" in several.what


def test_a_coordinator_that_a_relay_carries_says_by_which() -> None:
    carried = drawn(a_status(relay="through relay relay.example.org:7720"))
    assert "coordinator through relay relay.example.org:7720" in carried
    assert "relay" not in drawn(a_status())


def test_a_failing_backup_is_the_first_that_the_run_owner_reads() -> None:
    backup = status_pb2.BackupStatus(
        target="s3://b/run",
        num_failures=4,
        failing_seconds=90,
        why="the key has ended",
        next_seconds=5,
    )
    status = a_status(backups=[backup])
    assert drawn(status).startswith("no backup yet: 4 tries at s3://b/run in 1 min 30 s failed")
    assert "no backup yet" in summary_line(status)
    before = a_status()
    assert what_people_wait_for(before) != what_people_wait_for(status)
    backup.failing_seconds, backup.num_failures = 120, 5
    assert what_people_wait_for(status) == what_people_wait_for(a_status(backups=[backup]))


def test_a_disk_that_is_nearly_full_is_the_first_that_the_run_owner_reads() -> None:
    roomy = a_status(disk_free_bytes=300_000_000)
    assert "disk" not in drawn(roomy) + summary_line(roomy)
    full = a_status(disk_free_bytes=200_000_000, is_disk_low=True)
    assert drawn(full).startswith("the coordinator's disk is nearly full: 200.0 MB are free")
    assert "make room on it" in summary_line(full)
    assert what_people_wait_for(full) != what_people_wait_for(roomy)


def test_a_disk_that_all_nodes_wait_for_is_told_to_the_run_owner() -> None:
    quick = a_status(disk_write_seconds=0.3)
    assert "disk" not in drawn(quick) + summary_line(quick)
    slow = a_status(disk_write_seconds=4.0, is_disk_slow=True)
    assert "the coordinator's disk is slow: a write took 4.0 s" in drawn(slow)
    assert "all nodes wait for each" in summary_line(slow)
    assert what_people_wait_for(slow) != what_people_wait_for(quick)


def test_what_a_node_carried_for_others_is_shown_where_it_is_something() -> None:
    one = a_node("node-1")
    assert "carried" not in node_details(one, a_status(one))
    one.heartbeat.wire.add(kind="carried", sent_bytes=5_000_000, received_bytes=5_100_000)
    assert node_details(one, a_status(one))["carried"] == "5.0 MB for others"


def test_only_the_latest_going_back_is_told_whole() -> None:
    assert undone_in_words(status_pb2.RunStatus()) == ""
    once = ["the run went back to the state after round 4"]
    assert undone_in_words(status_pb2.RunStatus(went_back=once)) == once[0]
    twice = status_pb2.RunStatus(went_back=[*once, "the run went back to the state after round 2"])
    assert undone_in_words(twice).endswith("after round 2; once before: 'atoll audit'")
    assert "; 2 times before" in undone_in_words(status_pb2.RunStatus(went_back=once * 3))


def test_of_who_waits_for_approval_nothing_is_said_that_nobody_knows() -> None:
    unapproved = status_pb2.NodeStatus(
        node_id="ab12",
        node_name="attic",
        state=status_pb2.NODE_STATE_UNAPPROVED,
        standing="waits for it",
    )
    facts = node_facts(unapproved)
    assert (facts["device"], facts["text"]) == ("-", "-")
    other = status_pb2.NodeStatus(device="cpu", num_ranks=1)
    assert (node_facts(other)["device"], node_facts(other)["text"]) == ("cpu ×1", "other")


def test_what_a_node_waits_for_stands_in_a_sentence() -> None:
    held = [("waits", "waits for 'atoll nodes approve waits'"), ("odd", "by the run owner: odd")]
    nodes = [
        status_pb2.NodeStatus(
            node_name=name, state=status_pb2.NODE_STATE_QUARANTINED, standing=words
        )
        for name, words in held
    ]
    with patch.object(StatusLink, "status", lambda self: a_status(*nodes)):
        result = CliRunner().invoke(nodes_command.nodes, [])
    said = " ".join(result.output.split())
    assert "odd is quarantined by the run owner: odd" in said
    assert "waits is quarantined, and waits for 'atoll nodes approve waits'" in said


def test_a_run_of_samples_is_told_in_samples_and_one_of_an_older_coordinator_in_tokens() -> None:
    node = a_node("alpha", tokens_per_second=120.0, loss=0.5)
    old, new = a_status(node), a_status(node, counted="samples", has_own_loss=True)

    def shown(status: status_pb2.GetStatusResponse) -> str:
        return drawn(status, width=120) + str(node_details(node, status))

    assert "1.2M tokens" in shown(old) and "tok/s" in shown(old)
    assert "120 tokens a second" in shown(old)
    assert "1.2M samples" in shown(new) and "samples/s" in shown(new)
    assert "120 samples a second" in shown(new)
    assert "tok/s" not in shown(new) and "tokens" not in shown(new).replace("'tokens'", "")
