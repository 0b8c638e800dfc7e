"""`atoll demo`: a whole swarm on one machine, made of the same commands that people type."""

from node.demo.command import demo

__all__ = ["demo"]
