"""A round's first part: what this node owes is encoded, slice by slice, and sent to who reduces each."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from random import Random

from node.exchange.codecs.codec import CodecError
from node.exchange.owing import Owing
from node.exchange.pushes import Pushes
from node.exchange.transport.transport import Transport
from node.heavy import Heavy
from protocol.errors import BadDataError
from protocol.payload import Payload
from protocol.rounds import NodeId, Plan, Slice


class Contributing:
    """Our contributions to one round. `slices` says who reduces now, `departed` who is gone."""

    def __init__(
        self,
        *,
        plan: Plan,
        node_id: NodeId,
        slices: Mapping[int, Slice],
        departed: Set[NodeId],
        owing: Owing,
        transport: Transport,
        heavy: Heavy,
        deadline: float,  # of the reducers that the plan names, by the loop's clock
        assigned_samples: int,
        keep_own: Callable[[Payload], None],
    ) -> None:
        self._plan = plan
        self._node_id = node_id
        self._slices = slices
        self._departed = departed
        self._owing = owing
        self._heavy = heavy
        self._deadline = deadline
        self._assigned_samples = assigned_samples
        self._keep_own = keep_own  # for the slices that we reduce ourselves
        self._encoded: dict[int, Payload] = {}
        self._pushes = Pushes(transport, Random(f"{node_id} in {plan.round}"))
        self._is_closed = False

    @property
    def is_sending(self) -> bool:
        """Whether contributions are on their way."""
        return not self._pushes.is_idle

    async def contribute(self, *, samples: int, tokens: int) -> None:
        """Encodes what this node owes for the fragment and sends each slice to its reducer.

        `samples` were used up for it, and `tokens` in them are what it weighs.

        Returns once everything is encoded and on its way; transfers go on in the background until
        they succeed or the reducers' deadline passes. Raises BadDataError when what it owes is not
        finite.
        """
        round, fragment = self._plan.round, self._plan.fragment
        share = samples / max(samples, self._assigned_samples)
        await self._heavy(
            lambda: self._owing.accumulate(round=round, fragment=fragment, share=share)
        )
        for part in in_order_of_sending(self._plan.slices, self._node_id):
            encode = partial(self._owing.contribution_to, part, samples=samples, tokens=tokens)
            try:
                payload = await self._heavy(encode)
            except CodecError as error:
                raise BadDataError(
                    f"round {round}: this node's pseudo-gradient cannot be sent: {error}",
                    next_step="lower [inner] learning_rate or [outer] learning_rate in run.toml",
                ) from error
            if self._is_closed:
                return
            self._encoded[part.index] = payload
            self.send(part.index, self._deadline)

    def send(self, index: int, deadline: float) -> None:
        """To who reduces the slice now, until the deadline and as long as that is so.

        Nothing happens before the slice is encoded: then it is sent anyway.
        """
        if (payload := self._encoded.get(index)) is None:
            return
        part = self._slices[index]
        if part.reducer_id == self._node_id:
            self._keep_own(payload)
            return
        self._pushes.start(
            part.reducer_id,
            payload,
            deadline=deadline,
            is_wanted=lambda: self._slices[index] is part and part.reducer_id not in self._departed,
        )

    async def close(self) -> None:
        """Sends nothing more, and keeps nothing in memory."""
        self._is_closed = True
        self._encoded.clear()
        await self._pushes.stop()


def in_order_of_sending(slices: Sequence[Slice], node_id: NodeId) -> list[Slice]:
    """Each reducer's first slice, then each one's second, and so on: all begin to reduce at once.

    Our own slices come after the others', which have a way to go, and not all nodes begin with
    the same reducer.
    """
    reducers = list(dict.fromkeys(part.reducer_id for part in slices))
    own = reducers.index(node_id) if node_id in reducers else 0
    seen: Counter[NodeId] = Counter()
    places: dict[int, tuple[int, int]] = {}
    for part in slices:
        after_own = (reducers.index(part.reducer_id) - own - 1) % len(reducers)
        places[part.index] = seen[part.reducer_id], after_own
        seen[part.reducer_id] += 1
    return sorted(slices, key=lambda part: places[part.index])
