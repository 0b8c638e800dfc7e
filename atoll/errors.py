"""What can go wrong for a training loop in a swarm, as errors that people see."""


class SwarmError(Exception):
    """Something a person can act on: a sentence with the value, and what to do next."""

    def __init__(self, what: str, *, next_step: str = "") -> None:
        super().__init__(f"{what}; {next_step}" if next_step else what)
        self.what = what
        self.next_step = next_step


class NoNodeError(SwarmError):
    """No node that serves loops runs where one was looked for."""


class ModelMismatchError(SwarmError):
    """The model, or its optimizer, is not what the run trains."""


class SamplesError(SwarmError):
    """Leased samples were asked for where they cannot be had."""


class RunOverError(SwarmError):
    """The run, or this node's part in it, is over; leaving the `with` block of `join` ends with it."""


class ConnectionLostError(SwarmError):
    """The node, or another rank of the loop, is gone. Caught within: the loop connects again."""
