"""[exchange] and [outer] in the run file: what does not go together is refused with its value."""

from typing import Any

import pytest

from node.exchange.outer import Outer
from protocol.errors import ConfigError
from tests.tiny_runs import tiny
from tests.unit.exchange_scene import LAYOUT, A, outer_of


@pytest.mark.parametrize(
    ("table", "values", "why"),
    [
        ("exchange", {"residual_decay": 0.0}, r"residual_decay = 0.0: input should be greater"),
        ("exchange", {"residual_decay": 1.5}, r"residual_decay = 1.5: input should be less"),
        (
            "exchange",
            {"error_feedback": False, "residual_decay": 0.9},
            r"residual_decay = 0.9 has no effect without error_feedback = true",
        ),
        (
            "exchange",
            {"error_feedback": False, "reducer_error": "own"},
            r'reducer_error = "own" needs error_feedback = true',
        ),
        *(
            (
                "exchange",
                {"error_feedback": False, "uplink": codec},
                rf'uplink = "{codec}" needs error_feedback = true',
            )
            for codec in ("ec1", "sign", "topk256", "topk64")
        ),
        ("exchange", {"reducer_error": "lose"}, r"reducer_error = 'lose': input should be 'drop'"),
        ("outer", {"merge": "median"}, r"merge = 'median': input should be 'mean'"),
        ("outer", {"scaling": "linear"}, r"scaling = 'linear': input should be 'none'"),
    ],
)
def test_rules_that_cannot_be_followed_are_refused(
    table: str, values: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        tiny(**{table: values})


@pytest.mark.parametrize("codec", ["int4", "ec3", "ec2", "int2"])
def test_codecs_of_two_bits_or_more_do_without_error_feedback(codec: str) -> None:
    assert tiny(exchange={"error_feedback": False, "uplink": codec}).exchange.uplink == codec


def test_a_reducers_error_may_be_kept_without_error_feedback() -> None:
    """They are errors of different encodings."""
    spec = tiny(exchange={"error_feedback": False, "reducer_error": "keep"})
    parameters = outer_of(A).snapshot().parameters
    outer = Outer.of_run(
        spec, layout=LAYOUT, published=parameters.copy(), node_id=A, parameters=parameters
    )
    assert outer.owed().reducer_error == {}
