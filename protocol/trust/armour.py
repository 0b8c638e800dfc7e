"""How secrets become lines that people copy, and how such lines are left out of errors."""

import base64
import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

from protocol.errors import BadDataError

ISLAND_PREFIX = "atoll-island-"
"""Of an island's token, which has no armour: programs copy it."""

_DASH = "[-\u2010-\u2015]"
"""A hyphen, or what chat programs make of it."""

_SECRETS = re.compile(
    f"(atoll(?:-[a-z]+)?[0-9]+{_DASH}[a-z2-7]{{4}})[a-z2-7]{{8,}}"
    rf"|({ISLAND_PREFIX.replace('-', _DASH)}\w{{4}})[\w=-]{{8,}}",
    re.IGNORECASE,
)

_CHECK_BYTES = 4
_CHECK_CONTEXT = "atoll invite check 1"


def masked(text: str) -> str:
    """Without the secrets in what was typed: an error is read over shoulders, and kept in logs."""
    return _SECRETS.sub(lambda found: f"{found[1] or found[2]}…", text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Armour:
    """How bytes become one line that people copy, and back: prefix, base32, a length and a check."""

    prefix: str  # ends with a number and "-"
    noun: str  # "invite"
    ask_again: str  # what to do about a wrong one

    def __post_init__(self) -> None:
        assert masked(f"{self.prefix}{'a' * 99}").endswith("…"), "errors would show it"

    def encode(self, content: bytes) -> str:
        """The line."""
        sized = (2 + len(content) + _CHECK_BYTES).to_bytes(2) + content
        return self.prefix + _base32(sized + _check(sized))

    def is_in(self, text: str) -> bool:
        """Whether the text has the beginning of such a line in it, so that it names no file."""
        return re.search(self._beginning + "[a-z2-7]{8}", text.lower()) is not None

    def decode(self, text: str) -> bytes:
        """The content of a line with spaces and line breaks anywhere in it, in either case.

        Quotes, the marks of mail and chat programs, a prompt and words around it do no harm: the check says
        whether what is left is the line. Raises BadDataError that says whether it is no such line, is
        truncated, or is mistyped.
        """
        first, *others = self._readings(text)
        try:
            return self._content(first)
        except BadDataError:
            for reading in others:
                with contextlib.suppress(BadDataError):
                    return self._content(reading)
            raise

    def first_in(self, text: str) -> str | None:
        """The first such line in what Atoll has printed."""
        found = re.search(re.escape(self.prefix) + "[a-z2-7]+", text)
        return None if found is None else found[0]

    @property
    def _beginning(self) -> str:
        return re.escape(self.prefix.removesuffix("-")) + _DASH

    def _readings(self, text: str) -> Iterator[str]:
        """What the line may be: all from its prefix on, its first word, and what may occur in a line."""
        found = re.search(self._beginning + "(.*)", text.lower(), re.DOTALL)
        if found is None:
            yield text
            return
        yield self.prefix + found[1]
        yield self.prefix + re.sub("[^a-z2-7].*", "", found[1], flags=re.DOTALL)
        yield self.prefix + re.sub("[^a-z2-7]", "", found[1])

    def _content(self, text: str) -> bytes:
        squeezed, noun = "".join(text.split()).lower(), self.noun
        if not squeezed.startswith(self.prefix):
            if other := re.match(self.prefix.rstrip("-0123456789") + "[0-9]+(?=-)", squeezed):
                raise BadDataError(
                    f"the {noun} is of another version of Atoll: {other.group()}",
                    next_step="install the version of Atoll that the run owner uses",
                )
            raise BadDataError(
                f"{_shortened(text)!r} is not {_with_article(noun)}: {noun}s begin with {self.prefix!r}",
                next_step=self.ask_again,
            )
        characters = squeezed.removeprefix(self.prefix)
        wrong = re.search(r"[^a-z2-7]", characters)
        if wrong:
            raise BadDataError(
                f"character {len(self.prefix) + wrong.start() + 1} of the {noun} is wrong: "
                f"{wrong.group()!r} occurs in none",
                next_step=self.ask_again,
            )
        packed = _unbase32(characters)
        num_bytes = int.from_bytes(packed[:2]) if len(packed) >= 2 else 0
        if len(packed) < max(num_bytes, 2):
            raise BadDataError(
                f"the {noun} is truncated: {len(squeezed)} characters arrived"
                + (f" of {len(self.prefix) + -(-num_bytes * 8 // 5)}" if num_bytes else ""),
                next_step=self.ask_again,
            )
        sized, check = packed[:-_CHECK_BYTES], packed[-_CHECK_BYTES:]
        if len(packed) != num_bytes or check != _check(sized) or _base32(packed) != characters:
            raise BadDataError(f"a character of the {noun} is wrong", next_step=self.ask_again)
        return sized[2:]


def _check(sized: bytes) -> bytes:
    import blake3  # only here: an error is told where it cannot be imported, too

    return blake3.blake3(sized, derive_key_context=_CHECK_CONTEXT).digest(length=_CHECK_BYTES)


def _base32(data: bytes) -> str:
    return base64.b32encode(data).decode().rstrip("=").lower()


def _unbase32(characters: str) -> bytes:
    """Decodes as many whole bytes as the characters hold; Python's own refuses broken ends."""
    whole = len(characters) * 5 // 8
    return base64.b32decode(characters.upper() + "A" * (-len(characters) % 8))[:whole]


def _with_article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def _shortened(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:37]}..."
