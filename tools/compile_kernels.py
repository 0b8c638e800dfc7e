"""Compiles all codecs' kernels into the user's cache: once, before many processes would each do it."""

from node.exchange.codecs.registry import CODECS, compile_kernels

if __name__ == "__main__":
    for codec in CODECS:
        compile_kernels(codec)
