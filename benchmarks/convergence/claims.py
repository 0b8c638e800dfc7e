"""What was published about swarms like ours, as comparisons that benchmarks.convergence makes."""

from dataclasses import dataclass
from typing import get_args

from benchmarks.convergence.settings import DATA_PARALLEL
from protocol.run.run_spec import CodecName


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A published sign, as a comparison of two settings of a part."""

    says: str
    part: str
    of: str
    against: str
    sign: int  # of the loss's difference: +1, -1, or 0 for "nothing is lost"


CLAIMS = (
    Claim(
        says="longer training alone costs a little",
        part="steps",
        of="H = 80",
        against="H = 5",
        sign=1,
    ),
    Claim(
        says="a swarm ends behind data parallelism with the same tokens",
        part="steps",
        of="H = 20",
        against=DATA_PARALLEL,
        sign=1,
    ),
    Claim(
        says="more nodes, so more tokens, end lower",
        part="nodes",
        of="8 nodes",
        against="1 nodes",
        sign=-1,
    ),
    Claim(
        says="8 bits both ways lose nothing",
        part="codecs",
        of="int8 / int8",
        against="fp32 / fp32",
        sign=0,
    ),
    Claim(
        says="4 bits both ways lose nothing",
        part="codecs",
        of="int4 / int4, keep",
        against="fp32 / fp32",
        sign=0,
    ),
    Claim(says="Muon ends lower than AdamW", part="inner", of="Muon", against="AdamW", sign=-1),
    Claim(
        says="topics of one's own cost a little",
        part="text",
        of="own text",
        against="all text",
        sign=1,
    ),
    Claim(
        says="half of all contributions late costs a little",
        part="drops",
        of="50% late",
        against="none late",
        sign=1,
    ),
    Claim(
        says="Nesterov with momentum 0.9 beats plain SGD",
        part="outer",
        of="nesterov 0.7, 0.9",
        against="sgd 1.0",
        sign=-1,
    ),
    Claim(
        says="the best outer rate rises with nodes: at 8, 0.7 beats 0.5",
        part="rates",
        of="rate 0.7, 8 nodes, H = 20",
        against="rate 0.5, 8 nodes, H = 20",
        sign=-1,
    ),
    Claim(
        says="… and at 1 it does not",
        part="rates",
        of="rate 0.7, 1 nodes, H = 20",
        against="rate 0.5, 1 nodes, H = 20",
        sign=1,
    ),
    Claim(
        says="it rises with H: at 80, 0.7 beats 0.5",
        part="rates",
        of="rate 0.7, 4 nodes, H = 80",
        against="rate 0.5, 4 nodes, H = 80",
        sign=-1,
    ),
    *(
        Claim(
            says=says, part="codecs", of=f"{codec} / {of}", against=f"{codec} / {against}", sign=1
        )
        for codec, says, of, against in (
            ("int2", "2 bits want error feedback", "int2, no feedback", "int2, keep"),
            ("sign", "1 bit wants its reducer's error kept", "sign, drop", "sign, keep"),
            ("topk64", "sparse codecs both ways too", "topk64, drop", "topk64, keep"),
        )
        if codec in get_args(CodecName)
    ),
)
