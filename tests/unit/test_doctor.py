"""What the doctor finds wrong, what it advises, and how it ends."""

import json
import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from node.config import RULINGS_FILE, NodeSettings
from node.disk.history import History, KeptRulings
from node.doctor import checks
from node.doctor.checks import router_finding
from node.doctor.command import as_json, line_of, run_doctor, summary_of
from node.doctor.network import (
    LARGE_BUFFER_BYTES,
    Finding,
    Network,
    exit_code_of,
    kernel_findings,
    what_to_use,
    wrong,
)
from node.kept import keep_run
from node.machine.gpus import Gpu
from node.machine.hardware import Hardware, congestion_control
from node.outer_state import SHARED_MEMORY
from node.records import Records
from protocol.errors import ConfigError, ExitCode, SystemRefusedError, UnavailableError
from protocol.files.durable import FolderLock
from protocol.run.amendments import amended
from protocol.run.run_spec import RunSpec
from protocol.terminal.node_words import ways_of
from protocol.trust.credentials import LINK_FILE
from protocol.trust.rulings import SignedRuling
from protocol.v1.status_pb2 import NODE_STATE_READY, NodeStatus
from tests.tiny_runs import tiny
from tests.unit.rulings_scene import amendment

FAST = {
    "tcp_slow_start_after_idle": "0",
    "tcp_rmem": f"4096\t131072\t{LARGE_BUFFER_BYTES}",
    "tcp_wmem": f"4096\t16384\t{LARGE_BUFFER_BYTES}",
    "tcp_congestion_control": "bbr",
    "tcp_available_congestion_control": "reno bbr cubic",
}


def kernel(folder: Path, **changes: str | None) -> list[Finding]:
    """What is found with these settings; None is one that this kernel has not."""
    (folder / "net/ipv4").mkdir(parents=True)
    for name, value in (FAST | changes).items():
        if value is not None:
            (folder / "net/ipv4" / name).write_text(f"{value}\n")
    return kernel_findings(folder)


def advice_in(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.verdict == "advice"]


# The disk


def test_what_a_run_needs_of_the_disk_is_told_and_how_fast_it_is_written(tmp_path: Path) -> None:
    (before,) = checks.disk_findings(tmp_path, NodeSettings(name="n"))
    assert before.verdict == "note" and "free" in before.what
    keep_run(tmp_path, tiny())
    (found,) = checks.disk_findings(tmp_path, NodeSettings(name="n"))
    assert found.verdict == "fine"
    beside = (
        "99.1 MB more for commits and logs"  # which no setting of the run or node makes smaller
    )
    for words in (
        "for snapshots",
        "for results",
        "for checkpoints",
        "40.0 MB/s on average",
        beside,
    ):
        assert words in found.what
    (without,) = checks.disk_findings(tmp_path, NodeSettings(name="n", checkpoint_every_rounds=0))
    assert "checkpoints" not in without.what


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (os.ST_RDONLY, "Read-only file system; that disk can only be read: mount it"),
        (0, "Permission denied; make "),
    ],
)
def test_a_folder_that_the_node_could_not_write_to_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: int, words: str
) -> None:
    keep_run(tmp_path, tiny())
    (tmp_path / "snapshots").mkdir()
    may_write = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: path.name != "snapshots" and may_write(path, mode)
    )  # root may write everywhere
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=flags))
    (found,) = checks.disk_findings(tmp_path, NodeSettings(name="n"))
    assert found.verdict == "wrong"
    told = f"{found.what}; {found.next_step}"
    assert told.startswith(f"cannot write {tmp_path / 'snapshots'}: {words}")


def test_less_shared_memory_than_the_outer_state_takes_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_run(tmp_path, tiny())
    real = os.statvfs
    small = SimpleNamespace(f_blocks=4, f_frsize=4096)  # docker's default is 64 MB
    monkeypatch.setattr(os, "statvfs", lambda at: small if at == SHARED_MEMORY else real(at))
    (found,) = checks.disk_findings(tmp_path, NodeSettings(name="n"))
    assert found.verdict == "wrong"
    assert found.what.endswith("bytes of /dev/shm and it has 16,384")
    assert "--shm-size" in found.next_step


def test_a_node_that_has_joined_and_never_started_asks_its_coordinator_what_the_run_needs(
    tmp_path: Path,
) -> None:
    (tmp_path / LINK_FILE).touch()

    async def told(_: Path) -> RunSpec:
        return tiny()

    async def away(_: Path) -> RunSpec:
        raise UnavailableError("nobody is there")

    (asked,) = checks.disk_findings(tmp_path, NodeSettings(name="n"), ask=told)
    (unasked,) = checks.disk_findings(tmp_path, NodeSettings(name="n"), ask=away)
    assert unasked.verdict == "note"
    assert unasked.what.endswith("free; what a run needs is not known: nobody is there")
    keep_run(tmp_path, tiny())
    (started,) = checks.disk_findings(tmp_path, NodeSettings(name="n"), ask=away)
    assert asked.verdict == "fine" and asked.what == started.what


def test_what_results_of_an_amended_run_need_of_the_disk_goes_by_their_codec(
    tmp_path: Path,
) -> None:
    spec = tiny()
    keep_run(tmp_path, spec)
    (before,) = checks.disk_findings(tmp_path, NodeSettings(name="n"))
    finer = amendment(2, exchange__downlink="fp32/1")
    KeptRulings(spec, path=tmp_path / RULINGS_FILE).take(
        [SignedRuling(ruling=finer, signature=bytes(64))]
    )
    (after,) = checks.disk_findings(tmp_path, NodeSettings(name="n"))
    assert before.verdict == after.verdict == "fine" and before.what != after.what

    def result_bytes(rules: RunSpec) -> int:
        history, settings = History(None), NodeSettings(name="n")
        records = Records.of(tmp_path, settings, spec, rules=rules, history=history, num_ranks=1)
        return sum(need.num_bytes for need in records.needs)

    rules = amended(spec, finer.changes)
    assert result_bytes(rules) > result_bytes(spec)
    coarser = amended(spec, (("exchange.downlink", "int2"),))
    assert result_bytes(coarser) == result_bytes(spec), "results of before may be there"


def test_a_run_that_its_owner_gives_too_little_disk_is_told_with_what_to_do(tmp_path: Path) -> None:
    keep_run(tmp_path, tiny())
    (found,) = checks.disk_findings(tmp_path, NodeSettings(name="n", max_disk="0.001MB"))
    assert found.verdict == "wrong" and "max_disk allows 1,000" in found.what
    assert found.next_step.startswith("raise max_disk in node.toml to ") and "MB" in found.next_step
    needed = found.next_step.removeprefix("raise max_disk in node.toml to ").split()[0]
    enough = NodeSettings(name="n", max_disk=needed)
    assert [each.verdict for each in checks.disk_findings(tmp_path, enough)] == ["fine"]
    of_all = int(found.what.split("needs ")[1].split()[0].replace(",", ""))
    scarce = NodeSettings(name="n", max_disk=f"{of_all / 1e6 - 0.01:.3f}MB")
    (found,) = checks.disk_findings(tmp_path, scarce)
    assert ", or set keep_snapshots = 0 in node.toml, or set checkpoint_every" in found.next_step


# The kernel


def test_a_kernel_that_is_set_for_long_links_is_fine(tmp_path: Path) -> None:
    found = kernel(tmp_path)
    assert [finding.verdict for finding in found] == ["fine", "note"]
    assert "bbr" in found[1].what and not found[1].next_step


def test_a_slow_start_after_each_pause_is_told_with_its_command(tmp_path: Path) -> None:
    (advice,) = advice_in(kernel(tmp_path, tcp_slow_start_after_idle="1"))
    assert "sudo sysctl -w net.ipv4.tcp_slow_start_after_idle=0" in advice.next_step


@pytest.mark.parametrize(
    ("name", "words"), [("tcp_rmem", "are received"), ("tcp_wmem", "are sent")]
)
def test_buffers_too_small_for_a_long_fast_link_are_told(
    tmp_path: Path, name: str, words: str
) -> None:
    (advice,) = advice_in(kernel(tmp_path, **{name: "4096\t87380\t5000000"}))
    assert "5.0 MB" in advice.what
    assert "200 Mbit/s" in advice.what  # 5 MB in 0.2 s
    assert words in advice.what
    assert f"sysctl -w net.ipv4.{name}='4096 " in advice.next_step
    assert f"{LARGE_BUFFER_BYTES}'" in advice.next_step


def test_buffers_that_hold_what_is_under_way_are_not_told(tmp_path: Path) -> None:
    assert not advice_in(kernel(tmp_path, tcp_rmem="4096 131072 25000000"))  # 1 Gbit/s · 0.2 s


def test_what_is_advised_is_not_advised_again(tmp_path: Path) -> None:
    slow = {"tcp_slow_start_after_idle": "1", "tcp_rmem": "4 5 6", "tcp_wmem": "4 5 6"}
    done = {}
    for advice in advice_in(kernel(tmp_path / "before", **slow)):
        name, _, value = advice.next_step.partition("sysctl -w ")[2].partition("=")
        done[name.rpartition(".")[2]] = value.split("'")[1] if "'" in value else value[0]
    assert set(done) == set(slow)
    assert not advice_in(kernel(tmp_path / "after", **slow | done))


@pytest.mark.parametrize(("there", "is_loaded"), [("reno cubic", False), ("reno cubic bbr", True)])
def test_bbr_is_only_mentioned(tmp_path: Path, there: str, is_loaded: bool) -> None:
    found = kernel(tmp_path, tcp_congestion_control="cubic", tcp_available_congestion_control=there)
    assert not advice_in(found)
    assert "cubic" in found[-1].what
    assert ("modprobe tcp_bbr" in found[-1].next_step) == (not is_loaded)


def test_a_node_tells_what_its_kernel_uses_and_nothing_where_that_is_not_to_be_read(
    tmp_path: Path,
) -> None:
    assert congestion_control(tmp_path) is None
    kernel(tmp_path, tcp_congestion_control="reno")
    assert congestion_control(tmp_path) == "reno"


def test_a_system_without_these_settings_gives_a_note(tmp_path: Path) -> None:
    assert [finding.verdict for finding in kernel_findings(tmp_path)] == ["note"]
    found = kernel(tmp_path, **dict.fromkeys(FAST))
    assert not advice_in(found)
    assert exit_code_of(found) == ExitCode.OK


# This machine


def test_missing_software_is_wrong() -> None:
    found = checks.version_findings(["click", "no-such-thing"])
    assert [finding.verdict for finding in found] == ["fine", "wrong"]
    assert "click " in found[0].what
    assert "no-such-thing" in found[1].what
    assert found[1].exit_code == ExitCode.SYSTEM


def test_devices_are_named_with_what_they_have_left() -> None:
    hardware = Hardware(
        memory_bytes=64 * 10**9,
        gpus=(Gpu(name="One", free_bytes=8 * 10**9), Gpu(name="Two", free_bytes=6 * 10**9)),
    )
    (found,) = checks.device_findings(NodeSettings(name="n", ranks=2), lambda _: hardware)
    assert found.verdict == "fine"
    for words in ("cuda:0, cuda:1", "One (8.0 GB free)", "Two (6.0 GB free)", "64.0 GB"):
        assert words in found.what


def test_a_device_that_is_not_there_is_what_the_start_would_refuse() -> None:
    nothing = Hardware(memory_bytes=1, gpus=())
    settings = NodeSettings(name="n", device="cuda")
    (found,) = checks.device_findings(settings, lambda _: nothing)
    assert (found.verdict, found.exit_code) == ("wrong", ExitCode.CONFIG)
    assert "no CUDA GPU is usable here" in found.what


def test_a_gpu_that_only_torch_can_tell_of_is_a_note() -> None:
    unknown = Hardware(memory_bytes=1, gpus=None)
    (found,) = checks.device_findings(NodeSettings(name="n"), lambda _: unknown)
    assert found.verdict == "note"


def test_more_ranks_than_open_files_allow_are_wrong() -> None:
    assert checks.open_files_findings(1)[0].verdict == "fine"
    (found,) = checks.open_files_findings(10**12)
    assert (found.verdict, found.exit_code) == ("wrong", ExitCode.SYSTEM)


def test_a_port_that_another_program_has_is_wrong(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        settings = NodeSettings(name="n", listen="127.0.0.1", port=port)
        (found,) = checks.port_findings(tmp_path, settings)
    assert (found.verdict, found.exit_code) == ("wrong", ExitCode.SYSTEM)
    assert f"127.0.0.1 port {port}" in found.what
    free = NodeSettings(name="n", listen="127.0.0.1")
    assert checks.port_findings(tmp_path, free)[0].verdict == "fine"


def test_beside_a_running_node_its_port_is_its_own(tmp_path: Path) -> None:
    lock = FolderLock.take(tmp_path, holder="node", next_step="")
    try:
        (found,) = checks.port_findings(tmp_path, NodeSettings(name="n"))
    finally:
        lock.release()
    assert found.verdict == "note"


# The coordinator


@pytest.mark.parametrize(("ahead", "words"), [(95.0, "1 min 35 s ahead"), (-40.0, "40 s behind")])
def test_a_clock_that_is_far_off_is_advice(ahead: float, words: str) -> None:
    (found,) = checks.skew_findings(theirs=1e9, ours=1e9 + ahead)
    assert found.verdict == "advice"
    assert words in found.what
    assert checks.skew_findings(theirs=1e9, ours=1e9 + 20)[0].verdict == "fine"


def test_a_coordinator_that_tells_no_time_is_not_compared_with() -> None:
    assert checks.skew_findings(theirs=0.0, ours=1e9) == []


def test_without_a_swarm_no_coordinator_is_asked(tmp_path: Path) -> None:
    (found,) = checks.coordinator_findings(tmp_path)
    assert found.verdict == "note"


# Who reaches whom


def members(*cut: tuple[int, int], has_helper: bool = False) -> list[NodeStatus]:
    """Three nodes and perhaps a helper, of whom pairs are cut off, as the first of each says."""
    nodes = [
        NodeStatus(node_id=str(place), node_name=f"node-{place}", state=NODE_STATE_READY)
        for place in range(3)
    ]
    if has_helper:
        helper = NodeStatus(node_id="3", node_name="helper-1", state=NODE_STATE_READY)
        helper.is_helper = True
        nodes.append(helper)
    for one, other in cut:
        nodes[one].heartbeat.unreachable_ids.append(str(other))
    return nodes


def test_a_proxy_that_the_environment_names_is_told_to_be_out_of_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert checks.proxy_findings(tmp_path) == []
    monkeypatch.setenv("https_proxy", "http://me:secret@proxy.example:3128/")
    (found,) = checks.proxy_findings(tmp_path)
    assert found.verdict == "note" and "nothing here goes through it" in found.what
    assert found.next_step.endswith('proxy = "http://proxy.example:3128"')
    assert "secret" not in found.what + found.next_step


def test_a_node_that_reaches_all_is_fine_and_one_that_does_not_run_is_not_judged() -> None:
    (found,) = checks.reach_findings(members((1, 2)), "0")
    assert (found.verdict, found.what) == ("fine", "all 2 other members")
    assert checks.reach_findings(members(), "9") == []


def test_without_a_helper_a_node_that_others_do_not_reach_is_advised_to_open_its_port() -> None:
    (found,) = checks.reach_findings(members((1, 0)), "0")
    assert found.verdict == "advice"
    assert "no connection with node-1" in found.what
    assert "--role helper" in found.next_step


def test_a_helper_that_reduces_for_it_is_named_and_one_that_it_does_not_reach_is_none() -> None:
    (found,) = checks.reach_findings(members((0, 1), has_helper=True), "0")
    assert (found.verdict, "helper-1" in found.what) == ("note", True)
    (found,) = checks.reach_findings(members((0, 1), (0, 3), has_helper=True), "0")
    assert found.verdict == "advice"


def test_a_router_that_no_hole_can_be_punched_in_is_said() -> None:
    nodes = members((0, 1))
    (found,) = checks.reach_findings(nodes, "0")
    assert "symmetric" not in found.what
    nodes[0].has_symmetric_router = True
    (found,) = checks.reach_findings(nodes, "0")
    assert "this machine's router is symmetric" in found.what


def test_one_that_others_carry_to_is_told_by_whom() -> None:
    nodes = members((0, 1))
    nodes[0].heartbeat.through.add(node_id="1", through_id="2")
    (found,) = checks.reach_findings(nodes, "0")
    assert (found.verdict, found.what) == ("note", "no connection with node-1, but through node-2")


def test_a_member_that_the_proxy_leads_to_is_reached() -> None:
    nodes = members()
    nodes[0].heartbeat.by_proxy_ids.append("1")
    (found,) = checks.reach_findings(nodes, "0")
    assert found.verdict == "fine"
    last = what_to_use(joined(ways=ways_of(nodes[0], nodes)))
    assert (last.verdict, "the proxy does here" in last.what) == ("fine", True)


def test_one_to_whom_large_packets_get_lost_is_named_with_the_command_that_mends_it() -> None:
    nodes = members((0, 1))
    nodes[0].heartbeat.narrow_ids.append("1")
    (found,) = checks.reach_findings(nodes, "0")
    assert (found.verdict, "to node-1: larger ones get lost" in found.what) == ("advice", True)
    assert "mtu 1280" in found.next_step
    last = what_to_use(joined(ways=ways_of(nodes[0], nodes)))
    assert "a smaller MTU is needed" in last.what and "mtu 1280" in last.next_step


# What the network needs


def joined(**facts: object) -> Network:
    return Network(has_joined=True, **facts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("network", "verdict", "words"),
    [
        (Network(), "note", "shows once a swarm is joined"),
        (joined(is_local=True), "fine", "nothing is needed: the coordinator and its nodes are on"),
        (joined(own_address="203.0.113.5"), "fine", "nothing is needed if no firewall closes its"),
        (
            joined(own_address="2001:db8::5"),
            "fine",
            "IPv4 is not to be had here; members that have nothing",
        ),
        (
            joined(own_address="2001:db8::5", has_ipv6_only=True),
            "note",
            "2001:db8::5 serves those who have IPv6, by holes where a firewall closes its TCP ports, and "
            "for all others holes in this router",
        ),
        (
            joined(own_address="2001:db8::5", has_ipv6_only=True, forwarded="203.0.113.9"),
            "fine",
            "a port was mapped at 203.0.113.9",
        ),
        (
            joined(forwarded="100.72.3.4", is_forwarded_wide=False),
            "note",
            "100.72.3.4, and is behind another router itself (the provider's, or a second one here), so "
            "others do not get there: holes in this router",
        ),
        (
            joined(forwarded="100.72.3.4", is_forwarded_wide=False, why_no_holes="not permitted"),
            "advice",
            "can be punched: not permitted",
        ),
        (joined(announce="my.example", port=7710), "fine", "if TCP port 7710 of my.example leads"),
        (joined(announce="my.example"), "fine", "set port in node.toml"),
        (joined(forwarded="203.0.113.9"), "fine", "a port was mapped at 203.0.113.9"),
        (joined(), "note", "holes in this router and the others' will do"),
        (
            joined(proxy="proxy.example:3128"),
            "advice",
            "is needed, or on another to which the proxy proxy.example:3128 leads, for nobody dials",
        ),
        (joined(why_no_holes="not permitted"), "advice", "can be punched: not permitted"),
        (joined(ways=[("a", "direct")]), "fine", "all other members are reached directly"),
        (joined(ways=[("a", "punched"), ("b", "direct")]), "fine", "holes do here"),
        (joined(ways=[("a", "through b"), ("b", "direct")]), "fine", "it reaches through b"),
        (joined(ways=[("a", "not reached")]), "advice", "a and this node do not reach each other"),
    ],
)
def test_the_last_word_names_what_to_use_here_in_one_sentence(
    network: Network, verdict: str, words: str
) -> None:
    found = what_to_use(network)
    assert (found.about, found.verdict) == ("network", verdict)
    assert words in found.what
    assert ". " not in found.what
    assert ("atoll helper start" in found.next_step) == (
        verdict == "advice" or "symmetric" in found.what
    )


def test_what_runs_is_believed_before_what_is_set_and_what_is_set_before_what_a_router_says() -> (
    None
):
    known = {"forwarded": "203.0.113.9", "announce": "my.example", "own_address": "203.0.113.5"}
    assert "do not reach" in what_to_use(joined(ways=[("a", "not reached")], **known)).what
    assert "my.example" in what_to_use(joined(**known)).what


# How it ends


def test_the_first_thing_that_is_wrong_decides_on_the_exit_code() -> None:
    fine = Finding(about="a", verdict="fine", what="good")
    advice = Finding(about="b", verdict="advice", what="slow", next_step="do")
    config = wrong("c", ConfigError("bad key", next_step="mend it"))
    system = wrong("d", SystemRefusedError("no"))
    assert exit_code_of([fine, advice]) == ExitCode.OK
    assert exit_code_of([fine, advice, config, system]) == ExitCode.CONFIG
    assert summary_of([fine]) == "nothing is wrong"
    assert summary_of([fine, advice]) == "nothing is wrong; 1 things could be better"
    assert summary_of([fine, config, system]) == "2 of 3 things are wrong"
    assert line_of(advice) == "advice  b: slow"
    assert json.loads(json.dumps(as_json(config))) == {
        "about": "c",
        "verdict": "wrong",
        "what": "bad key",
        "next_step": "mend it",
        "exit_code": 78,
    }


def test_what_a_router_does_is_said_in_one_sentence() -> None:
    fine = router_finding(("/ip4/93.184.215.14/tcp/51000",))
    assert fine.verdict == "fine" and "at 93.184.215.14" in fine.what
    note = router_finding(())
    assert note.verdict == "note" and "helper" in note.what and "announce" in note.next_step


@pytest.mark.parametrize("host", ["192.168.1.7", "10.0.0.2", "172.16.9.9", "100.72.3.4"])
def test_a_router_behind_another_one_is_not_called_reachable(host: str) -> None:
    found = router_finding((f"/ip4/{host}/tcp/51000",))
    assert (
        found.verdict == "note" and f"of {host}: it is itself behind another router" in found.what
    )
    assert "helper" in found.next_step


@pytest.mark.parametrize(
    ("own", "address", "has_ipv6_only"),
    [
        (["192.168.1.5"], "", False),
        (["93.184.215.14"], "93.184.215.14", False),
        (["2606:2800::5"], "2606:2800::5", False),
        (["192.168.1.5", "2606:2800::5"], "2606:2800::5", True),
        (["2606:2800::5", "fd00::1", "192.168.1.5"], "2606:2800::5", True),
        (["2606:2800::5", "93.184.215.14"], "93.184.215.14", False),
    ],
)
def test_an_address_of_ipv6_does_not_stand_for_one_of_ipv4(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    own: list[str],
    address: str,
    has_ipv6_only: bool,
) -> None:
    monkeypatch.setattr(checks, "own_addresses", lambda: tuple(own))
    found = checks.network_here(tmp_path, NodeSettings(name="here"))
    assert (found.own_address, found.has_ipv6_only) == (address, has_ipv6_only)


@pytest.mark.parametrize("is_json", [False, True])
def test_one_thing_that_is_wrong_does_not_hide_the_next(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_json: bool,
) -> None:
    down = wrong("libp2p", SystemRefusedError("it does not start", next_step="mend it"))
    monkeypatch.setattr(
        checks, "libp2p_findings", lambda *_, **__: [down]
    )  # loading it takes seconds
    (tmp_path / "node.toml").write_text("devise = 'cpu'\n")
    assert run_doctor(tmp_path, is_json=is_json) == ExitCode.CONFIG
    out = capsys.readouterr().out
    if is_json:
        found = json.loads(out)
        assert [f["about"] for f in found if f["verdict"] == "wrong"] == ["settings", "libp2p"]
        assert "kernel" in {f["about"] for f in found}
    else:
        assert "wrong   settings: " in out and "devise: unknown key" in out
        assert "wrong   libp2p: it does not start\n        next: mend it" in out
        ended = out.splitlines()[-3:]
        assert ended[0].startswith("2 of ")
        assert ended[1] == "note    network: what it takes here shows once a swarm is joined"
        assert ended[2] == "        next: atoll join"
