"""Why a preset chose what it chose, in words, with the figures of runs that are like it.

tests/unit/test_preset_figures.py holds the figures to docs/results/convergence.jsonl.
"""

from coordinator.presets.cost import Prediction, Setting, Situation, share_in_words
from coordinator.presets.loss import LEAST_FOR_SPARSE, SPARSE, results_hold_all

OFTEN_BY_MORE = (
    "four nodes and eight, every 12 steps, ended 0.2 to 3.0 % lower by it than by a plain mean"
)
SELDOM_BY_TWO = (
    "two nodes by AdamW, every 30 and 60 steps, ended 1.6 to 2.6 % lower by it than by a plain mean"
)
OFTEN = "the plain mean: in exchanges as frequent as these, momentum ended higher"
WEIGHTS = "from given weights, at a low rate, the plain mean ended 2.5 to 3.8 % higher"
BLENDED = "AdamW with late results from frequent exchanges ended up to 2 % lower so"
WHOLLY_TAKEN = (
    "nodes that took results over wholly, four and eight, ended 0.2 to 2.9 % lower than by half"
)
MORE_MOMENTUM_FOR_SPARSE = "in 304 exchanges top-k ended 0.5 % lower with it than with 0.3"
NO_MOMENTUM = "sgd has none"
SPARSE_RATE = "top-k with error feedback wants no momentum"
BY_SGD = "loops by SGD with momentum ended up to 29 % lower so than by the plain mean"
SGD_RATE = "the plain mean of what nodes trained: level with nesterov 0.7, 0.3 in 16 exchanges"


def counted(number: int, one: str) -> str:
    """The number and what it counts, in the plural unless it is one."""
    return f"{number:,} {one}" if number == 1 else f"{number:,} {one}s"


def every(interval: int, one: str) -> str:
    """How often: "every step", "every 6 steps"."""
    return f"every {one}" if interval == 1 else f"every {interval:,} {one}s"


def of_rounds_given(setting: Setting, total_steps: int, rounds: int) -> str:
    """Why rounds are as long where the run file says how many there are."""
    why = f"{counted(total_steps, 'inner step')} over {counted(rounds, 'round')}, which are given"
    if setting.fragments > 1:
        why += f"; each parameter is exchanged {every(setting.interval, 'step')}"
    return why


HARDLY_MORE = "more often sends more, and gains less than 0.2 %"
COSTS_MORE = "more often costs more than it gains, by"


def of_steps(setting: Setting, exchanges: int, *, seldom: float, oftener: str) -> str:
    """Why parameters are exchanged as seldom, what that costs in parts of the loss, and why not oftener."""
    cost = "a tenth or more" if seldom >= 0.1 else f"about {100 * seldom:.2g} %"
    why = f"{counted(exchanges, 'exchange')} of each parameter cost {cost} of the loss"
    why += f"; {oftener}" if oftener else ""
    if setting.fragments > 1:
        cut = f"every {setting.fragments} rounds, {setting.interval} steps"
        return f"each parameter is exchanged {cut}: {why}"
    return f"{every(setting.interval, 'step')}: {why}"


def of_uplink(
    setting: Setting, situation: Situation, prediction: Prediction, *, codecs: float
) -> str:
    """Why this codec, what both ways cost in parts of the loss, and what is counted on of the link."""
    share = share_in_words(situation.link, prediction.bytes_per_round)
    cost = f"with the downlink's about {100 * codecs:.1g} % of the loss" if codecs < 0.1 else ""
    return "; ".join(why for why in (_of_codec(setting.uplink), cost, share) if why)


def of_downlink(setting: Setting, situation: Situation) -> str:
    """Why this codec, which for top-k goes by what nodes send."""
    nodes = situation.num_nodes
    up, down = SPARSE.get(setting.uplink), SPARSE.get(setting.downlink)
    if up is None or down is None:
        return _of_codec(setting.downlink)
    if results_hold_all(setting, nodes):
        return (
            f"{down} of 4096 values have room for {up} of each of {nodes} nodes; with topk64 up it cost "
            "12.1 % in 80 exchanges, 2.6 % in 304, and topk256 both ways 17.4 % and 3.7 % at as many bytes"
        )
    return (
        f"{down} of 4096 values, of up to {nodes * up} that {nodes} nodes send: lossy both ways, as topk256 "
        "both ways, which cost 17.4 % in 50 exchanges, 3.7 % in 200"
    )


def _of_codec(codec: str) -> str:
    often = f"each parameter is exchanged {LEAST_FOR_SPARSE} times or more, which it wants"
    return {
        "int4": "4 bits round little away",
        "ec2": "2 bits with error feedback let parameters be exchanged oftener",
        "topk256": f"256 of 4096 values: nothing finer is enough, and {often}",
        "topk64": f"64 of 4096 values: nothing finer is enough, and {often}",
    }.get(codec, "")


def of_fragments(setting: Setting, prediction: Prediction, late_steps_whole: int) -> str:
    """Why so many; `late_steps_whole`: with the fewest for the same interval."""
    if setting.fragments == 1:
        return "the whole model in each round"
    if prediction.late_steps < late_steps_whole:
        return (
            f"results are taken over {counted(prediction.late_steps, 'inner step')} late, with the whole "
            f"model in each round {late_steps_whole}; as many bytes for a step"
        )
    return f"a round sends one part of {setting.fragments}"
