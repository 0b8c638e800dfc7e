"""The network lab with real sockets: what is cut, refused, slow or lost, and that nothing stays."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from lab.network import lab as network_lab
from lab.network.lab import LabBrokenError, LabUnavailableError, NetworkLab
from lab.network.links import Link
from protocol.errors import UsageError
from tests.integration.lab_scene import SECONDS, Post, begin_to_dial, is_refused, listen, talk
from tests.integration.typed_commands import ROOT, until

NAMED_NAMESPACES = Path("/var/run/netns")

StartLab = Callable[..., NetworkLab]

pytestmark = pytest.mark.usefixtures("may_make_network_labs")


@pytest.fixture
def start_lab() -> Iterator[StartLab]:
    """Starts a lab with free links, apart from those that are given."""
    with ExitStack() as labs:

        def start(*hosts: str, seed: int = 0, **links: Link) -> NetworkLab:
            return labs.enter_context(NetworkLab(dict.fromkeys(hosts, Link()) | links, seed=seed))

        yield start


@pytest.fixture
def sockets() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def inode_of(lab: NetworkLab, host: str) -> int:
    with lab.inside(host):
        return os.stat("/proc/thread-self/ns/net").st_ino  # noqa: PTH116 (as the kernel says it)


def holders_of(namespaces: set[int]) -> set[str]:
    """All by which a namespace without a name can live on: processes in it, descriptors of it."""
    found = set()
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            with suppress(OSError):
                for way in (process / "ns" / "net", *(process / "fd").iterdir()):
                    with suppress(OSError):
                        if way.readlink().name in {f"net:[{inode}]" for inode in namespaces}:
                            found.add(str(way))
    return found


def test_a_cut_in_one_direction_leaves_the_other(start_lab: StartLab, sockets: ExitStack) -> None:
    lab = start_lab("one", "other")
    post = Post(lab, sockets)
    assert post.ways() == {"one→other", "other→one"}
    lab.cut("one", "other", one_way=True)
    assert post.ways() == {"other→one"}
    lab.cut("one", "other")
    assert post.ways() == set()
    lab.mend("one", "other")
    assert post.ways() == {"one→other", "other→one"}
    assert lab.traffic("one", "other").cut_packets == 2
    assert lab.traffic("other", "one").cut_packets == 1


def test_hosts_are_isolated_and_parted_and_mended(start_lab: StartLab, sockets: ExitStack) -> None:
    lab = start_lab("a", "b", "c")
    post = Post(lab, sockets)
    everywhere = post.ways()
    assert len(everywhere) == 6
    lab.isolate("a")
    assert post.ways() == {"b→c", "c→b"}
    lab.mend("a", "b")
    assert post.ways() == {"a→b", "b→a", "b→c", "c→b"}
    lab.mend("a").partition({"a", "b"}, {"c"})
    assert post.ways() == {"a→b", "b→a"}
    lab.isolate("b").mend("c")
    assert post.ways() == everywhere - {"a→b", "b→a"}
    lab.mend()
    assert post.ways() == everywhere


def test_a_connection_outlives_a_cut_that_is_mended(
    start_lab: StartLab, sockets: ExitStack
) -> None:
    lab = start_lab("one", "other")
    listener = listen(lab, "other", sockets)
    dialler = begin_to_dial(lab, "one", listener, sockets)
    select.select([], [dialler], [], SECONDS)
    accepted = sockets.enter_context(listener.accept()[0])
    accepted.settimeout(SECONDS)
    lab.cut("one", "other")
    dialler.sendall(b"late")
    until(lambda: lab.traffic("one", "other").cut_packets > 0, "a packet into the cut")
    assert not select.select([accepted], [], [], 0)[0]
    lab.mend("one", "other")
    assert accepted.recv(100) == b"late"


def test_a_firewalled_host_dials_and_cannot_be_dialled(
    start_lab: StartLab, sockets: ExitStack
) -> None:
    lab = start_lab("open", "behind").firewall("behind")
    outside, inside = listen(lab, "open", sockets), listen(lab, "behind", sockets)
    assert talk(begin_to_dial(lab, "behind", outside, sockets), outside)
    assert is_refused(lab, "open", inside, sockets)
    lab.firewall("behind", is_up=False)
    assert talk(begin_to_dial(lab, "open", inside, sockets), inside)


def test_two_firewalled_hosts_cannot_reach_each_other(
    start_lab: StartLab, sockets: ExitStack
) -> None:
    lab = start_lab("one", "other", "open").firewall("one").firewall("other")
    listeners = {host: listen(lab, host, sockets) for host in lab.hosts}
    assert is_refused(lab, "one", listeners["other"], sockets)
    assert is_refused(lab, "other", listeners["one"], sockets)
    for host in ("one", "other"):
        assert talk(begin_to_dial(lab, host, listeners["open"], sockets), listeners["open"])


def test_a_link_lets_no_more_through_than_its_rate(start_lab: StartLab, sockets: ExitStack) -> None:
    """TCP fills the link, and overflows its buffer, so that it is the link that holds it back."""
    rate = 8e6
    lab = start_lab("far", near=Link(up_bits_per_second=rate, buffer_bytes=20_000))
    listener = listen(lab, "far", sockets)
    dialler = begin_to_dial(lab, "near", listener, sockets)
    select.select([], [dialler], [], SECONDS)
    accepted = sockets.enter_context(listener.accept()[0])
    unsent, num_received, began = bytes(1_000_000), 0, time.monotonic()
    while num_received < 1_000_000:
        readable, writable, _ = select.select([accepted], [dialler] if unsent else [], [], SECONDS)
        assert readable or writable
        if writable:
            unsent = unsent[dialler.send(unsent) :]
        if readable:
            num_received += len(accepted.recv(1 << 16))
            assert num_received * 8 <= rate * (time.monotonic() - began)
    there, back = lab.traffic("near", "far"), lab.traffic("far", "near")
    assert there.delivered_bytes > 1_000_000
    assert there.overflowed_packets > 0
    assert back.dropped_packets == 0


def test_bytes_take_at_least_their_time_and_the_round_trip_its_delay(
    start_lab: StartLab, sockets: ExitStack
) -> None:
    rate = 4e6
    lab = start_lab(
        near=Link(up_bits_per_second=rate, delay_seconds=0.02), far=Link(delay_seconds=0.03)
    )
    post = Post(lab, sockets)
    began = time.monotonic()
    for source, target in (("near", "far"), ("far", "near")):
        assert post.gets_through(source, target)
    assert time.monotonic() - began >= 2 * (0.02 + 0.03)
    began, bytes_before = time.monotonic(), lab.traffic("near", "far").delivered_bytes
    post.send("near", "far", *[bytes(1000)] * 100)
    num_bytes = lab.traffic("near", "far").delivered_bytes - bytes_before
    assert num_bytes == 100 * 1028
    assert num_bytes * 8 <= rate * (time.monotonic() - began)


def test_a_link_changes_while_the_lab_runs(start_lab: StartLab, sockets: ExitStack) -> None:
    lab = start_lab("near", "far")
    post = Post(lab, sockets)
    assert post.ways() == {"near→far", "far→near"}
    lab.set_link("near", Link(loss=1.0))
    assert post.ways() == set()
    assert lab.traffic("near", "far").lost_packets == 1
    lab.set_link("near", Link(delay_seconds=0.1))
    began = time.monotonic()
    assert post.gets_through("far", "near")
    assert time.monotonic() - began >= 0.1


def test_the_seed_says_which_packets_are_lost(start_lab: StartLab, sockets: ExitStack) -> None:
    def arrived(seed: int) -> list[bytes]:
        lab = start_lab("far", near=Link(loss=0.2), seed=seed)
        post = Post(lab, sockets)
        found = []
        for start in range(0, 1000, 50):
            post.send("near", "far", *(b"%d" % number for number in range(start, start + 50)))
            found += post.received("far")
        assert lab.traffic("near", "far").lost_packets == 1000 - len(found)
        return found

    once = arrived(1)
    assert 0.15 < 1 - len(once) / 1000 < 0.25
    assert arrived(1) == once
    assert arrived(2) != once


def test_a_process_lives_in_its_host_and_keeps_its_id(start_lab: StartLab) -> None:
    lab = start_lab("one", "other")
    shown = lab.popen(
        "other",
        [
            sys.executable,
            "-c",
            "import os, subprocess; print(os.getpid(), flush=True);"
            " subprocess.run(['ip', '-brief', 'address'])",
        ],
        stdout=subprocess.PIPE,
    )
    printed = shown.communicate(timeout=SECONDS)[0].decode().splitlines()
    assert printed[0] == str(shown.pid)
    assert {line.split()[0] for line in printed[1:]} == {"lo", "tun0"}
    assert f"{lab.address('other')}/16" in "".join(printed[1:])


def test_nothing_is_left_of_a_lab(start_lab: StartLab) -> None:
    named_before = set(NAMED_NAMESPACES.glob("*"))
    with NetworkLab({"one": Link(), "other": Link()}) as lab:
        inodes = {inode_of(lab, host) for host in lab.hosts}
        stays = lab.popen("one", ["sleep", "1000"])
        # A grandchild that its parent does not wait for, in a session of its own.
        lab.popen("other", ["setsid", "--fork", "sleep", "1000"]).wait(SECONDS)
        switch = lab.switch_process_id
        until(lambda: len(holders_of(inodes)) == 4, f"four, and not {holders_of(inodes)}")
    assert holders_of(inodes) == set()
    assert stays.returncode == -signal.SIGKILL
    assert not Path(f"/proc/{switch}").exists()
    assert set(NAMED_NAMESPACES.glob("*")) == named_before


_DIES = """
import os, subprocess, sys, time
from lab.network.lab import NetworkLab
from lab.network.links import Link
with NetworkLab({"one": Link(), "other": Link()}) as lab:
    stays = lab.popen("one", ["sleep", "1000"])
    lab.popen("other", ["setsid", "--fork", "sleep", "1000"]).wait()
    inodes = []
    for host in lab.hosts:
        with lab.inside(host):
            inodes.append(os.stat("/proc/thread-self/ns/net").st_ino)
    fork = os.fork() if sys.argv[1] == "forked" else 1  # it inherits the switch's socket
    if fork == 0:
        time.sleep(1000)
    print(*inodes, fork, flush=True)
    time.sleep(1000)
"""


@pytest.mark.parametrize("how", ["alone", "forked"])
def test_nothing_is_left_when_the_process_with_the_lab_is_killed(how: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _DIES, how], stdout=subprocess.PIPE, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        *inodes, fork = map(int, process.stdout.readline().split())
        try:
            assert len(holders_of(set(inodes))) >= 4
            process.kill()
            process.wait(SECONDS)
            until(lambda: not holders_of(set(inodes)), f"the end of {holders_of(set(inodes))}")
        finally:
            if how == "forked":
                os.kill(fork, signal.SIGKILL)


def test_a_lab_whose_switch_was_killed_says_so_and_leaves_nothing() -> None:
    with NetworkLab({"one": Link(), "other": Link()}) as lab:
        inodes = {inode_of(lab, host) for host in lab.hosts}
        stays = lab.popen("one", ["sleep", "1000"])
        until(lambda: len(holders_of(inodes)) == 3, "a process in its host")
        os.kill(lab.switch_process_id, signal.SIGKILL)
        with pytest.raises(LabBrokenError, match="switch"):
            lab.cut("one", "other")
        assert stays.poll() is None
    assert stays.returncode == -signal.SIGKILL
    assert holders_of(inodes) == set()


_HOLDS_MEMORY = """
import time
from multiprocessing.shared_memory import SharedMemory
block = SharedMemory(create=True, size=1)
print(block.name, flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("is_switch_killed", [False, True])
def test_the_end_of_a_lab_gives_back_the_shared_memory_of_its_processes(
    is_switch_killed: bool,
) -> None:
    with NetworkLab({"one": Link()}) as lab:
        command = [sys.executable, "-c", _HOLDS_MEMORY]
        holds = lab.popen("one", command, stdout=subprocess.PIPE)
        assert holds.stdout is not None
        with holds.stdout:
            block = Path("/dev/shm") / holds.stdout.readline().decode().strip()
        assert block.exists()
        if is_switch_killed:
            os.kill(lab.switch_process_id, signal.SIGKILL)
    assert not block.exists()


_LOOKS_IN = """
import time
from pathlib import Path
from lab.network.lab import NetworkLab
from lab.network.links import Link
lab = NetworkLab({"one": Link()}).__enter__()
stays = lab.popen("one", ["sleep", "1000"])
while Path(f"/proc/{stays.pid}/comm").read_text() != "sleep\\n":  # it is not there yet
    time.sleep(0.01)
with lab.inside("one"):  # as its main thread is, so is the process, for who looks for processes
    lab.__exit__()
print("alive, and that ended with", stays.returncode)
"""


def test_the_end_of_a_lab_spares_the_process_that_looks_into_a_host() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _LOOKS_IN], cwd=ROOT, capture_output=True, text=True, timeout=SECONDS
    )
    assert ran.stdout == f"alive, and that ended with {-signal.SIGKILL}\n", (ran.returncode, ran)


def test_a_mistake_is_one_sentence(start_lab: StartLab) -> None:
    lab = start_lab("one", "other")
    for mistake in (
        lambda: lab.cut("one", "tow"),
        lambda: lab.popen("tow", ["true"]),
        lambda: lab.traffic("tow", "one"),
        lambda: lab.partition({"one"}, {"tow"}),
        lambda: lab.mend("tow"),
        lambda: lab.address("tow"),
    ):
        with pytest.raises(UsageError, match="no host 'tow'; name one of one, other"):
            mistake()
    with pytest.raises(UsageError, match="what one sends to itself"):
        lab.traffic("one", "one")


def test_what_the_machine_refuses_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        pytest.raises(LabUnavailableError, match=r"refuses a network lab: ip: .*congestion"),
        NetworkLab({"one": Link()}, congestion_control="nonsense"),
    ):
        pass
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: 1000)
        with pytest.raises(LabUnavailableError, match="needs root, and this is user 1000"):
            network_lab.check_this_machine()
    with monkeypatch.context() as patched:
        patched.setenv("PATH", "")
        with pytest.raises(LabUnavailableError, match="needs 'ip'"):
            network_lab.check_this_machine()
    monkeypatch.setattr(network_lab, "TUN_DEVICE", Path("/dev/no-tun"))
    with pytest.raises(LabUnavailableError, match="needs /dev/no-tun"):
        network_lab.check_this_machine()
