"""What presets count on is what was measured: every figure against the results that it is from."""

import re
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest

from benchmarks import race, races
from benchmarks.exchange.shares import exchanges, predictions_in_words, share_in_words
from benchmarks.learning import given_weights, intervals, other_models, overlap
from benchmarks.measurement import asked_by, read_rows
from benchmarks.presets import situation_of
from benchmarks.race import known_in
from benchmarks.races import RATES, report
from coordinator.presets import costly, loss, reasons
from coordinator.presets.choosing import FEW_NODES, MANY_SPARSE_EXCHANGES, OFTEN_STEPS, often_steps
from coordinator.presets.cost import MEASURED_SHARE, Setting
from coordinator.presets.reasons import MORE_MOMENTUM_FOR_SPARSE, of_downlink

DOCS = Path(__file__).resolve().parents[2] / "docs"
RESULTS = DOCS / "results"


def test_what_the_docs_say_of_exchanges_is_what_the_benchmark_prints() -> None:
    found = exchanges()
    said = " ".join((DOCS / "performance.md").read_text().split())
    assert share_in_words(found) in said
    assert predictions_in_words(found) in said
    assert f"{MEASURED_SHARE:.2f} over bbr" in (DOCS / "coordinators.md").read_text()


def test_the_tables_of_intervals_in_the_docs_are_what_the_benchmark_prints() -> None:
    said = (DOCS / "learning.md").read_text() + (RESULTS / "tables.md").read_text()
    known = intervals.known_in(RESULTS / "intervals.jsonl")
    for table in intervals.report(known, 1200):
        assert table in said


def test_the_table_of_given_weights_in_the_docs_is_what_the_benchmark_prints() -> None:
    known = given_weights.known_in(RESULTS / "given-weights.jsonl")
    (table,) = given_weights.report(known, (2e-3, 8e-3))
    assert table in (RESULTS / "tables.md").read_text()


def test_what_exchanges_cost_from_given_weights_is_no_more_than_presets_expect() -> None:
    known = given_weights.known_in(RESULTS / "given-weights.jsonl")
    steps = loss.STEPS_OF_GIVEN + given_weights.STEPS
    for tried in given_weights.tries_of(0.0)[1:]:
        if tried.codec in loss.SPARSE or tried.outer != intervals.NESTEROV:
            continue
        setting = Setting(
            uplink=tried.codec,
            downlink=tried.codec,
            fragments=1,
            has_overlap=tried.late_steps > 0,
            steps=tried.interval,
        )
        expected = loss.above(
            setting,
            num_nodes=given_weights.NUM_NODES,
            total_steps=steps,
            late_steps=tried.late_steps,
            inner_optimizer="adamw",
        )
        found = [
            each
            for rate in (2e-3, 8e-3)
            for each in given_weights.above(known, replace(tried, rate=rate))
        ]
        assert len(found) == 4 and mean(found) <= expected.whole
        if tried.interval == 30 and not tried.late_steps:
            assert expected.whole < 0.035, "from nothing 300 steps would cost four times that"


def test_from_given_weights_few_bits_end_where_fp32_does() -> None:
    known = given_weights.known_in(RESULTS / "given-weights.jsonl")
    ratios = [
        ended / known[replace(tried, codec="fp32")]
        for tried, ended in known.items()
        if (tried.interval, tried.outer, tried.late_steps) == (10, intervals.PLAIN, 0)
        and tried.codec in ("int4", "ec2")
    ]
    assert len(ratios) == 8 and all(abs(each - 1) < 1e-3 for each in ratios)


def test_how_the_plain_mean_ends_from_given_weights_is_as_presets_say() -> None:
    known = given_weights.known_in(RESULTS / "given-weights.jsonl")
    higher = [
        known[replace(tried, outer=intervals.PLAIN)] / nesterov - 1
        for tried, nesterov in known.items()
        if tried.outer == intervals.NESTEROV
        and tried.rate == 2e-3
        and replace(tried, outer=intervals.PLAIN) in known
    ]
    assert len(higher) == 4
    said = f"{100 * min(higher):.1f} to {100 * max(higher):.1f} % higher"
    assert said in reasons.WEIGHTS


def test_why_sparse_codecs_are_not_for_short_intervals_was_measured() -> None:
    known = intervals.known_in(RESULTS / "intervals.jsonl")
    every_two = [tried for tried in known if (tried.codec, tried.interval) == ("topk256", 2)]
    assert [tried.steps // tried.interval for tried in every_two] == [600, 600]
    assert all(0.04 < mean(intervals.above(known, tried)) < 0.05 for tried in every_two)
    assert loss.LEAST_SPARSE_INTERVAL > 2


def test_what_is_said_of_momentum_is_what_short_runs_ended_at() -> None:
    known = intervals.known_in(RESULTS / "intervals.jsonl")
    in_time = [t for t in known if not t.late_steps and not t.rate and t.seed == 0]

    def higher(tried: intervals.Try, than: tuple[float, float]) -> float | None:
        least = known.get(replace(tried, outer=than))
        return None if least is None else 100 * (known[tried] / least - 1)

    few = [t for t in in_time if t.optimizer == "adamw" and t.interval > 12 and t.steps <= 360]
    found = {
        momentum: [
            cost
            for each in few
            if each.outer == (0.7, momentum) and each.steps // each.interval >= 4
            if (cost := higher(each, (0.7, 0.3))) is not None
        ]
        for momentum in (0.6, 0.9)
    }
    often = [t for t in in_time if 0 < t.interval <= 12 and t.steps >= 300 and t.codec == "fp32"]
    most = max(higher(t, intervals.PLAIN) or 0.0 for t in often if t.outer == intervals.NESTEROV)
    sentences = Path(costly.__file__).read_text()
    for momentum, words in ((0.6, "0.6 ended "), (0.9, "0.9 ")):
        assert len(found[momentum]) >= 3
        assert f"{words}{min(found[momentum]):.0f} to {max(found[momentum]):.0f} %" in sentences
    assert f"0.6 ended up to {most:.0f} % higher than the plain mean" in sentences


def test_what_is_said_of_other_models_is_what_they_ended_at() -> None:
    known = other_models.known_in(RESULTS / "other-models.jsonl")
    pages = (DOCS / "learning.md").read_text() + (RESULTS / "tables.md").read_text()
    ratios: dict[str, list[float]] = {"sgd": [], "adamw": []}
    beside_plain: list[float] = []
    for steps in (180, other_models.STEPS):
        (table,) = other_models.report(known, steps)
        assert table in pages
        for each in {replace(e, seed=0) for e in known if e.steps == steps and e.interval > 5}:
            if each.outer == intervals.NESTEROV:
                of_seeds = [t for t in known if replace(t, seed=0) == each]
                less, plain = (
                    mean(known[replace(t, outer=outer)] for t in of_seeds)
                    for outer in ((0.7, 0.3), intervals.PLAIN)
                )
                here = mean(known[t] for t in of_seeds)
                ratios[each.optimizer].append(100 * (here / less - 1))
                if each.optimizer == "sgd":
                    beside_plain.append(100 * (1 - here / plain))
    adamw = ratios["adamw"]
    assert max(ratios["sgd"]) < 0
    assert f"up to {max(beside_plain):.0f} % lower so" in reasons.BY_SGD
    assert f"between {-min(adamw):.0f} % lower and {max(adamw):.0f} % higher" in " ".join(
        pages.split()
    )


def test_what_the_plain_mean_costs_two_nodes_is_what_they_ended_at() -> None:
    known = intervals.known_in(RESULTS / "intervals.jsonl")
    lower = {
        (tried.optimizer, tried.interval): 100
        * (1 - loss / known[replace(tried, outer=intervals.PLAIN)])
        for tried, loss in known.items()
        if (tried.outer, tried.codec, tried.steps) == (intervals.NESTEROV, "fp32", 1200)
        and not tried.late_steps
        and not tried.rate
        and tried.seed == 0
        and replace(tried, outer=intervals.PLAIN) in known
    }
    seldom = [
        each
        for (optimizer, interval), each in lower.items()
        if optimizer == "adamw" and interval >= costly.SELDOM_STEPS
    ]
    assert len(seldom) >= 2
    assert f"{min(seldom):.1f} to {max(seldom):.1f} % lower" in reasons.SELDOM_BY_TWO
    # Seeds differ by 1 %: neither Muon, nor momentum between the numbers, costs more.
    between = [each for (_, interval), each in lower.items() if interval == 10]
    of_muon = [
        each
        for (optimizer, interval), each in lower.items()
        if "muon" in optimizer and interval >= 30
    ]
    assert len(between) == 2 and len(of_muon) >= 2
    assert all(abs(each) < 1 for each in between + of_muon)


def test_late_results_are_blended_for_the_optimizer_that_ended_lower_so() -> None:
    """Beside the rule for the other: in per cent of the loss, by interval and lateness."""
    known = intervals.known_in(RESULTS / "intervals.jsonl")

    def lower_by(optimizer: str, interval: int, late_steps: int) -> float:
        keeps = intervals.Try(
            optimizer=optimizer,
            interval=interval,
            codec="int4",
            late_steps=late_steps,
            overlap="keep",
            blend=0.5,
        )
        blends = replace(keeps, overlap="blend", outer=(0.7, 0.6))
        return 100 * (1 - known[blends] / known[keeps])

    assert [round(lower_by("adamw", *late), 1) for late in ((4, 2), (5, 5), (10, 5))] == [
        0.4,
        2.1,
        2.0,
    ]
    assert [round(lower_by("muon", *late), 1) for late in ((4, 2), (10, 10))] == [-0.6, -0.4]


def rows_of_race(title: str) -> list[list[str]]:
    """The cells of the table that the benchmark prints for a case, of the usual length."""
    printed = list(report(known_in(race.RESULTS)))
    (table,) = [
        table
        for told, table in zip(printed[::2], printed[1::2], strict=True)
        if told.startswith(title) and not told.endswith("as long")
    ]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


def test_the_summary_of_the_race_in_the_docs_is_of_its_results() -> None:
    said = (DOCS / "learning.md").read_text().partition("## As fast to a loss as peers")[2]
    pattern = r"^\| (5|50|300) \| (\d) \| (AdamW|Muon) \| (.*) \|$"
    lines = re.findall(pattern, said, re.MULTILINE)
    assert len(lines) == 8
    for ratio, num_nodes, optimizer, cells in lines:
        rows = {
            row[0].split(", ")[0]: row
            for row in rows_of_race(f"R = {ratio}, {num_nodes} nodes")
            if f", {optimizer.lower()}" in row[0]
        }
        above = [
            f"{float(rows[name][7].split('%')[0]):+.1f} %" for name in (*races.PEERS, races.ATOLL)
        ]
        times = [rows[name][8].partition(" (")[0] for name in (races.ATOLL, races.CEILING)]
        assert cells.replace("*", "").split(" | ") == [*above, *times]


@pytest.mark.parametrize(
    ("begins", "race_of", "num_contenders"),
    [
        ("would take 5 inner steps", "R = 5, 2 nodes", 8),
        ("would take 50 inner steps", "R = 50, 2 nodes", 8),
        ("**Four nodes**", "R = 50, 4 nodes", 8),
        ("would take 300 inner steps", "R = 300, 2 nodes", 8),
    ],
)
def test_the_table_of_the_race_in_the_docs_is_of_its_results(
    begins: str, race_of: str, num_contenders: int
) -> None:
    section = (RESULTS / "tables.md").read_text().partition("## As fast to a loss as peers")[2]
    said = re.split(r"It would take|An exchange of|\*\*Four nodes", section.partition(begins)[2])[0]
    rows = rows_of_race(race_of)
    assert len(rows) == num_contenders
    for name, _, _, steps, _, _, loss_, above_, times, speed in rows:
        contender, optimizer = name.split(", ")[:2]
        (line,) = [
            line
            for line in said.splitlines()
            if line.startswith(f"| {contender}") and optimizer in line.lower()
        ]
        assert f"| {loss_.split()[0]} |" in line, name
        assert contender == races.CEILING or f"{float(above_.split('%')[0]):+.1f} %" in line, name
        assert times.partition(" ")[0] in line, name
        assert speed.partition(" (")[0] in line, name
        fragments = {races.PLAIN: 1, races.STREAMING: races.NUM_LAYERS}.get(contender)
        if contender == races.ATOLL and optimizer == "muon":
            fragments = races.NUM_LAYERS
        assert fragments is None or f"| {fragments * int(steps)} |" in line, name


def test_the_longer_race_in_the_docs_is_of_its_results() -> None:
    said = (DOCS / "learning.md").read_text().partition("**In four times as many steps**")[2]
    printed = list(report(known_in(race.RESULTS)))
    longer = printed.index(next(each for each in printed if each.endswith("4 times as long")))
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in printed[longer + 1].splitlines()[2:]
    ]
    assert len(rows) == 3
    for name, _, _, steps, _, _, loss_, above_, _, _ in rows:
        contender = name.split(", ")[0]
        line = next(each for each in said.splitlines() if each.startswith(f"| {contender}"))
        assert f"| {loss_.split()[0]} |" in line
        if contender != races.CEILING:
            mean_, least, _, most = (
                float(part.strip("(%)")) for part in above_.replace("to", "0").split()
            )
            assert f"{mean_:+.1f} %" in line and f"({least:.1f}, {most:.1f})" in line
            assert f"| {races.NUM_LAYERS * int(steps)} |" in line
    known = known_in(race.RESULTS)
    told = [
        row["loss"]
        for each, row in known.items()
        if (each.contender == races.ATOLL and each.times > 1 and each.outer == (0.7, 0.6))
        or each.times == 8
    ]
    told += [
        ended
        for each, ended in intervals.known_in(RESULTS / "intervals.jsonl").items()
        if (each.optimizer, each.steps, each.codec, each.rate) == ("muon", 4800, "fp32", 6e-3)
    ]
    assert len(told) == 14 and all(f"{each:.4f}" in said for each in told)


def above(part: str, setting: str, other: str = "data parallel") -> float:
    """Per cent of the other's loss, the mean of the seeds that both have."""
    losses = {
        (row["setting"], row["seed"]): row["loss"]
        for row in read_rows(RESULTS / "convergence.jsonl")
        if row["part"] == part
    }
    return mean(
        100 * (loss / losses[other, seed] - 1)
        for (name, seed), loss in losses.items()
        if name == setting
    )


def test_what_reasons_say_of_sparse_codecs_was_measured() -> None:
    pair, both = "topk64 up, topk256 down, H = {}", "topk256, H = 32"
    situation = situation_of("7b", 10)
    setting = Setting(uplink="topk64", downlink="topk256", fragments=1, has_overlap=True, steps=120)
    of_both = [above("frontier", both), above("long", both)]
    more_momentum = above("long", f"{pair.format(21)}, momentum 0.5")
    assert (
        f"{above('frontier', pair.format(20)):.1f} % in {1600 // 20} exchanges, "
        f"{more_momentum:.1f} % in {6400 // 21}, and topk256 both ways "
        f"{of_both[0]:.1f} % and {of_both[1]:.1f} %"
    ) in of_downlink(setting, situation)
    assert (
        f"cost {of_both[0]:.1f} % in {1600 // 32} exchanges, {of_both[1]:.1f} % in {6400 // 32}"
    ) in of_downlink(setting, replace(situation, num_nodes=5))


def test_what_reasons_say_of_momentum_for_sparse_codecs_was_measured() -> None:
    little = "topk64 up, topk256 down, H = 21"
    lower = -above("long", f"{little}, momentum 0.5", little)
    assert f"in {6400 // 21} exchanges top-k ended {lower:.1f} %" in MORE_MOMENTUM_FOR_SPARSE
    assert MANY_SPARSE_EXCHANGES <= 6400 // 21


@pytest.mark.parametrize(
    ("part", "setting", "uplink", "downlink", "interval", "steps"),
    [
        ("frontier", "int4, H = 32", "int4", "int4", 32, 1600),
        ("frontier", "int4, H = 80", "int4", "int4", 80, 1600),
        ("long", "int4, H = 32", "int4", "int4", 32, 6400),
        ("long", "int4, H = 65", "int4", "int4", 65, 6400),
        ("long", "int4, H = 80", "int4", "int4", 80, 6400),
        ("long", "ec2, H = 160", "ec2", "ec2", 160, 6400),
        ("frontier", "topk64 up, topk256 down, H = 20", "topk64", "topk256", 20, 1600),
        ("frontier", "topk256, H = 32", "topk256", "topk256", 32, 1600),
        ("long", "topk64 up, topk256 down, H = 21", "topk64", "topk256", 21, 6400),
        ("long", "topk256, H = 32", "topk256", "topk256", 32, 6400),
    ],
)
def test_what_presets_expect_of_seldom_exchanges_and_codecs_is_what_long_runs_lost(
    part: str, setting: str, uplink: str, downlink: str, interval: int, steps: int
) -> None:
    exchanged = Setting(
        uplink=uplink, downlink=downlink, fragments=1, has_overlap=False, steps=interval
    )
    expected = loss.above(
        exchanged, num_nodes=4, total_steps=steps, late_steps=0, inner_optimizer="adamw"
    ).whole
    assert 0.7 < 100 * expected / above(part, setting) < 1.5


@pytest.mark.parametrize("optimizer", RATES)
def test_what_presets_expect_of_seldom_and_late_exchanges_is_fitted_to_runs(optimizer: str) -> None:
    known = intervals.known_in(RESULTS / "intervals.jsonl")
    fit = intervals.fitted(known, optimizer)
    assert fit.num_runs > 20 and fit.spread < 0.01, "seeds differ by as much"
    assert abs(loss.SELDOM[optimizer] / fit.seldom - 1) < 0.1
    assert abs(loss.LATE[optimizer] / fit.late - 1) < 0.1


def of_overlap() -> dict[overlap.Try, float]:
    return {asked_by(overlap.Try, row): row["loss"] for row in read_rows(RESULTS / "overlap.jsonl")}


def test_the_outer_step_of_more_than_two_nodes_is_the_better_one_at_each_interval() -> None:
    known = of_overlap()

    def lower_by_nesterov(tried: overlap.Try) -> list[float]:
        return [
            100 * (1 - known[replace(each, outer=overlap.NESTEROV)] / plain)
            for each, plain in known.items()
            if replace(each, seed=0) == replace(tried, outer=overlap.PLAIN)
        ]

    at_twelve = []
    for each in overlap.OFTEN:
        lower, interval = lower_by_nesterov(each), each.fragments * each.steps
        # Between the two numbers, at 8, they are level.
        assert (mean(lower) > 0.5) == (interval > often_steps(each.num_nodes)), (each, lower)
        at_twelve += lower if interval == OFTEN_STEPS else []
    assert len(at_twelve) == 8
    assert f"{min(at_twelve):.1f} to {max(at_twelve):.1f} % lower" in reasons.OFTEN_BY_MORE


def test_four_nodes_by_adamw_ended_lower_where_late_results_of_frequent_exchanges_were_blended() -> (
    None
):
    known = of_overlap()
    blended = [each for each in known if each.num_nodes == 4 and each.overlap == "blend"]
    assert len(blended) == 2 and {each.optimizer for each in blended} == {"adamw"}
    for each in blended:
        kept = [
            loss
            for other, loss in known.items()
            if replace(other, overlap="blend", blend=each.blend, outer=each.outer) == each
            and other.overlap == "keep"
        ]
        assert len(kept) == 2 and known[each] < min(kept)


def test_more_than_two_nodes_ended_lower_by_what_is_said_where_they_held_on_to_nothing() -> None:
    known = of_overlap()
    lower_by = [
        100 * (1 - loss / known[held_on])
        for each, loss in known.items()
        if each.num_nodes > FEW_NODES
        and each.blend == 0
        and 2 * each.late_steps < each.steps * each.fragments
        if (held_on := replace(each, blend=0.5)) in known
    ]
    assert len(lower_by) >= 7 and all(value > 0 for value in lower_by)
    assert f"{min(lower_by):.1f} to {max(lower_by):.1f} % lower" in reasons.WHOLLY_TAKEN
