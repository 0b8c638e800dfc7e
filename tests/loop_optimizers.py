"""Optimizers that keep weights of their own, as people bring them to training loops."""

from typing import Any

import torch
from torch.optim import Optimizer


class Lookahead(Optimizer):
    """Goes half of the way back to slow weights now and then (Zhang et al., 2019, arXiv 1907.08610)."""

    def __init__(self, parameters: Any, lr: float = 0.25) -> None:
        super().__init__(parameters, {"lr": lr})
        self.optimizer = torch.optim.SGD(self.param_groups, lr=lr)
        self._steps = 0

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]  # of no use here
        self._steps += 1
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("slow", parameter.clone())
        self.optimizer.step()
        for parameter in self.param_groups[0]["params"] if self._steps % 2 == 0 else ():
            slow = self.state[parameter]["slow"]
            parameter.copy_(slow.lerp_(parameter, 0.5))


class Masters(Optimizer):
    """Adds to weights in fp32, and rounds them to the model's."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]  # of no use here
        for parameter in self.param_groups[0]["params"]:
            master = self.state[parameter].setdefault("master", parameter.float())
            parameter.copy_(master.sub_(parameter.grad, alpha=0.25))


class ScheduleFree(Optimizer):
    """SGD without a schedule (Defazio et al., 2024, arXiv 2405.15682): trains y, evaluates x, keeps z."""

    def __init__(self, parameters: Any, lr: float = 0.25) -> None:
        super().__init__(parameters, {"lr": lr, "beta": 0.75, "is_training": True, "steps": 0})

    def _turn(self, is_training: bool) -> None:
        (group,) = self.param_groups
        beta = group["beta"]
        share = 1 - beta if is_training else 1 - 1 / beta
        if is_training != group["is_training"]:
            group["is_training"] = is_training
            for parameter in group["params"]:
                if "z" in self.state[parameter]:
                    parameter.data.lerp_(self.state[parameter]["z"], share)

    def eval(self) -> None:
        self._turn(False)

    def train(self) -> None:
        self._turn(True)

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]  # of no use here
        (group,) = self.param_groups
        assert group["is_training"]
        group["steps"] += 1
        beta, rate, share = group["beta"], group["lr"], 1 / group["steps"]
        for parameter in group["params"]:
            z = self.state[parameter].setdefault("z", parameter.clone())
            parameter.lerp_(z, share).sub_(parameter.grad, alpha=rate * (1 - beta * (1 - share)))
            z.sub_(parameter.grad, alpha=rate)
