"""Compiles all kernels into the user's cache: once, before many processes would each do it."""

from node.exchange.codecs.registry import CODECS, compile_kernels
from node.exchange.outer import compile_arithmetic
from node.exchange.outer_optimizer import Nesterov, Sgd


def compile_all() -> None:
    """Of all codecs and outer optimizers."""
    for codec in CODECS:
        compile_kernels(codec)
    for optimizer in (Nesterov(learning_rate=1.0, momentum=0.9), Sgd(learning_rate=1.0)):
        compile_arithmetic(optimizer)


if __name__ == "__main__":
    compile_all()
