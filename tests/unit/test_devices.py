"""Which devices a node's ranks get, and what is refused because no machine has it."""

import pytest
import torch

from node.island.ranks.devices import devices_of, kind_of
from protocol.errors import ConfigError


@pytest.mark.parametrize(
    ("choice", "ranks", "message"),
    [
        ("cuda", None, "no CUDA GPU is usable here"),
        ("cuda:0", 1, "no CUDA GPU is usable here"),
        ("xpu", None, r"xpu asked for, but no Intel GPU is usable here .*check xpu-smi"),
        ("xpu:3", 1, "xpu:3 asked for, but no Intel GPU is usable here"),
        ("mps", None, "mps asked for, but no Apple GPU is usable here"),
        ("cuda:0", 2, "2 ranks cannot share cuda:0"),
        ("xpu:0", 2, r'2 ranks cannot share xpu:0; choose "xpu", or one rank'),
        ("mps:0", None, "unknown device 'mps:0'"),
        ("tpu", None, "unknown device 'tpu'"),
        ("cpu", 0, "0 ranks cannot train"),
    ],
)
def test_a_device_that_is_not_there_is_refused(
    choice: str, ranks: int | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=message) as refused:
        devices_of(choice, ranks)
    assert refused.value.exit_code == 78


def test_auto_takes_intels_gpus_and_then_apples_when_there_is_no_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert devices_of("auto") == devices_of("mps") == ("mps",)
    assert kind_of(("mps",)) == "mps"
    with pytest.raises(ConfigError, match="2 GPUs asked for, but there is 1 Apple GPU"):
        devices_of("mps", 2)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 2)
    assert devices_of("auto") == devices_of("xpu", 2) == ("xpu:0", "xpu:1")
    assert kind_of(devices_of("xpu:1")) == "xpu"


def test_auto_takes_every_gpu_and_else_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert devices_of("auto") == ("cpu",)
    assert devices_of("cpu", 2) == ("cpu", "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert devices_of("auto") == devices_of("cuda") == ("cuda:0", "cuda:1")
    assert devices_of("cuda", 1) == ("cuda:0",)
    assert devices_of("cuda:1") == ("cuda:1",)
    with pytest.raises(ConfigError, match="3 GPUs asked for, but there are 2 CUDA GPUs"):
        devices_of("cuda", 3)
