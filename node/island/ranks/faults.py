"""What can go wrong with ranks, as errors that people see."""

from protocol.errors import AtollError, ExitCode


class TrainingDivergedError(AtollError):
    """The loss or the gradient is no longer a finite number."""

    exit_code = ExitCode.CONFIG


class RankDiedError(AtollError):
    """A rank's process ended by itself: out of memory, killed, a crash in native code."""

    exit_code = ExitCode.SYSTEM


class RankHungError(RankDiedError):
    """Ranks that neither worked nor ended were killed."""


class LoopGoneError(RankDiedError):
    """The contributor's own training loop has ended, hangs, or has left; another may come."""


class LostPieceError(RankDiedError):
    """A piece of the run's tokens is damaged or gone on this machine's disk; peers may give it again."""

    exit_code = ExitCode.UNAVAILABLE

    def __init__(self, what: str, *, next_step: str = "", piece: str = "") -> None:
        """`piece` is its digest."""
        super().__init__(what, next_step=next_step)
        self.piece = piece


class OriginAwayError(RankDiedError):
    """Where the run's tokens are fetched from does not answer now; it may in a while."""

    exit_code = ExitCode.UNAVAILABLE


class OutOfMemoryError(AtollError):
    """A rank's device, or the machine, has too little memory for what was asked of it."""

    exit_code = ExitCode.SYSTEM


class RankFailedError(AtollError):
    """A rank met an error that is not the user's: a bug. The traceback is in the log."""

    exit_code = ExitCode.INTERNAL
