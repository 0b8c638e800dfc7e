"""Signs what a node's process makes, and never two different things for one slot.

Two would be taken for a lie (protocol.trust.equivocation). A process may come to a slot twice: a plan that
was broken off is opened again, and what is owed is another amount by then. It stays silent the second time,
and goes on owing what it would have contributed.
"""

from dataclasses import replace

from protocol.trust.identity import Identity
from protocol.wire.payload import Payload, Slot

KEPT_ROUNDS = 64
"""What was signed for older rounds is forgotten: no plan of theirs is opened again."""


class AlreadySignedError(Exception):
    """Another payload of this process bears its signature for the slot."""


class PayloadSigner:
    """The signature of one process. `process_id` is what it announces when it attaches."""

    def __init__(self, identity: Identity) -> None:
        self.process_id = 0
        self._identity = identity
        self._signed: dict[Slot, bytes] = {}
        self._newest_round = 0

    def signed(self, payload: Payload) -> Payload:
        """The payload with its maker's process and signature; raises AlreadySignedError."""
        header = replace(payload.header, process_id=self.process_id).signed(self._identity)
        before = self._signed.setdefault(header.slot, header.statement)
        if before != header.statement:
            raise AlreadySignedError(
                f"this process has signed another {header.kind_name} of slice {header.slice_index} of "
                f"round {header.round}"
            )
        if header.round > self._newest_round:
            self._newest_round, oldest = header.round, header.round - KEPT_ROUNDS
            self._signed = {s: told for s, told in self._signed.items() if s.round >= oldest}
        return Payload(header=header, body=payload.body)
