"""Atoll by the commands that people type: a coordinator in the host in the middle, and nodes that join."""

from benchmarks.wan.peers.order import ORDER_VARIABLE
from benchmarks.wan.peers.stage import MIDDLE, Stage
from protocol.files.durable import toml_of
from protocol.trust.invite import INVITE

_CLI = "protocol.terminal.cli"


def start(stage: Stage) -> None:
    """Starts the coordinator, lets all nodes join, and starts them."""
    home = stage.folder / "coordinator"
    middle = stage.lab.address(MIDDLE)
    run_file = stage.folder / "run.toml"
    run_file.write_text(toml_of(stage.orders[0].tables))
    init = ("coordinator", "init", home, "--run", run_file, "--host", middle)
    stage.run(MIDDLE, stage.module(_CLI, *init))
    stage.start(MIDDLE, "coordinator", stage.module(_CLI, "coordinator", "start", home))
    stage.until(lambda: "coordinator ready" in stage.log_text("coordinator"), "the coordinator")
    uses = str(len(stage.orders))
    create = ("invite", "create", "--uses", uses, "--dir", home)
    printed = stage.run(MIDDLE, stage.module(_CLI, *create))
    invite = INVITE.first_in(printed)
    assert invite is not None, printed
    for host, order, order_file in stage.nodes():
        folder = stage.folder / host
        stage.run(
            host,
            stage.module(_CLI, "join", "--dir", folder, "--name", host),
            ATOLL_INVITE=invite,
        )
        start_node = ("node", "start", "--dir", folder, "--listen", order.address)
        stage.start(
            host,
            host,
            stage.module(
                "benchmarks.wan.peers.atoll_node", *start_node, "--drain-within", "0", "--log-json"
            ),
            **{ORDER_VARIABLE: str(order_file)},
        )
