"""Which of Atoll's extras are installed here: said in one sentence before anything of them is imported."""

from collections.abc import Sequence
from importlib.util import find_spec

from protocol.errors import SystemRefusedError

NODE = ("torch", "numba", "hivemind", "numpy", "safetensors")
"""What a node imports beside what coordinators and queries do: the extra `node`."""

HELPER = ("numba", "hivemind", "numpy", "safetensors", "base58", "netaddr", "multihash", "uvloop")
"""What a helper does: the extra `helper`, and hivemind without what its own package asks for."""

READING = ("numpy",)
"""What the commands about data do."""


def require_installed(packages: Sequence[str] = NODE, *, to: str) -> None:
    """Raises SystemRefusedError where a package is missing that is needed `to` do something."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise SystemRefusedError(
            f"{', '.join(missing)} {verb} not installed, and needed to {to}",
            next_step="pip install 'atoll[helper]' && pip install --no-deps hivemind"
            if packages is HELPER
            else "pip install 'atoll[node]'",
        )
