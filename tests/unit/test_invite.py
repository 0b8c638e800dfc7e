from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import BadDataError, UsageError
from protocol.trust.armour import masked
from protocol.trust.invite import INVITE as INVITE_ARMOUR
from protocol.trust.invite import Invite, InvitedBy, endpoint_of, hash_of_secret

INVITE = Invite(
    host="atoll.example.org",
    port=7701,
    pin=bytes(range(32)),
    invite_id="k3v9",
    secret=bytes(range(100, 132)),
)
TEXT = INVITE.encode()
GOLDEN = (
    "atoll1-abpr4fiaaebagbafaydqqcikbmga2dqpcaireeyuculbogazdinryhi6d5sgkzthnbuwu23mn"
    "vxg64drojzxi5lwo54hs6t3pr6x474aqgbigbdlgn3dselborxwy3bomv4gc3lqnrss433sm54vmtcz"
)


def test_an_invite_is_always_written_the_same() -> None:
    assert TEXT == GOLDEN
    assert (
        hash_of_secret(INVITE.secret).hex()
        == "d01cb59d9bd52e10525eea1cdc8815431bdad2b7a62711491bf538c6cfdbb31e"
    )
    assert "secret" not in repr(INVITE)


@given(
    host=st.sampled_from(
        [
            "h",
            "10.0.0.7",
            "2001:db8::1",
            "fe80::1%eth0",
            "münchen.example",
            ".".join(["x" * 62] * 4),
        ]
    ),
    port=st.integers(1, 65535),
    pin=st.binary(min_size=32, max_size=32),
    secret=st.binary(min_size=32, max_size=32),
    invite_id=st.text("0123456789abcdef", min_size=1, max_size=64),
)
def test_a_written_invite_is_read_back(
    host: str, port: int, pin: bytes, secret: bytes, invite_id: str
) -> None:
    invite = Invite(host=host, port=port, pin=pin, invite_id=invite_id, secret=secret)
    assert Invite.decode(invite.encode()) == invite


HELPER = InvitedBy(public_key=bytes(range(50, 82)), host="helper.example.org", port=7710)
OTHER = InvitedBy(public_key=bytes(range(60, 92)), host="2001:db8::7", port=7711)


@pytest.mark.parametrize("members", [(HELPER,), (HELPER, OTHER)])
def test_an_invite_that_names_members_is_read_back_and_is_another_one_than_without(
    members: tuple[InvitedBy, ...],
) -> None:
    invite = replace(INVITE, members=members)
    assert Invite.decode(invite.encode()) == invite != INVITE
    assert invite.at("new.example.org", 1) == replace(INVITE, host="new.example.org", port=1)


def test_three_members_or_a_part_of_one_are_no_invite() -> None:
    three = replace(INVITE, members=(HELPER, OTHER, OTHER)).encode()
    with pytest.raises(BadDataError, match="lengths do not add up"):
        Invite.decode(three)
    content = INVITE_ARMOUR.decode(replace(INVITE, members=(HELPER,)).encode())
    for shorter in range(len(content) - 1, len(INVITE_ARMOUR.decode(TEXT)), -1):
        with pytest.raises(BadDataError, match="not a valid invite"):
            Invite.decode(INVITE_ARMOUR.encode(content[:shorter]))


@pytest.mark.parametrize(
    ("multiaddr", "host", "back"),
    [
        ("/ip4/203.0.113.5/tcp/7710", "203.0.113.5", "/ip4/203.0.113.5/tcp/7710"),
        ("/dns/h.example.org/tcp/7710", "h.example.org", "/dns/h.example.org/tcp/7710"),
        ("/ip6/2001:db8::7/tcp/7710", "2001:db8::7", "/ip6/2001:db8::7/tcp/7710"),
    ],
)
def test_a_members_own_address_is_what_an_invite_names(
    multiaddr: str, host: str, back: str
) -> None:
    named = InvitedBy.at(bytes(32), multiaddr)
    assert named is not None and (named.host, named.port, named.multiaddr) == (host, 7710, back)


@pytest.mark.parametrize(
    "multiaddr", ["/ip4/203.0.113.5/udp/7710/quic-v1", "/memory/x", "", "/ip4/1.2.3.4/tcp/0"]
)
def test_what_an_invite_cannot_name_is_left_out(multiaddr: str) -> None:
    assert InvitedBy.at(bytes(32), multiaddr) is None


def test_an_invite_survives_mail_and_terminals() -> None:
    middle = len(TEXT) // 2
    assert Invite.decode(f"  {TEXT[:middle]}\r\n\t{TEXT[middle:]} \n") == INVITE
    assert Invite.decode(TEXT.upper()) == INVITE


@pytest.mark.parametrize(
    "around",
    [
        *(
            "'{}'",
            '"{}"',
            "“{}”",
            "‘{}’.",
            "`{}`",
            "```\n{}\n```",
            "<{}>",
            "*{}*",
            "__{}__",
            "({}),",
        ),
        *(
            "> {}",
            "$ atoll join {}",
            "'atoll join {}'",
            "https://chat.example/{}",
            "{}\u200b",
            "\ufeff{}",
        ),
        *("\x1b[200~{}\x1b[201~", "Hey, here it is: {}. Have fun!", "Here it is: {} Have fun!"),
    ],
)
def test_what_a_chat_program_or_a_prompt_puts_around_an_invite_does_no_harm(around: str) -> None:
    assert Invite.decode(around.format(TEXT)) == INVITE
    assert INVITE_ARMOUR.is_in(around.format(TEXT))
    with pytest.raises(BadDataError, match=r"truncated|occurs in none"):
        Invite.decode(around.format(TEXT[:-1]))


@pytest.mark.parametrize("between", ["\\\n", "\n> ", "-\n", "\u200b", "\u00ad", "\n| ", "…\n"])
def test_what_stands_where_an_invite_was_broken_does_no_harm(between: str) -> None:
    for place in (10, len(TEXT) // 2, len(TEXT) - 1):
        assert Invite.decode(TEXT[:place] + between + TEXT[place:]) == INVITE


@pytest.mark.parametrize("dash", "‐‑‒–—")
def test_a_hyphen_that_became_a_dash_is_read_as_one(dash: str) -> None:
    assert Invite.decode(TEXT.replace("-", dash)) == INVITE


def test_what_atoll_has_printed_holds_the_whole_line() -> None:
    assert INVITE_ARMOUR.first_in(f"copy this:\n{TEXT}\nuses: 1, atoll1-other") == TEXT
    assert INVITE_ARMOUR.first_in("uses: 1") is None


def test_no_line_is_made_that_errors_would_show() -> None:
    for prefix in ("atoll1-", "atoll-relay2-", "atoll-other10-"):
        line = replace(INVITE_ARMOUR, prefix=prefix).encode(bytes(99))
        assert masked(f"no file {line}.txt") == f"no file {line[: len(prefix) + 4]}….txt"
    with pytest.raises(AssertionError, match="errors would show it"):
        replace(INVITE_ARMOUR, prefix="swarm1-")


@pytest.mark.parametrize("name", ["atoll1-invite.txt", "~/atoll1-my-run", "invites/atoll1"])
def test_a_file_may_begin_as_an_invite_does(name: str) -> None:
    assert not INVITE_ARMOUR.is_in(name)


def test_every_mistyped_character_is_noticed() -> None:
    for place in range(len("atoll1-"), len(TEXT)):
        mistyped = TEXT[:place] + ("a" if TEXT[place] != "a" else "b") + TEXT[place + 1 :]
        with pytest.raises(BadDataError, match=r"character|truncated"):
            Invite.decode(mistyped)


def test_a_truncated_invite_is_told_from_a_mistyped_one() -> None:
    for length in range(len("atoll1-"), len(TEXT)):
        with pytest.raises(BadDataError, match="truncated"):
            Invite.decode(TEXT[:length])
    with pytest.raises(BadDataError, match="a character of the invite is wrong"):
        Invite.decode(TEXT + "a")
    with pytest.raises(
        BadDataError, match="character 12 of the invite is wrong: '1' occurs in none"
    ):
        Invite.decode(TEXT[:11] + "1" + TEXT[12:])


@pytest.mark.parametrize("text", ["", "hello", "atoll", "7701", TEXT[1:]])
def test_what_is_no_invite_at_all_is_called_so(text: str) -> None:
    with pytest.raises(BadDataError, match=r"is not an invite.*atoll invite create"):
        Invite.decode(text)


def test_an_invite_of_another_version_is_not_called_mistyped() -> None:
    with pytest.raises(BadDataError, match="another version of Atoll: atoll2"):
        Invite.decode(TEXT.replace("atoll1-", "atoll2-"))


@pytest.mark.parametrize(
    ("host", "port"),
    [
        ("", 1),
        ("a b", 1),
        ("[::1]", 1),
        ("x" * 64, 1),
        (".".join(["x" * 62] * 4) + ".xx", 1),
        ("a..b", 1),
        ("h", 0),
        ("h", 65536),
    ],
)
def test_an_invite_to_nowhere_cannot_be_made(host: str, port: int) -> None:
    with pytest.raises(UsageError):
        Invite(host=host, port=port, pin=bytes(32), invite_id="a", secret=bytes(32))


def test_endpoints_put_ipv6_addresses_in_brackets() -> None:
    assert endpoint_of("::1", 7700) == "[::1]:7700"
    assert endpoint_of("example.org", 7700) == "example.org:7700"
