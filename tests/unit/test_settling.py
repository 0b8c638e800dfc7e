"""A preset in a run file becomes plain keys, or a sentence that says what is missing."""

import json
import tomllib
from pathlib import Path

import pytest

from coordinator.config import RUN_TEMPLATE, settle_preset
from coordinator.presets import of_file
from coordinator.presets.settling import CannotEditError, settled, wants_settling, with_values
from coordinator.presets.view import prediction_lines
from coordinator.presets.wanted import Facts
from protocol.errors import ConfigError
from protocol.run.run_files import DESCRIPTION_FILE, MADE_OF, load_run_file, validated
from protocol.terminal.console import bits_per_second_of, directions_of, rate_in_words, seconds_of

ASKED = """\
[run]
min_nodes = 3

[exchange]   # slow links
preset = "auto"
link = "5mbit/1mbit"
round_trip = "50ms"
inner_step = "20ms"   # measured
"""


def refusal(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        settled(text, origin="run.toml")
    assert caught.value.next_step
    return f"{caught.value.what} -> {caught.value.next_step}"


def test_a_preset_becomes_plain_keys_with_their_reasons() -> None:
    made = settled(ASKED, origin="run.toml")
    tables = tomllib.loads(made.text)
    assert not {"preset", "link", "round_trip", "inner_step"} & tables["exchange"].keys()
    for choice in made.plan.choices:
        assert tables[choice.table][choice.key] == choice.value
        if not choice.is_given:
            assert f"# chosen: {choice.reason}\n{choice.key} = " in made.text
    assert '# settled: link = "5mbit/1mbit"' in made.text
    assert made.spec == validated(tables, origin="run.toml")
    assert made.plan.situation.up_bits_per_second == 1e6
    assert made.plan.situation.down_bits_per_second == 5e6
    assert made.plan.situation.num_nodes == 3


OF_A_FUNCTION = ASKED.replace(
    "[exchange]", '[model]\nsource = "function"\nfunction = "net:model"\n\n[exchange]', 1
)


def describe(folder: Path, **more: object) -> None:
    tensors = [{"name": "module.weight", "shape": [512, 2048]}]
    (folder / DESCRIPTION_FILE).write_text(json.dumps({"tensors": tensors} | more))


def test_a_preset_goes_by_the_model_that_is_described_beside_its_run_file(tmp_path: Path) -> None:
    (run_file := tmp_path / "run.toml").write_text(OF_A_FUNCTION)
    with pytest.raises(ConfigError, match="a preset goes by the size of the model") as caught:
        settle_preset(tmp_path)
    assert "'atoll init NEWDIR --run'" in caught.value.next_step
    describe(tmp_path)
    assert (made := settle_preset(tmp_path)) is not None
    assert made.plan.situation.num_parameters == 512 * 2048
    assert run_file.read_text() == made.text and settle_preset(tmp_path) is None

    run_file.write_text(OF_A_FUNCTION)  # of a fork, whose weights lie in one fragment
    describe(tmp_path, first_digest="ab" * 32, first_fragments=1)
    assert (made := settle_preset(tmp_path)) is not None
    assert made.plan.situation.has_weights and made.spec.exchange.fragments == 1

    run_file.write_text(OF_A_FUNCTION)  # with weights that are elsewhere, and were read in three
    made_of = {MADE_OF: {"exchange": {"fragments": 3}}}
    layers = [{"name": f"{n}", "shape": [512, 512], "layer": n} for n in range(8)]
    describe(tmp_path, tensors=layers, first_digest="ab" * 32, has_loaded=True, **made_of)
    assert (made := settle_preset(tmp_path)) is not None
    assert made.spec.exchange.fragments == 3
    assert "is of so many\nfragments = 3" in made.text


def test_a_model_is_described_before_the_preset_of_its_run_file_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run_file := tmp_path / "asked.toml").write_text(OF_A_FUNCTION + "blend = 0.5\n")
    (folder := tmp_path / "new").mkdir()

    def described(folder: Path, source: Path | None) -> Facts:
        assert not wants_settling(load_run_file(folder / "run.toml").model_dump())
        describe(folder)
        return Facts(notes=("it was built",))

    monkeypatch.setattr(of_file, "described", described)
    made = of_file.run_of_file(run_file, tmp_path / "code", folder)
    assert made.plan is not None and made.plan.situation.num_parameters == 512 * 2048
    assert "# settled: preset" in made.text and made.notes == ("it was built",)


def test_the_congestion_control_of_a_run_file_counts_and_goes_with_the_preset() -> None:
    asked = ASKED.replace("5mbit/1mbit", "50mbit/10mbit")
    usual = settled(asked, origin="run.toml")
    bbr = settled(f'{asked}congestion = "bbr"\n', origin="run.toml")
    assert usual.plan.situation.congestion_control == "cubic"
    assert bbr.plan.prediction.link_share > usual.plan.prediction.link_share
    assert '# settled: congestion = "bbr"' in bbr.text
    assert "congestion" not in tomllib.loads(bbr.text)["exchange"]


def test_what_is_settled_asks_for_nothing_more() -> None:
    made = settled(ASKED, origin="run.toml")
    assert wants_settling(tomllib.loads(ASKED))
    assert not wants_settling(tomllib.loads(made.text))


def test_the_same_file_settles_to_the_same_digest() -> None:
    one, other = settled(ASKED, origin="a"), settled(ASKED, origin="b")
    assert one.text == other.text and one.spec.digest() == other.spec.digest()


def test_explicit_keys_win() -> None:
    made = settled(f'{ASKED}downlink = "int8"\nfragments = 2\n[inner]\nsteps = 7\n', origin="x")
    assert made.spec.exchange.downlink == "int8"
    assert made.spec.exchange.fragments == 2
    assert made.spec.inner.steps == 7
    given = {c.key for c in made.plan.choices if c.is_given}
    assert given == {"downlink", "fragments", "steps"}


def test_an_unsettled_preset_never_becomes_a_run() -> None:
    with pytest.raises(ConfigError, match="not settled yet"):
        validated(tomllib.loads(ASKED), origin="run.toml")


@pytest.mark.parametrize(
    ("line", "replacement", "words"),
    [
        ('link = "5mbit/1mbit"', "", "needs link"),
        ('link = "5mbit/1mbit"', 'link = "fast"', "'fast' is no link"),
        ('link = "5mbit/1mbit"', 'link = "-5mbit"', "'-5mbit' is no link"),
        ('link = "5mbit/1mbit"', 'link = "5mbit/0mbit"', "too slow"),
        ('link = "5mbit/1mbit"', "link = 5", "link = 5:"),
        ('inner_step = "20ms"', "", "needs inner_step"),
        ('inner_step = "20ms"', 'inner_step = "0s"', "'0s' is no time"),
        ('round_trip = "50ms"', 'round_trip = "soon"', "'soon' is no time"),
        ('round_trip = "50ms"', 'congestion = "reno"', "congestion = 'reno'"),
        ('preset = "auto"', 'preset = "best"', "'best'"),
        ('preset = "auto"', "", 'no effect without preset = "auto"'),
        ("min_nodes = 3", "min_nodes = 1", "two nodes or more, not for 1"),
        ("[run]", "[exchange.more]\n[run]", "[exchange] more"),
        ('preset = "auto"', 'preset = "auto"\nuplink = "int5"', "int5"),
        ('preset = "auto"', 'preset = "auto"\nfragments = "4"', "fragments"),
        ('preset = "auto"', 'preset = "auto"\nfragments = 4', "the model has 3"),
        ('preset = "auto"', 'preset = "auto"\nblend = 1.5', "blend = 1.5"),
        (
            "[run]",
            '[outer]\noptimizer = "sgd"\nmomentum = 0.9\n[run]',
            '[outer] momentum = 0.9 belongs to optimizer = "nesterov", not to "sgd"',
        ),
        (
            'preset = "auto"',
            'preset = "auto"\noverlap = "none"\nblend = 0.3',
            'belongs to overlap = "keep"',
        ),
        (
            'preset = "auto"',
            'preset = "auto"\nuplink = "sign"\nerror_feedback = false',
            'uplink = "sign" needs error_feedback = true',
        ),
        (
            'preset = "auto"',
            'preset = "auto"\nfragments = 3\ntotal_steps = 2',
            "is over after 2 inner steps, before each parameter is exchanged, every 3: 3 fragments of 1 step",
        ),
        (
            "[run]\nmin_nodes = 3\n\n[exchange]   # slow links",
            "[inner]\nsteps = 10\n[run]\nmin_nodes = 3\nrounds = 100\n[exchange]\ntotal_steps = 500",
            "total_steps = 500, but [run] rounds times [inner] steps are 1000",
        ),
        (
            "[run]\nmin_nodes = 3\n\n[exchange]   # slow links",
            "[run]\nmin_nodes = 3\nrounds = 501\n[exchange]\ntotal_steps = 500",
            "[run] rounds = 501 are more than [exchange] total_steps = 500",
        ),
    ],
)
def test_what_is_missing_or_wrong_is_said(line: str, replacement: str, words: str) -> None:
    text = ASKED.replace(line, replacement)
    assert text != ASKED
    assert words in refusal(text)


def test_a_preset_with_nothing_left_to_choose_is_refused() -> None:
    text = RUN_TEMPLATE.replace(
        "[exchange]\n", '[exchange]\npreset = "auto"\nlink = "5mbit"\ninner_step = "1s"\n'
    )
    assert "nothing to choose" in refusal(text)


def test_a_preset_beside_round_tokens_is_refused_with_both() -> None:
    told = refusal(ASKED + "\n[inner]\nround_tokens = 30720\n")
    assert 'preset = "auto" chooses [inner] steps, and [inner] round_tokens = 30720' in told


DOTTED = """\
exchange.preset = "auto"
exchange.link = "5mbit/1mbit"   # the slowest
exchange . round_trip="50ms"
  exchange.inner_step = "20ms"
run.min_nodes = 3
"""


@pytest.mark.parametrize("more", ["", "[inner]\nbatch = 8\n", "[run]\nmin_nodes = 3\n"])
def test_a_preset_whose_table_is_named_before_each_key_is_settled_in_the_same_words(
    more: str,
) -> None:
    text = DOTTED.replace("run.min_nodes = 3\n", "") if "[run]" in more else DOTTED
    made = settled(text + more, origin="run.toml")
    assert made.spec == settled(ASKED, origin="run.toml").spec
    assert '# settled: exchange.link = "5mbit/1mbit"   # the slowest' in made.text
    uplink = next(choice for choice in made.plan.choices if choice.key == "uplink")
    assert f'# chosen: {uplink.reason}\nexchange.uplink = "{uplink.value}"\n' in made.text


def test_a_key_that_names_a_table_within_a_table_is_not_taken_for_that_table() -> None:
    text = "[a]\nb.x = 1\n"
    edited = with_values(text, {("b", "x"): (2, "")})
    assert tomllib.loads(edited) == {"a": {"b": {"x": 1}}, "b": {"x": 2}}


def test_a_table_in_one_line_is_refused_with_how_to_write_it() -> None:
    text = 'exchange = {preset = "auto", link = "5mbit", inner_step = "1s", nodes = 2}\n'
    assert "below a line with the name of their table, as [exchange]" in refusal(text)


@pytest.mark.parametrize(("step", "is_there"), [("60s", False), ("500ms", True)])
def test_a_blend_that_is_given_counts_only_where_overlap_is_chosen(
    step: str, is_there: bool
) -> None:
    text = ASKED.replace('"20ms"   #', f'"{step}" #')
    made = settled(f"{text}blend = 0.3\ntotal_steps = 10000\n", origin="run.toml")
    assert (made.spec.exchange.overlap != "none") == is_there
    assert made.spec.exchange.blend == (0.3 if is_there else None)
    assert ("# settled: blend = 0.3" in made.text) != is_there
    chosen_blends = [c.is_given for c in made.plan.choices if c.key == "blend"]
    assert chosen_blends == ([True] if is_there else [])


def test_a_run_of_hardly_any_steps_is_settled_into_as_few() -> None:
    made = settled(f"{ASKED}total_steps = 5\n", origin="run.toml")
    assert (made.spec.run.rounds, made.spec.inner.steps) == (5, 1)


def test_one_is_counted_in_the_singular() -> None:
    made = settled(f"{ASKED}total_steps = 1\n", origin="run.toml")
    said = "\n".join([made.text, *prediction_lines(made.plan)])
    assert "1 exchange of each parameter cost a tenth or more of the loss" in said
    assert "each parameter is exchanged every inner step, 1 time" in said.splitlines()


def test_as_many_rounds_as_total_steps_are_taken() -> None:
    asked = ASKED.replace("[run]\n", "[run]\nrounds = 500\n")
    made = settled(f"{asked}total_steps = 500\n", origin="run.toml")
    assert (made.spec.run.rounds, made.spec.inner.steps) == (500, 1)


def test_tables_written_in_another_way_are_refused_and_not_guessed_at() -> None:
    text = (
        '[run]\nmin_nodes = 2\n[exchange]\npreset = "auto"\nlink = "5mbit"\n"inner_step" = "1s"\n'
    )
    assert "cannot be written out" in refusal(text)


def test_values_change_where_they_stand_and_comments_stay() -> None:
    text = '[a]\nx = 1     # one\n# y = 2   # two\n\n[b] # here\nx = "no"\n'
    edited = with_values(
        text, {("a", "x"): (5, "why"), ("a", "y"): (0.5, ""), ("b", "z"): (True, "")}
    )
    assert edited == (
        '[a]\n# chosen: why\nx = 5     # one\ny = 0.5   # two\n\n[b] # here\nz = true\nx = "no"\n'
    )


def test_a_key_that_stands_there_changes_and_not_its_like_in_a_comment() -> None:
    text = "[a]\n# x = 1\nx = 2\n"
    assert with_values(text, {("a", "x"): (3, "")}) == "[a]\n# x = 1\nx = 3\n"


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        ("x=1#one", "x = 3 #one"),
        ("  x   = 1  # one", "  x = 3    # one"),
        ("x = 'a # b'  # one", "x = 3        # one"),
    ],
)
def test_spaces_and_quotes_are_as_people_like_them(line: str, changed: str) -> None:
    assert with_values(f"[a]\n{line}\n", {("a", "x"): (3, "")}) == f"[a]\n{changed}\n"


def test_what_is_indented_stays_so_with_its_reason() -> None:
    text = "  [a]\n  x = 1\n"
    assert with_values(text, {("a", "x"): (3, "why")}) == "  [a]\n  # chosen: why\n  x = 3\n"


def test_a_preset_as_pasted_from_the_pages_is_settled() -> None:
    text = ASKED.replace(" = ", "=").replace('"', "'").replace("\n", "\n    ")
    made = settled(text, origin="run.toml")
    assert "# settled: link='5mbit/1mbit'" in made.text
    assert made.spec == settled(ASKED, origin="run.toml").spec


def test_a_key_written_in_quotes_is_refused() -> None:
    with pytest.raises(CannotEditError):
        with_values('[a]\n"x" = 2\n', {("a", "x"): (3, "")})


def test_a_table_that_is_not_there_is_added() -> None:
    assert with_values("x = 1\n", {("a", "b"): ("c", "")}) == 'x = 1\n\n[a]\nb = "c"\n'


def test_a_key_in_a_string_of_several_lines_is_not_taken_for_one() -> None:
    text = '[a]\nnote = """\nx = 1\n"""\n'
    with pytest.raises(CannotEditError):
        with_values(text, {("a", "x"): (2, "")})


@pytest.mark.parametrize(
    ("text", "bits"),
    [("100mbit", 1e8), ("1.25MB/s", 1e7), ("2 gbit/s", 2e9), ("8kbit", 8e3), ("0mbit", 0.0)],
)
def test_rates_are_read_in_bits_and_bytes(text: str, bits: float) -> None:
    assert bits_per_second_of(text) == bits


@pytest.mark.parametrize("text", ["10mb", "fast", "", "-1mbit", "1e3mbit", "10", "mbit"])
def test_what_may_mean_either_is_no_rate(text: str) -> None:
    assert bits_per_second_of(text) is None
    assert directions_of(text) is None


def test_a_link_has_one_rate_or_two() -> None:
    assert directions_of("20mbit/5mbit") == (2e7, 5e6)
    assert directions_of("1.25MB/s / 500kB/s") == (1e7, 4e6)
    assert directions_of("20mbit") == (2e7, 2e7)
    assert directions_of("20mbit/") is directions_of("20mbit/5mbit/1mbit") is None
    assert [rate_in_words(b) for b in (1e9, 2e7, 2.5e5, 10)] == [
        "1gbit",
        "20mbit",
        "250kbit",
        "10bit",
    ]


def test_milliseconds_are_times_too() -> None:
    assert [seconds_of(t) for t in ("100ms", "1.2s", "3", "2m")] == [0.1, 1.2, 3.0, 120.0]
    assert seconds_of("-1s") is seconds_of("1 s ms") is seconds_of("") is None
