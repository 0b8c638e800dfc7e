"""What is compared: contenders by name, with the settings that each does best with.

How they were found is in docs/performance.md, "Over slow links, beside the peers".
"""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Tables = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One way to train over slow links."""

    name: str
    module: str  # in this package: what each node runs, or how Atoll is started
    words: str
    tables: Tables = field(default_factory=dict)  # over the benchmark's run file
    options: Mapping[str, Any] = field(default_factory=dict)  # of the module
    needs: str = "torch"  # what must be importable
    has_lighthouse: bool = False

    @property
    def is_atoll(self) -> bool:
        return self.module == "atoll"

    @property
    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.needs) is not None


def not_installed(contender: Contender) -> str:
    """What the row of a contender that is missing says."""
    return f"not installed: pip install 'atoll[peers]' brings {contender.needs}"


def _atoll(name: str, words: str, **exchange: Any) -> Contender:
    # One node evaluates the first weights before it trains, which no peer does: as little as can be.
    tables = {"exchange": exchange, "evaluation": {"samples": 1}}
    return Contender(name=name, module="atoll", words=words, tables=tables)


CONTENDERS = (
    _atoll(
        "atoll",
        "int4 both ways, blended overlap",
        uplink="int4",
        downlink="int4",
        overlap="blend",
    ),
    _atoll(
        "atoll-ec2",
        "ec2 up, int4 down, blended overlap",
        uplink="ec2",
        downlink="int4",
        overlap="blend",
    ),
    _atoll(
        "atoll-ec1",
        "ec1 both ways, blended overlap",
        uplink="ec1",
        downlink="ec1",
        overlap="blend",
    ),
    _atoll("atoll-waiting", "int4 both ways, no overlap", uplink="int4", downlink="int4"),
    _atoll("atoll-fp32", "fp32 both ways, no overlap", uplink="fp32", downlink="fp32"),
    Contender(name="ddp", module="ddp", words="torch DDP, fp32"),
    Contender(name="ddp-fp16", module="ddp", words="torch DDP, fp16", options={"hook": "fp16"}),
    Contender(
        name="ddp-powersgd",
        module="ddp",
        words="torch DDP, PowerSGD of rank 4",
        options={"hook": "powersgd", "rank": 4, "bucket_mb": 25},
    ),
    Contender(name="gloo-diloco", module="gloo_diloco", words="DiLoCo by gloo, fp32"),
    Contender(
        name="gloo-diloco-bf16",
        module="gloo_diloco",
        words="DiLoCo by gloo, bf16",
        options={"dtype": "bf16"},
    ),
    Contender(
        name="hivemind",
        module="hivemind_optimizer",
        words="hivemind.Optimizer, local updates, float16",
        options={"compression": "float16"},
        needs="hivemind",
    ),
    Contender(
        name="hivemind-delayed",
        module="hivemind_optimizer",
        words="hivemind.Optimizer, averaging in the background",
        options={"compression": "float16", "delay": True},
        needs="hivemind",
    ),
    Contender(
        name="torchft",
        module="torchft_diloco",
        words="torchft DiLoCo, fp32",
        needs="torchft",
        has_lighthouse=True,
    ),
    Contender(
        name="torchft-overlap",
        module="torchft_diloco",
        words="torchft DiLoCo, all-reduce during 5 of 10 steps",
        options={"delay_share": 0.5, "alpha": 0.5},
        needs="torchft",
        has_lighthouse=True,
    ),
    Contender(
        name="torchft-overlap-most",
        module="torchft_diloco",
        words="torchft DiLoCo, all-reduce during 9 of 10 steps",
        options={"delay_share": 0.9, "alpha": 0.5},
        needs="torchft",
        has_lighthouse=True,
    ),
)

BY_NAME = {contender.name: contender for contender in CONTENDERS}
