"""A model for swarms that are not there for its loss."""

from collections.abc import Mapping
from typing import Any

TINY_MODEL: Mapping[str, Any] = {
    "hidden_size": 32,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 1,
    "ffn_size": 64,
    "context": 32,
}
