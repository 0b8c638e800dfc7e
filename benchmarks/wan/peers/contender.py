"""What is compared: contenders by name, with the settings that each does best with.

How they were found is in docs/performance.md, "Over slow links, beside the peers". How often a
contender does best to exchange depends on the link: `gloo-diloco@20` is gloo-diloco with 20 inner steps
between two exchanges, a variant of it, and nothing else differs.
"""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from protocol.errors import UsageError

Tables = Mapping[str, Mapping[str, Any]]

VARIANT_MARK = "@"
"""Between a contender's name and its variant's inner steps."""


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
    has_rounds: bool = True  # False: it exchanges at every inner step

    @property
    def is_atoll(self) -> bool:
        return self.module == "atoll"

    @property
    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.needs) is not None

    def every(self, inner_steps: int) -> "Contender":
        """The variant with so many inner steps between two exchanges."""
        if not self.has_rounds:
            raise UsageError(
                f"{self.name} exchanges at every inner step, not at every {inner_steps}",
                next_step=f"name it {self.name}",
            )
        own = {**self.tables.get("inner", {}), "steps": inner_steps}
        name = f"{self.name}{VARIANT_MARK}{inner_steps}"
        return replace(self, name=name, tables={**self.tables, "inner": own})


def not_installed(contender: Contender) -> str:
    """What the row of a contender that is missing says."""
    return f"not installed: pip install 'atoll[peers]' brings {contender.needs}"


def _atoll(name: str, words: str, **exchange: Any) -> Contender:
    # One node evaluates the first weights before it trains, which no peer does: as little as can be.
    tables = {"exchange": exchange, "evaluation": {"samples": 1}}
    return Contender(name=name, module="atoll", words=words, tables=tables)


def _ddp(name: str, words: str, **options: Any) -> Contender:
    return Contender(name=name, module="ddp", words=words, options=options, has_rounds=False)


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
        "atoll-ec2-ec2",
        "ec2 both ways, blended overlap",
        uplink="ec2",
        downlink="ec2",
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
    _ddp("ddp", "torch DDP, fp32"),
    _ddp("ddp-fp16", "torch DDP, fp16", hook="fp16"),
    _ddp("ddp-powersgd", "torch DDP, PowerSGD of rank 4", hook="powersgd", rank=4, bucket_mb=25),
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
        words="torchft DiLoCo, all-reduce during half of the steps",
        options={"delay_share": 0.5, "alpha": 0.5},
        needs="torchft",
        has_lighthouse=True,
    ),
    Contender(
        name="torchft-overlap-most",
        module="torchft_diloco",
        words="torchft DiLoCo, all-reduce during nine tenths of the steps",
        options={"delay_share": 0.9, "alpha": 0.5},
        needs="torchft",
        has_lighthouse=True,
    ),
)

BY_NAME = {contender.name: contender for contender in CONTENDERS}

PUBLISHED = (
    *("atoll@3", "atoll-ec2@3", "atoll-ec2-ec2@2", "atoll-ec2-ec2@3", "atoll-ec1@3"),
    *("gloo-diloco-bf16@10", "gloo-diloco-bf16@20"),
    *("torchft-overlap-most@10", "torchft-overlap-most@20"),
    "torchft-overlap@20",  # half of so many steps is long enough for its bytes
    "hivemind@20",
)
"""What docs/performance.md compares: those who could win, each as often as suits it."""


def named(name: str) -> Contender:
    """A contender by its name, or a variant by NAME@STEPS. Raises UsageError when there is none."""
    base, mark, steps = name.partition(VARIANT_MARK)
    if base not in BY_NAME:
        raise UsageError(
            f"there is no contender {base!r}", next_step=f"name one of {', '.join(BY_NAME)}"
        )
    if not mark:
        return BY_NAME[base]
    if not steps.isdecimal() or not int(steps):
        raise UsageError(
            f"{name}: {steps!r} is no number of inner steps", next_step=f"write {base}@20"
        )
    return BY_NAME[base].every(int(steps))
