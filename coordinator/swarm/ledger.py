"""The ledger: which places of the sample order are leased, committed, or free. Pure.

A place is what the seeded, endless order of samples counts (node.island.data.dataset). It is free until
it is leased, leased until its round closes, and then committed or free again: what a commit took is
counted once, all else is leased again before new places. What is free is not written down: it is
what is neither committed nor leased nor skipped, so no place can get lost.

Where data is private each data holder has a book of its own: a stretch of places as long as no run is,
whose number is taken from the digest of the data. So nodes that hold the same data share its book.

A sample counts by the commit that took it. The work of a contribution that no commit took stays in
its node's residual and is not undone when its samples are trained again elsewhere. How many of a sample's
targets counted (chat templates and padding leave some out) is no business of the ledger's.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from protocol.wire.rounds import BOOK_PLACES, Assignment, Commit, NodeId, book_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The places first, …, end − 1; never none."""

    first: int
    end: int

    @property
    def num_samples(self) -> int:
        """How many places these are."""
        return self.end - self.first


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Pieces in order, disjoint. Neighbours among the committed ones are merged into one piece.

    All pieces begin and end at whole batches, because leases and what commits of them do.
    """

    committed: tuple[Places, ...] = ()
    leased: tuple[Places, ...] = ()  # one for each assignment of the round in flight, or ahead
    ahead: tuple[Assignment, ...] = ()  # for the round after it: leased, and part of no plan yet
    frontiers: Mapping[int, int] = field(default_factory=dict)  # of each book, as `frontier` has it
    skipped: tuple[Places, ...] = ()  # taken out by the run owner; leased before, perhaps

    def frontier(self, book: int = 0) -> int:
        """The first place of a book that was never leased."""
        return self.frontiers.get(book, book * BOOK_PLACES)


def free_again(ledger: Ledger) -> tuple[Places, ...]:
    """What was leased, did not commit, and waits to be leased again, in order."""
    return tuple(piece for book in sorted(ledger.frontiers) for piece in _free_in(ledger, book))


def _free_in(ledger: Ledger, book: int) -> list[Places]:
    free, at = [], book * BOOK_PLACES
    for piece in _in_order((*ledger.committed, *ledger.leased, *ledger.skipped)):
        if book_of(piece.first) != book:
            continue
        if at < piece.first:
            free.append(Places(first=at, end=piece.first))
        at = max(at, piece.end)
    if at < ledger.frontier(book):
        free.append(Places(first=at, end=ledger.frontier(book)))
    return free


def lease(ledger: Ledger, wanted: Sequence[int], *, book: int = 0) -> tuple[Ledger, list[Places]]:
    """Leases, for one after the other, the first free place from which so many in a row are free.

    An assignment is one contiguous range, and steps are kept full: so a shorter piece waits until
    it is joined by its neighbours or wanted by a slower node, which asks for less. The last piece
    goes on into the places that were never leased.
    """
    free = _free_in(ledger, book)
    at = ledger.frontier(book)
    if free and free[-1].end == at:
        last = free.pop()
        at = last.first
    pieces = _FirstFit([piece.num_samples for piece in free])
    leased = []
    for num_samples in wanted:
        place = pieces.take(num_samples)
        if place is None:
            first, at = at, at + num_samples
        else:
            first = free[place].first
            free[place] = replace(free[place], first=first + num_samples)
        leased.append(Places(first=first, end=first + num_samples))
    if not leased:
        return ledger, []
    frontiers = {**ledger.frontiers, book: max(ledger.frontier(book), at)}
    leases = _in_order((*ledger.leased, *leased))
    return replace(ledger, leased=leases, frontiers=frontiers), leased


class _FirstFit:
    """Sizes of free pieces, under a tree of which each node has the larger of the two below it.

    So the first that is large enough is found in as many steps as the tree is high (Johnson 1974,
    "Fast algorithms for bin packing"): a thousand nodes ask, and there may be as many pieces.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._width = 1 << max(0, len(sizes) - 1).bit_length()
        self._largest = [0] * self._width + list(sizes) + [0] * (self._width - len(sizes))
        for place in range(self._width - 1, 0, -1):
            self._largest[place] = max(self._largest[2 * place : 2 * place + 2])

    def take(self, size: int) -> int | None:
        """Makes the first piece that is no smaller so much smaller; None when there is none."""
        largest = self._largest
        if largest[1] < size:
            return None
        place = 1
        while place < self._width:
            place = 2 * place + (largest[2 * place] < size)
        index = place - self._width
        largest[place] -= size
        while place > 1:
            place //= 2
            largest[place] = max(largest[2 * place], largest[2 * place + 1])
        return index


def skip(ledger: Ledger, pieces: Iterable[Places]) -> Ledger:
    """Takes places out: they are not leased any more. What is leased now is trained to its end.

    A piece may reach beyond what was leased: the places before it are then free.
    """
    frontiers, skipped = dict(ledger.frontiers), ledger.skipped
    for piece in pieces:
        book = book_of(piece.first)
        frontiers[book] = max(frontiers.get(book, 0), piece.end)
        skipped = _merged((*skipped, *_without((piece,), skipped)))
    return replace(ledger, skipped=skipped, frontiers=frontiers)


def settle(
    ledger: Ledger, assignments: Sequence[Assignment], taken: Mapping[NodeId, int]
) -> Ledger:
    """Ends the leases of a round: of each, the first `taken` places are committed.

    A node trains its range from the start, so what it did not finish is the end of it.
    """
    # One lease for each: what a void round had leased may be leased ahead by now, and stays so.
    ended = Counter(_places_of(assignment) for assignment in assignments)
    left = []
    for places in ledger.leased:
        if ended[places]:
            ended[places] -= 1
        else:
            left.append(places)
    committed = [
        Places(first=a.first_sample, end=a.first_sample + taken[a.node_id])
        for a in assignments
        if taken.get(a.node_id, 0) > 0
    ]
    return replace(
        ledger,
        committed=_merged((*ledger.committed, *committed)),
        leased=tuple(left),
    )


def reopen(
    ledger: Ledger, assignments: Sequence[Assignment], taken: Mapping[NodeId, int]
) -> Ledger:
    """Undoes `settle`: what it counted is leased again, as part of the same leases."""
    counted = [
        Places(first=a.first_sample, end=a.first_sample + taken[a.node_id])
        for a in assignments
        if taken.get(a.node_id, 0) > 0
    ]
    committed = tuple(_without(ledger.committed, _in_order(counted)))
    return lease_again(replace(ledger, committed=committed), assignments)


def lease_again(ledger: Ledger, assignments: Iterable[Assignment]) -> Ledger:
    """Leases what assignments name, which was leased before in the same way."""
    again = [_places_of(assignment) for assignment in assignments if assignment.num_samples]
    frontiers = dict(ledger.frontiers)
    for places in again:
        book = book_of(places.first)
        frontiers[book] = max(frontiers.get(book, 0), places.end)
    return replace(ledger, leased=_in_order((*ledger.leased, *again)), frontiers=frontiers)


def end_ahead(ledger: Ledger, gone: Collection[NodeId]) -> Ledger:
    """Ends what was leased ahead to some nodes: it is free again, and what they trained not counted."""
    ended = [a for a in ledger.ahead if a.node_id in gone]
    kept = tuple(a for a in ledger.ahead if a.node_id not in gone)
    return replace(settle(ledger, ended, {}), ahead=kept)


def committed_samples(commit: Commit, *, batch: int) -> Mapping[NodeId, int]:
    """Samples that the commit counts of each node, as `Commit.tokens` its tokens.

    Those of nodes that found no token to predict in theirs too: they are used up. Of whole inner steps,
    each of `batch` samples; honest nodes train nothing else.
    """
    samples = {one.node_id: one.samples for one in commit.without_tokens}
    for outcome in commit.slices:
        for contributor in outcome.taken:
            known = samples.get(contributor.node_id, 0)
            samples[contributor.node_id] = max(known, contributor.samples)
    return {node_id: count // batch * batch for node_id, count in samples.items()}


def used_up(ledger: Ledger) -> tuple[int, ...]:
    """Places that are not to be leased any more, as a first place and the one after the last, in turns."""
    pieces = _merged((*ledger.committed, *_without(ledger.skipped, ledger.committed)))
    return tuple(place for piece in pieces for place in (piece.first, piece.end))


def trained_already(places: Sequence[int]) -> Ledger:
    """A new run's ledger, where another run has trained these places, as `used_up` has them."""
    pieces = tuple(
        Places(first=first, end=end) for first, end in zip(places[::2], places[1::2], strict=True)
    )
    frontiers: dict[int, int] = {}
    for piece in pieces:
        book = book_of(piece.first)
        frontiers[book] = max(frontiers.get(book, 0), piece.end)
    return Ledger(committed=pieces, frontiers=frontiers)


def num_reached(ledger: Ledger) -> int:
    """Places of all books that were ever leased."""
    return sum(end - book * BOOK_PLACES for book, end in ledger.frontiers.items())


def num_samples_of(pieces: Iterable[Places]) -> int:
    """How many places the pieces hold together."""
    return sum(piece.num_samples for piece in pieces)


def _places_of(assignment: Assignment) -> Places:
    first = assignment.first_sample
    return Places(first=first, end=first + assignment.num_samples)


def _in_order(pieces: Iterable[Places]) -> tuple[Places, ...]:
    return tuple(sorted(pieces, key=lambda piece: piece.first))


def _without(pieces: Iterable[Places], cuts: Sequence[Places]) -> Iterator[Places]:
    """The pieces minus all cuts; both are in order."""
    number = 0
    for piece in pieces:
        first = piece.first
        while number < len(cuts) and cuts[number].first < piece.end:
            cut = cuts[number]
            if first < cut.first:
                yield Places(first=first, end=cut.first)
            first = max(first, cut.end)
            if cut.end > piece.end:
                break  # it cuts the next piece too
            number += 1
        if first < piece.end:
            yield Places(first=first, end=piece.end)


def _merged(pieces: Iterable[Places]) -> tuple[Places, ...]:
    merged: list[Places] = []
    for piece in _in_order(pieces):
        if merged and merged[-1].end == piece.first:
            piece = Places(first=merged.pop().first, end=piece.end)
        merged.append(piece)
    return tuple(merged)
