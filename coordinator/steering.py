"""The run owner's commands about members, the run and samples: `atoll nodes …`, `atoll run …`, `atoll audit`.

gRPC and TLS are imported inside the commands, so that help and mistakes are quick.
"""

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from coordinator.cli import DIR_OPTION, operator_of
from protocol.errors import UsageError
from protocol.terminal import console
from protocol.terminal.lazy_group import WholeGroup

if TYPE_CHECKING:
    from protocol.trust.rulings import SignedRuling
    from protocol.v1.ruling_pb2 import Ruling

_REASON_OPTION = click.option(
    "--reason", default="", help="Why, in a sentence: for those it is about, and the audit log."
)


def _node_command(
    name: str, verdict: str, done: str, help_text: str, *, has_reason: bool = True
) -> click.Command:
    """A command about one node."""

    @click.command(name, help=help_text)
    @click.argument("node", metavar="NAME")
    @DIR_OPTION
    def command(node: str, directory: Path | None, reason: str = "") -> None:
        from protocol.v1 import operator_pb2 as pb

        request = pb.RuleNodeRequest(
            node=node, verdict=pb.NodeVerdict.Value(f"NODE_VERDICT_{verdict}"), reason=reason
        )
        with operator_of(directory) as stub:
            answer = stub.RuleNode(request)
        click.echo(f"{answer.node_name} ({answer.node_id[:12]}) {done}")

    return _REASON_OPTION(command) if has_reason else command


approve = _node_command(
    "approve",
    "APPROVE",
    "may take part, and does so by itself",
    """Let a node take part that joined with an invite that needs approval.

    NAME is its name, its id, or the beginning of its id.

    Example: atoll nodes approve basement-4090""",
    has_reason=False,
)


@click.command()
@click.argument("node", metavar="[NAME]", required=False)
@click.option(
    "--invite",
    "invite_id",
    metavar="ID",
    help="Expel all who joined with this invite, and revoke it.",
)
@DIR_OPTION
@_REASON_OPTION
def expel(node: str | None, invite_id: str | None, directory: Path | None, reason: str) -> None:
    """End a node's session and refuse its key from now on, also with another invite.

    NAME is its name, its id, or the beginning of its id. The round in flight goes on without it, peers
    refuse its calls at once, and its process ends with exit code 79. Who still has an open invite may come
    back by a new key: --invite expels all who joined with one, and closes it.

    \b
    Examples:
      atoll nodes expel node-7 --reason "sends what it did not train"
      atoll nodes expel --invite 1f0c9a2b
    """
    from protocol.v1 import operator_pb2 as pb

    if (node is None) == (invite_id is None):
        raise UsageError(
            "it is not said whom to expel" if node is None else "a node and an invite are given",
            next_step="give the NAME of a node, or --invite ID",
        )
    request = pb.RuleNodeRequest(
        node=node or "",
        verdict=pb.NODE_VERDICT_EXPEL,
        reason=reason,
        invite_id=invite_id or "",
    )
    with operator_of(directory) as stub:
        answer = stub.RuleNode(request)
    if invite_id is not None:
        names = ", ".join(answer.expelled_names) or "nobody who was not before"
        click.echo(f"invite {invite_id} is revoked, and expelled by it: {names}")
        return
    click.echo(
        f"{answer.node_name} ({answer.node_id[:12]}) is expelled: its session has ended, and its key "
        "is refused"
    )
    for still_open in answer.open_invites:
        click.echo(
            f"it joined with invite {still_open}, which is still open: "
            f"'atoll invite revoke {still_open}' closes it"
        )


quarantine = _node_command(
    "quarantine",
    "QUARANTINE",
    "is quarantined: it waits, and takes part in nothing",
    """Let a node wait: it takes part in nothing and counts for nothing, and its process stays.

    NAME is its name, its id, or the beginning of its id. 'atoll nodes readmit NAME' ends it.

    Example: atoll nodes quarantine node-7 --reason "its loss is odd\"""",
)
readmit = _node_command(
    "readmit",
    "READMIT",
    "may take part again",
    """Let a node take part again that was expelled or quarantined.

    NAME is its name, its id, or the beginning of its id. One that was expelled is started again by its
    owner; one that is quarantined comes back by itself.

    Example: atoll nodes readmit node-7""",
)


@click.group(cls=WholeGroup)
def run() -> None:
    """Pause, resume, stop, extend, amend, advise, move or roll back the run. The coordinator runs."""


def _steer(verdict: str, reason: str, directory: Path | None) -> None:
    from protocol.v1 import operator_pb2 as pb

    request = pb.SteerRunRequest(
        verdict=pb.RunVerdict.Value(f"RUN_VERDICT_{verdict}"), reason=reason
    )
    with operator_of(directory) as stub:
        _say(stub.SteerRun(request).ruling)


@run.command()
@_REASON_OPTION
@DIR_OPTION
def pause(reason: str, directory: Path | None) -> None:
    """Let the round in flight end and open no other; restarts do not change that.

    Example: atoll run pause --reason "the cluster moves"
    """
    _steer("PAUSE", reason, directory)


@run.command()
@DIR_OPTION
def resume(directory: Path | None) -> None:
    """Let rounds open again.

    Example: atoll run resume
    """
    _steer("RESUME", "", directory)


@run.command()
@_REASON_OPTION
@DIR_OPTION
def stop(reason: str, directory: Path | None) -> None:
    """End the run after the round in flight: its state is evaluated, and nodes go home.

    Nodes save that state and end with exit code 0. 'atoll run extend' lets the run go on later.

    Example: atoll run stop --reason "the loss is where it should be"
    """
    _steer("STOP", reason, directory)


@run.command()
@click.argument("host", metavar="HOST")
@click.option(
    "--port", type=click.IntRange(1, 65535), help="Its port for members; default: as it is."
)
@click.option(
    "--enrolment-port",
    type=click.IntRange(1, 65535),
    help="Its port for joining; default: as it is.",
)
@_REASON_OPTION
@DIR_OPTION
def move(
    host: str, port: int | None, enrolment_port: int | None, reason: str, directory: Path | None
) -> None:
    """Tell all nodes that the coordinator will be at HOST, before it moves there.

    They look for it there once it does not answer at its address of now. Then stop it, and start its folder
    on the other machine.

    Example: atoll run move train2.example.org
    """
    from protocol.v1 import operator_pb2 as pb

    request = pb.SteerRunRequest(
        verdict=pb.RUN_VERDICT_MOVE,
        reason=reason,
        host=host,
        control_port=port or 0,
        enrolment_port=enrolment_port or 0,
    )
    with operator_of(directory) as stub:
        _say(stub.SteerRun(request).ruling)


@run.command()
@click.argument("round", metavar="ROUND", type=click.IntRange(min=0))
@click.option(
    "--believe", default="", metavar="NAME", help="Go by what this node alone says that it keeps."
)
@_REASON_OPTION
@DIR_OPTION
def rollback(round: int, believe: str, reason: str, directory: Path | None) -> None:
    """Make the run's state again what it was after ROUND; later rounds are undone.

    Nodes go back from what they keep, or fetch that state from one that can. Samples of undone rounds are
    leased again, and what nodes owed of them is let go. Rules stay as amended. 0 is the state that the run
    began with.

    Nodes of two invites, or of most of the confirmed work, must say that they keep the state. Where too few
    come to hold it, the going back is withdrawn and the run pauses.

    Example: atoll run rollback 120 --reason "the loss has jumped"
    """
    from protocol.v1 import operator_pb2 as pb

    with operator_of(directory) as stub:
        request = pb.RollBackRunRequest(round=round, reason=reason, believed=believe)
        _say(stub.RollBackRun(request).ruling)


@run.command()
@click.argument("rounds", metavar="N", type=click.IntRange(1, 100_000))
@_REASON_OPTION
@DIR_OPTION
def extend(rounds: int, reason: str, directory: Path | None) -> None:
    """Add N rounds to the run. Its learning rate goes on from where it is, without a jump.

    A finished or stopped run goes on too: nodes that have ended join again by 'atoll node start'. Where the
    schedule is over, the learning rate stays at its end; amend inner.final_fraction for another one.

    Example: atoll run extend 50
    """
    from protocol.v1 import operator_pb2 as pb

    with operator_of(directory) as stub:
        _say(stub.AmendRun(pb.AmendRunRequest(more_rounds=rounds, reason=reason)).ruling)
    click.echo("nodes that are here go on; those that have ended go on by 'atoll node start'")


@run.command()
@click.argument("changes", metavar="KEY=VALUE...", nargs=-1, required=True)
@_REASON_OPTION
@DIR_OPTION
def amend(changes: tuple[str, ...], reason: str, directory: Path | None) -> None:
    """Change rules of the run from the next round on, on all nodes.

    KEY is a table and a key of run.toml. What can change: run.rounds, run.min_nodes, inner.steps,
    inner.learning_rate, inner.muon_learning_rate, inner.final_fraction, outer.learning_rate, outer.merge,
    outer.screening, outer.audit, evaluation.every_rounds, evaluation.go_back, exchange.uplink,
    exchange.downlink, exchange.residual_decay, and deadlines. run.toml stays as it is. All else can change
    in a fork: 'atoll node fork' on a machine that trains.

    \b
    Example:
      atoll run amend outer.learning_rate=0.5 deadlines.train=300
    """
    import json

    from protocol.run.amendments import changes_of
    from protocol.trust.rulings import ruling_from_json
    from protocol.v1 import operator_pb2 as pb

    asked = [
        pb.RuleChange(key=key, value_json=json.dumps(value)) for key, value in changes_of(changes)
    ]
    with operator_of(directory) as stub:
        answer = stub.AmendRun(pb.AmendRunRequest(changes=asked, reason=reason))
    _say(answer.ruling)
    if answer.own_loops:
        one = len(answer.own_loops) == 1
        click.echo(
            f"{', '.join(answer.own_loops)} {'trains' if one else 'train'} by "
            f"{'a loop of its owner' if one else 'loops of their owners'}, which "
            f"{'takes' if one else 'take'} this over only by swarm.learning_rate: their logs tell of it"
        )
    costs = _new_costs(directory, ruling_from_json(answer.ruling.ruling_json).number)
    for told in costs:
        click.echo(f"loss: {told}")
    if costs:
        click.echo(
            "loss: amend it back; what cannot be amended of that takes a fork, 'atoll node fork'"
        )


def _new_costs(directory: Path | None, number: int) -> list[str]:
    """What a ruling lets the run's settings cost in loss that they did not cost before."""
    from coordinator.cli import folder_of
    from coordinator.config import RUN_FILE
    from coordinator.presets.advising import LAST_ROUNDS, taking_part
    from coordinator.presets.costly import costs_in_words
    from protocol.run.amendments import in_force
    from protocol.run.run_files import load_run_folder
    from protocol.terminal.query import StatusLink

    home = folder_of(directory)
    if not (home / RUN_FILE).is_file():  # one that may rule is enough
        return []
    run = load_run_folder(home, RUN_FILE)
    rulings = [one.ruling for one in _checked_log(directory)[0]]
    with StatusLink(home) as asked:
        rounds = asked.rounds(LAST_ROUNDS).rounds
    num_nodes = taking_part(rounds) if rounds else None
    before, after = (
        list(
            costs_in_words(
                in_force(run, [one for one in rulings if one.number < last]), num_nodes=num_nodes
            )
        )
        for last in (number, number + 1)
    )
    return [told for told in after if told not in before]


@run.command()
@click.option(
    "--rtt", default="100ms", show_default=True, help="Round trip between nodes: 20ms, 0.3s."
)
@click.option("--json", "is_json", is_flag=True, help="Print JSON: one object.")
@DIR_OPTION
def advise(rtt: str, is_json: bool, directory: Path | None) -> None:
    """Say how often and in which codecs the run would better exchange, by what it has measured.

    It counts with what exchanges got of the nodes' links, how fast nodes train, and how long the last rounds
    took, and chooses among what 'atoll run amend' can change. Nothing is changed.

    \b
    Example:
      atoll run advise

    \b
    JSON is what is, what is advised, and what to amend:
      {"now": {"steps": 24, "uplink": "int4", …, "above": 0.041}, "better": {…}, "round_seconds": 31.2,
       "amend": ["inner.steps=8", "run.rounds=940"]}
    """
    from coordinator.cli import folder_of
    from coordinator.config import RUN_FILE
    from coordinator.presets import advising
    from coordinator.presets.settling import span_of
    from protocol.run.amendments import in_force
    from protocol.run.run_files import load_run_folder
    from protocol.terminal.query import StatusLink

    round_trip = span_of(rtt, origin="--rtt", may_be_zero=True, refusal=UsageError)
    home = folder_of(directory)
    rulings = [one.ruling for one in _checked_log(directory)[0]]
    with StatusLink(home) as asked:
        status, newest = asked.status(), asked.rounds(2 * advising.LAST_ROUNDS).rounds
    advice = advising.advice_for(
        in_force(load_run_folder(home, RUN_FILE), rulings),
        status.run,
        status.nodes,
        newest,
        first_round=advising.rules_since(rulings),
        round_trip_seconds=round_trip,
    )
    if is_json:
        console.print_json(advising.as_json(advice))
        return
    click.echo(advising.links_in_words(advice))
    rows = advising.rows_of(advice)
    console.terminal().print(console.table(advising.COLUMNS, rows, right=advising.COLUMNS[3:]))
    for line in advising.verdict_of(advice):
        click.echo(line)


def _say(wire: "Ruling") -> None:
    from protocol.trust.rulings import in_words, ruling_from_json

    ruling = ruling_from_json(wire.ruling_json)
    click.echo(f"ruling {ruling.number}: {in_words(ruling)}")


@click.command()
@click.option("--json", "is_json", is_flag=True, help="Print JSON: a list of objects.")
@DIR_OPTION
def audit(is_json: bool, directory: Path | None) -> None:
    """Show the audit log: who joined by which invite, was approved or expelled, what was changed.

    Each ruling is signed and names the digest of the one before; all are checked here. Where members are
    put out for a lie, so is the evidence: signatures of the liar, or of those who audited it.

    \b
    Example:
      atoll audit --json

    \b
    JSON is a list of rulings with their digests:
      [{"number": 3, "kind": "expelled", "by": "the run owner", "unix_seconds": 1764000000.0,
        "node_name": "node-7", "reason": "…", "before": "5d41…", "digest": "8f3a…", …}]
    """
    from dataclasses import asdict

    from protocol.trust.rulings import in_words

    signed, proofs = _checked_log(directory)
    if is_json:
        console.print_json(
            [{**asdict(one.ruling), "digest": one.ruling.digest().hex()} for one in signed]
        )
        return
    if not signed:
        click.echo("nothing was ruled yet; 'atoll invite create' makes the first invite")
        return
    rows = [
        (
            str(one.ruling.number),
            f"{datetime.fromtimestamp(one.ruling.unix_seconds, UTC):%Y-%m-%d %H:%M:%S}",
            one.ruling.by,
            in_words(one.ruling) + (f" (proven by {proof})" if proof else ""),
        )
        for one, proof in zip(signed, proofs, strict=True)
    ]
    console.terminal().print(console.table(("", "UTC", "by", "what"), rows, right=("",)))
    rulings = "1 ruling" if len(rows) == 1 else f"{len(rows)} rulings"
    click.echo(f"{rulings}, all signed, none missing")


def _checked_log(directory: Path | None) -> "tuple[list[SignedRuling], list[str]]":
    """All rulings, as the coordinator has them, with what proves them, in words.

    Raises BadDataError where they do not hold together, or their evidence proves nothing.
    """
    from coordinator.cli import folder_of
    from protocol.trust.credentials import Credentials
    from protocol.trust.evidence import proven_by
    from protocol.trust.rulings import RulingVerifier, checked_chain, rulings_from_wire
    from protocol.v1 import operator_pb2 as pb
    from protocol.v1.ruling_pb2 import Rulings
    from protocol.wire.rounds import Digest

    found: list[SignedRuling] = []
    proofs: list[str] = []
    with operator_of(directory) as stub:
        while True:
            answer = stub.ListRulings(pb.ListRulingsRequest(after=len(found)))
            if not answer.rulings:
                break
            page = rulings_from_wire(Rulings(rulings=answer.rulings))
            run_digest = Digest(answer.run_digest)
            found += page
            proofs += [proven_by(one.ruling, run_digest=run_digest) for one in page]
    ours = Credentials.load(folder_of(directory))
    checked_chain(found, RulingVerifier.of_authority(ours.authority_pem, ours.certificate_pem))
    return found, proofs


@click.command()
@click.argument("ranges", metavar="[FIRST-END]...", nargs=-1)
@click.option(
    "--round", "round_number", type=click.IntRange(1), help="Take out what a round trained."
)
@DIR_OPTION
def skip(ranges: tuple[str, ...], round_number: int | None, directory: Path | None) -> None:
    """Take samples out of a run, after a spike of the loss: from then on nobody trains them.

    FIRST-END are places in the run's sample order, from FIRST to the one before END, as 'atoll data'
    counts them; whole inner steps are taken out. What is leased now is trained to its end.

    \b
    Examples:
      atoll data skip 36000-36800
      atoll data skip --round 120
    """
    from protocol.v1.operator_pb2 import SampleRange, SkipSamplesRequest

    asked = [SampleRange(first=first, end=end) for first, end in map(_range, ranges)]
    with operator_of(directory) as stub:
        answer = stub.SkipSamples(SkipSamplesRequest(ranges=asked, round=round_number or 0))
    for piece in answer.ranges:
        click.echo(f"samples {piece.first} to {piece.end - 1} are not leased any more")


def _range(text: str) -> tuple[int, int]:
    first, _, end = text.partition("-")
    if not (first.isdecimal() and end.isdecimal() and int(first) < int(end) < 1 << 63):
        raise UsageError(
            f"{text!r} is no range of samples",
            next_step="write the first place and the one after the last, as 36000-36800",
        )
    return int(first), int(end)
