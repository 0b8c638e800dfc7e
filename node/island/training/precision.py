"""Mixed precision of the inner steps: which one a device does, and the loss scale that fp16 needs.

Master weights, gradients, their sums over samples and ranks, clipping, the optimizer and the loss
are fp32 whatever the precision; matrix products and attention are in the lower one (torch.autocast:
"Mixed precision training", Micikevicius et al., 2018).
"""

import math
from typing import assert_never

import torch
from torch import Tensor

from node.island.ranks.accelerator import has_fast_bf16, has_tf32, name_of
from node.island.ranks.faults import TrainingDivergedError
from node.island.training.local_training import Precision
from protocol.errors import ConfigError
from protocol.run.amendments import LOWER_RATES

_HIGHEST_LOSS_SCALE = 2.0**16
_STEPS_BEFORE_RISING = 2000
_DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def dtype_of(asked: Precision, device: torch.device) -> torch.dtype:
    """What matrix products are computed in; "auto" is bf16 on a GPU that has it, else fp32.

    Raises ConfigError for a GPU without bf16, which torch would emulate without a word.
    """
    match asked:
        case "auto":
            has_it = device.type in ("cuda", "xpu") and has_fast_bf16(device)
            return torch.bfloat16 if has_it else torch.float32
        case "bf16":
            if device.type != "cpu" and not has_fast_bf16(device):
                raise ConfigError(
                    f'precision = "bf16" asked for, but {name_of(device)} ({device}) has no bf16',
                    next_step='set precision = "fp16" or "fp32" in node.toml',
                )
        case "tf32":
            if not has_tf32(device):
                raise ConfigError(
                    f'precision = "tf32" asked for, but {name_of(device)} ({device}) has no TF32',
                    next_step='set precision = "bf16" or "fp32" in node.toml',
                )
        case "fp16" | "fp32":
            pass
        case _:
            assert_never(asked)
    return _DTYPES[asked]


def autocast(dtype: torch.dtype, device: torch.device) -> torch.autocast:
    """The context in which a loss is computed; it does nothing for fp32."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)


class LossScale:
    """Keeps the gradients of fp16 above its smallest numbers and below its largest.

    Dynamic loss scaling (Micikevicius et al., 2018, section 3.2): an inner step whose gradient is
    not finite is left out and the scale halved; it doubles after many good ones in a row. All ranks
    see the same gradient, so they agree without a word. Scales are powers of two: scaling is exact.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._is_needed = dtype == torch.float16
        self._steps_since_change = 0
        self.value = _HIGHEST_LOSS_SCALE if self._is_needed else 1.0

    def kept(self) -> tuple[float, int] | None:
        """The scale, and the steps since it was changed; None where there is none."""
        return (self.value, self._steps_since_change) if self._is_needed else None

    def take_up(self, value: float, steps_since_change: int) -> None:
        """Goes on from what was kept, where a scale is needed."""
        if self._is_needed:
            self.value, self._steps_since_change = value, steps_since_change

    def remove_from(self, gradients: list[Tensor]) -> None:
        """Divides the gradients by the scale, in place."""
        if self._is_needed:
            for gradient in gradients:
                gradient.div_(self.value)

    def allows(self, norm: Tensor) -> bool:
        """Whether to take the step with this gradient norm; moves the scale.

        Raises TrainingDivergedError when no scale is low enough. Only fp16 waits for the norm.
        """
        if not self._is_needed:
            return True
        self._steps_since_change += 1
        if not math.isfinite(norm.item()):
            if self.value <= 1.0:
                raise TrainingDivergedError(
                    "gradients overflow in fp16 even without a loss scale",
                    next_step=f'set precision = "bf16" or "fp32" in node.toml, or {LOWER_RATES}',
                )
            self.value /= 2
            self._steps_since_change = 0
            return False
        if self._steps_since_change >= _STEPS_BEFORE_RISING:
            self.value = min(_HIGHEST_LOSS_SCALE, 2 * self.value)
            self._steps_since_change = 0
        return True
