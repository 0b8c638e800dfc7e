"""What a loop is told of what works, and less well than it could, or otherwise than its owner may think.

When one holds is found out by atoll.session, and for what happens in a round by atoll.watch.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path

EARLY_AVERAGE = (
    "an average of this model was made before join, which has replaced the weights that it "
    "began with: it holds on to them. Make it after join, or copy the model's into it there"
)

OLD_GRAPH = (
    "step() has moved the weights, and a backward pass went through what was computed before: call step() "
    "after the last backward pass of a turn, and detach() what is kept from turn to turn"
)


def stays(besides: str) -> str:
    """That an optimizer steps what is no part of the model that joined."""
    return (
        f"the optimizer also steps {besides}, which the model that joined does not have: it is not "
        "exchanged, and each node goes on with its own. To share it, make it a part of that model, "
        "and the run of both"
    )


def trained_before(name: str) -> str:
    """That weights were trained before `join`, where the run's that replace them never were."""
    return (
        "the run begins with new weights, which have replaced trained ones in this loop: the values "
        f"of {name} are all the same in the run, and were not here. To begin with the "
        "loop's, make a run whose function loads them, or save them as a folder of transformers and "
        "make it by 'atoll init NEWDIR --from FOLDER'"
    )


def rate_of_matrices(rate: float, *, muon: float) -> str:
    """That matrices are trained at the rate that the run means for what Muon leaves out."""
    return (
        "this loop trains matrices at swarm.learning_rate, which a run with Muon has for all but the "
        f"matrices: at its peak {rate:g}, and Muon's {muon:g}. For "
        "AdamW it is about five times too much: take swarm.muon_learning_rate, or make the run with "
        "--optimizer adamw"
    )


def new_moments(round: int, *, kept: str) -> str:
    """That a loop has come into a run in progress with an optimizer that begins anew.

    `kept` is why it does not go on from what an earlier start has left, if that is there.
    """
    why = f" It does not go on from the state that its node's folder keeps: {kept}." if kept else ""
    return (
        f"the run is in round {round}, and this loop's optimizer begins anew.{why} Until its second moments "
        "have seen as much as those of others, its steps go further, and the swarm may leave them out: for "
        "some dozen steps with betas=(0.9, 0.95), for a thousand with 0.999"
    )


def nothing_to_train(seconds: float, folder: Path) -> str:
    """That no plan has come for so long."""
    return (
        f"nothing to train for {seconds:g} s; what the swarm waits for: "
        f"atoll status --dir {shlex.quote(str(folder))}"
    )


def no_node(folder: Path, seconds: float) -> str:
    """That there is nothing to join yet."""
    return (
        f"no node that serves training loops runs in {folder} yet, so this waits up to {seconds:g} s "
        f"for one: atoll node start --loop --dir {shlex.quote(str(folder))}"
    )


def amended(changes: Sequence[str]) -> str:
    """What rules were changed in mid-run."""
    return (
        f"the run was amended: {', '.join(changes)}. swarm.learning_rate and swarm.progress follow it; "
        "rates that this loop sets itself stay as they are"
    )
