"""Whether a node may take part, by the latest ruling on it: asked in every call, and by the core."""

from datetime import UTC, datetime

from protocol.errors import ExpelledError, HeldBackError
from protocol.trust.rulings import Ruling, RulingKind


def refuse_barred(standing: Ruling | None) -> None:
    """Raises ExpelledError or HeldBackError for a node whose latest ruling bars it."""
    if standing is None:
        return
    when = datetime.fromtimestamp(standing.unix_seconds, UTC)
    why = f": {standing.reason}" if standing.reason else ""
    words = (
        f"{standing.by} has {standing.kind} {standing.node_name} ({when:%Y-%m-%d %H:%M} UTC){why}"
    )
    if standing.kind is RulingKind.EXPELLED:
        raise ExpelledError(
            words, next_step="ask the run owner: another invite does not let this key in"
        )
    if standing.kind is RulingKind.QUARANTINED:
        raise HeldBackError(
            words,
            next_step=f"it waits until the run owner types 'atoll nodes readmit {standing.node_name}'",
        )
