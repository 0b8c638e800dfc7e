"""What a contributor is told to expect of a day, from what the members show."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from node.app import _refuse_or_tell
from node.config import NodeSettings
from node.first_look import expected_a_day, next_lines, share_of_day, start_options, what_is_over
from node.island.data.manifest import read_manifest
from node.island.data.opening import look_at_data, look_at_run_data, open_dataset
from node.island.data.places import DataPlaces
from node.island.loops.door import LeasedSamples
from node.island.models.code import DIGITS, code_digest, sources_of
from node.island.models.describing import describe
from node.machine.hardware import Hardware
from node.machine.limits import Limits, hours_of
from node.machine.placement import what_a_start_checks
from node.models.reading import digest_of_first, write_first
from node.models.text import text_of_run
from protocol.errors import AtollError, BadDataError, ConfigError, NoInputError, NotPermittedError
from protocol.run.models import (
    FIRST_WEIGHTS,
    Description,
    FunctionModel,
    TransformersModel,
    layout_of,
)
from protocol.run.run_spec import DataSection, InnerSection, LoraSection, RunSpec
from protocol.v1.session_pb2 import HeartbeatRequest, Utilisation, WireCount
from protocol.v1.status_pb2 import (
    NODE_STATE_LEFT,
    NODE_STATE_READY,
    RUN_PHASE_FINISHED,
    RUN_PHASE_TRAINING,
    GetStatusResponse,
    NodeStatus,
    RunStatus,
    WireLedger,
)
from tests.tiny_runs import tiny
from tests.unit.peer_tokens_scene import from_peers
from tests.unit.tokens_scene import prepared, small_shards, spec_of

DAY = 86_400


def member(device: str, pace: float, *, num_ranks: int = 1, share: float = 1.0) -> NodeStatus:
    beat = HeartbeatRequest(tokens_per_second=pace, utilisation=Utilisation(compute_share=share))
    return NodeStatus(
        node_id=f"{device}{pace}",
        state=NODE_STATE_READY,
        device=device,
        num_ranks=num_ranks,
        heartbeat=beat,
    )


def status(*nodes: NodeStatus, seconds: float = 100.0) -> GetStatusResponse:
    counts = [
        WireCount(kind="contribution", sent_bytes=300),
        WireCount(kind="result", sent_bytes=100),
    ]
    return GetStatusResponse(
        run=RunStatus(committed_round=2, elapsed_seconds=seconds, wire=WireLedger(counts=counts)),
        nodes=nodes,
    )


def test_a_day_is_what_members_of_the_same_kind_train_in_one_by_each_rank() -> None:
    told = status(
        member("cpu", 100), member("cpu", 600, num_ranks=2), member("cuda:0", 9000, share=0.5)
    )
    assert expected_a_day(told, kind="cpu", limits=Limits()).tokens == pytest.approx(200 * DAY)
    assert expected_a_day(told, kind="cuda", limits=Limits()).tokens == pytest.approx(4500 * DAY)
    assert expected_a_day(told, kind="xpu", limits=Limits()).tokens is None


def test_hours_shorten_what_is_trained_and_not_what_is_moved() -> None:
    told = status(member("cpu", 100), member("cpu", 100))
    night = Limits(hours=hours_of("22-4"))
    assert share_of_day(night) == 0.25 and share_of_day(Limits()) == 1.0
    expected = expected_a_day(told, kind="cpu", limits=night)
    assert expected.tokens == pytest.approx(25 * DAY)
    assert expected.moved_bytes == pytest.approx(400 / 100 / 2 * DAY)


def test_who_has_left_and_helpers_are_no_measure() -> None:
    gone = member("cpu", 100)
    gone.state = NODE_STATE_LEFT
    helper = member("cpu", 100)
    helper.is_helper = True
    expected = expected_a_day(status(gone, helper), kind="cpu", limits=Limits())
    assert (expected.tokens, expected.moved_bytes) == (None, None)


def test_before_the_first_round_nothing_is_known() -> None:
    expected = expected_a_day(GetStatusResponse(), kind="cpu", limits=Limits())
    assert (expected.tokens, expected.moved_bytes) == (None, None)


def test_who_joins_a_finished_run_is_told_what_starting_comes_to() -> None:
    run = RunStatus(phase=RUN_PHASE_TRAINING)
    assert list(what_is_over(GetStatusResponse(run=run))) == []
    run = RunStatus(phase=RUN_PHASE_FINISHED, committed_round=3)
    (alone,) = what_is_over(GetStatusResponse(run=run))
    assert "the run is finished: no member is here that holds" in alone and "'atoll export" in alone
    assert "'atoll run extend'" in alone
    node = NodeStatus(state=NODE_STATE_READY)
    node.heartbeat.outer_round = 2
    (behind,) = what_is_over(GetStatusResponse(run=run, nodes=[node]))
    assert behind == alone
    node.heartbeat.outer_round = 3
    (told,) = what_is_over(GetStatusResponse(run=run, nodes=[node]))
    assert "takes its final state from one that is here" in told and "'atoll run extend'" in told


def found(settings: NodeSettings, spec: RunSpec, folder: Path = Path()) -> list[str]:
    """What keeps a machine with room enough from starting, as its owner is told."""
    told = []
    hardware = Hardware(memory_bytes=1 << 36, gpus=())
    for check in what_a_start_checks(folder, settings, spec, hardware):
        try:
            check()
        except AtollError as error:
            told.append(str(error))
    return told


def test_who_joins_is_told_of_data_that_a_start_would_refuse(tmp_path: Path) -> None:
    places = DataPlaces(folder=tmp_path)
    text = RunSpec(data=DataSection(source="text", paths=("*.txt",)))
    with pytest.raises(NoInputError, match="matches no file"):
        look_at_data(text, places)
    (tmp_path / "a.txt").write_bytes(b"few ")
    with pytest.raises(NoInputError, match="but one batch takes") as looked:
        look_at_data(text, places)
    with pytest.raises(NoInputError) as started:
        open_dataset(text, places)
    assert str(looked.value) == str(started.value)
    (tmp_path / "a.txt").write_bytes(b"much " * 100_000)
    look_at_data(text, places)
    elsewhere = RunSpec(data=DataSection(source="text", paths=("../*.txt",)))
    with pytest.raises(NotPermittedError, match="lies outside of"):
        look_at_data(elsewhere, places)
    private = RunSpec(data=DataSection(source="text", private=True))
    look_at_data(private, places)  # the holder is still to name them
    (tmp_path / "b.txt").write_bytes(b"few ")
    with pytest.raises(NoInputError, match="but one batch takes"):
        look_at_data(private, replace(places, own="b.txt"))
    look_at_data(RunSpec(), places)


def test_tokens_that_a_start_would_refuse_are_told_before_ranks_have_started(
    tmp_path: Path,
) -> None:
    for name in ("made", "made otherwise"):
        (tmp_path / name).mkdir()
    folder = small_shards(tmp_path / "made", piece_bytes=1 << 12)
    spec = from_peers(spec_of(folder))
    shard = folder / read_manifest(folder).training[0].tokens

    def told(own: Path | str) -> list[str]:
        return found(NodeSettings(name="n", data=str(own)), spec, tmp_path)

    assert told("") == told(folder) == []
    (only,) = told(tmp_path / "nowhere")
    assert "nowhere holds no tokens: it is no folder" in only
    (tmp_path / "not mounted").mkdir()
    (only,) = told(tmp_path / "not mounted")
    assert "not mounted holds no tokens: it is empty" in only
    (tmp_path / "a part").mkdir()
    (tmp_path / "a part" / shard.name).write_bytes(shard.read_bytes())
    assert told(tmp_path / "a part") == [], "peers give the manifest, and the rest"
    with shard.open("r+b") as file:
        file.truncate(100)
    (only,) = told(folder)
    assert f"{shard} has 100 bytes, and" in only and "copy that file again" in only
    other = small_shards(tmp_path / "made otherwise", piece_bytes=1 << 13)
    (only,) = told(other)
    assert "holds other tokens than the run's" in only


def test_first_weights_that_a_start_would_refuse_are_told_before_kernels_are_compiled(
    tmp_path: Path,
) -> None:
    weights = np.zeros(tiny().num_parameters, np.float32)
    description = Description(first_digest=digest_of_first(weights).hex())
    spec = tiny().model_copy(update={"description": description})
    file = tmp_path / FIRST_WEIGHTS

    def told(spec: RunSpec = spec, *, loop: bool = False) -> list[str]:
        named = NodeSettings(name="n", weights=str(file), loop=loop)
        return found(named, spec, tmp_path / "node")

    for loop in (False, True):
        (missing,) = told(loop=loop)
        assert f"{file} is not there" in missing and "leave --weights out" in missing
    write_first(file, layout_of(spec), weights)
    assert told() == []
    (drawn,) = told(tiny())
    assert "draws its first weights from its seed" in drawn
    file.write_bytes(file.read_bytes()[:-1])
    (cut,) = told()
    assert "is damaged or cut off" in cut
    file.unlink()
    (tmp_path / "node" / "snapshots").mkdir(parents=True)
    (tmp_path / "node" / "snapshots" / "round-00000001.safetensors").touch()
    assert told() == [], "it goes on from there, and the file may be gone"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"inner": {"batch": 400}}, "but one batch takes 400"),
        ({"model": {"vocab_size": 200}}, "vocab_size is 200"),
        ({"model": {"context": 20_000}}, "held out: 0 and 0 samples|and 0 samples of 20001"),
    ],
)
def test_a_run_file_changed_by_hand_is_held_against_the_data_that_are_here(
    tmp_path: Path, change: dict[str, dict[str, int]], words: str
) -> None:
    for number in range(8):
        (tmp_path / f"{number}.txt").write_bytes(b"much %d " % number * 400)
    tokens = tmp_path / "tokens"
    prepared(tmp_path / "*.txt", out=tokens)
    digest = read_manifest(tokens).digest().hex()
    text = DataSection(source="text", paths=("*.txt",))
    for data in (text, DataSection(source="tokens", paths=("tokens",), digest=digest)):
        fine = RunSpec(data=data)
        look_at_run_data(fine, tmp_path)
        if "model" not in change:
            look_at_run_data(changed(fine, change), tmp_path / "elsewhere")  # where none of it is
        with pytest.raises(AtollError) as looked:
            look_at_run_data(changed(fine, change), tmp_path)
        with pytest.raises(AtollError) as started:
            open_dataset(changed(fine, change), DataPlaces(folder=tmp_path))
        assert str(looked.value) == str(started.value), "what each node would have said"
        assert data is not text or re.search(words, str(looked.value))


def changed(spec: RunSpec, change: Mapping[str, Mapping[str, int]]) -> RunSpec:
    return RunSpec.model_validate(
        {t: {**each, **change.get(t, {})} for t, each in spec.model_dump(exclude_none=True).items()}
    )


def test_other_tokens_than_the_run_file_names_are_told_before_anybody_joins(tmp_path: Path) -> None:
    for number in range(8):
        (tmp_path / f"{number}.txt").write_bytes(b"much %d " % number * 400)
    prepared(tmp_path / "*.txt", out=tmp_path / "tokens")
    data = DataSection(source="tokens", paths=("tokens",), digest="ab" * 32)
    with pytest.raises(BadDataError, match=r"\[data\] digest says abababababab"):
        look_at_run_data(RunSpec(data=data), tmp_path)
    data = DataSection(source="python-stdlib")
    look_at_run_data(RunSpec(data=data), tmp_path)
    with pytest.raises(NoInputError, match="but one batch takes 1000000"):
        look_at_run_data(RunSpec(data=data, inner=InnerSection(batch=1_000_000)), tmp_path)


def test_who_joins_is_told_of_all_that_starting_will_ask_for() -> None:
    assert found(NodeSettings(name="n"), RunSpec()) == []
    undescribed = RunSpec(
        model=FunctionModel(source="function", function="tests.run_functions:net"),
        data=DataSection(source="function", function="tests.run_functions:samples"),
    )
    own_code = undescribed.model_copy(update={"description": describe(undescribed, None)})
    (told,) = found(NodeSettings(name="n"), own_code)
    assert "trains with code of its own" in told and "--allow-function" in told
    assert found(NodeSettings(name="n", allow_functions=(own_code.run.name,)), own_code) == []
    assert found(NodeSettings(name="n", loop=True), own_code) == []


def test_who_joins_is_given_the_line_that_starts_with_all_that_node_toml_does_not_say(
    tmp_path: Path,
) -> None:
    def options(spec: RunSpec, **settings: object) -> list[str]:
        return start_options(NodeSettings.model_validate({"name": "n"} | settings), spec)

    code = tmp_path / "code"
    code.mkdir()
    (code / "mine.py").write_text("def model(): ...")
    spec = RunSpec(
        model=FunctionModel(source="function", function="mine:model"),
        data=DataSection(source="function", function="mine:data"),
    )
    sources = Description(sources=sources_of(spec, code))
    spec = spec.model_copy(update={"description": sources})
    allowed = f"my-run@{code_digest(spec)[:DIGITS]}"
    assert options(spec) == ["--allow-function", allowed, "--code", "CODE"]
    assert options(spec, code=str(code)) == ["--allow-function", allowed]
    assert options(spec, allow_functions=(allowed,)) == ["--code", "CODE"]
    assert options(spec, allow_functions=("my-run",), code=str(code)) == []
    assert options(spec, loop=True) == []

    adapted = RunSpec(
        model=TransformersModel(source="transformers", context=8),
        data=DataSection(source="tokens", private=True),
        lora=LoraSection(rank=2),
    )
    assert options(adapted) == ["--base", "MODEL", "--data", "PATH"]
    assert options(adapted, base="here", data="there") == []
    assert options(RunSpec()) == []


def test_a_run_without_data_starts_with_a_loop_and_says_so() -> None:
    undescribed = RunSpec(
        model=FunctionModel(source="function", function="tests.run_functions:net_alone"),
        data=DataSection(source="loop"),
    )
    spec = undescribed.model_copy(update={"description": describe(undescribed, None)})
    (told,) = found(NodeSettings(name="n"), spec)
    assert (
        "has no data of its own: its nodes train by loops" in told and "start with --loop" in told
    )
    assert found(NodeSettings(name="n", loop=True), spec) == []
    command = ["atoll", "node", "start"]
    options = start_options(NodeSettings(name="n"), spec)
    assert list(next_lines(command, options)) == ["next: atoll node start --loop"]
    assert start_options(NodeSettings(name="n", loop=True), spec) == []
    look_at_data(spec, DataPlaces(folder=Path()))
    with pytest.raises(ConfigError, match="has no data of its own"):
        open_dataset(spec, DataPlaces(folder=Path()))
    with pytest.raises(NoInputError, match="nothing says which tokens a text is"):
        text_of_run(spec, DataPlaces(folder=Path()))


def test_who_will_start_a_loop_is_not_asked_to_allow_code_that_it_does_not_run() -> None:
    command = ["atoll", "node", "start"]
    with_loop, without = next_lines(command, ["--allow-function", "my-run@12", "--code", "CODE"])
    assert with_loop.startswith("next, with a training loop of your own")
    assert with_loop.endswith(": atoll node start --loop")
    assert without.startswith("next, where the node trains itself")
    assert without.endswith(": atoll node start --allow-function my-run@12 --code CODE")
    assert list(next_lines(command, [])) == ["next: atoll node start"]


def test_private_data_that_nobody_has_named_are_asked_for_by_a_start_before_anything_is_loaded(
    tmp_path: Path,
) -> None:
    spec = RunSpec(data=DataSection(source="text", private=True))
    hardware = Hardware(memory_bytes=1 << 36, gpus=())
    with pytest.raises(ConfigError, match="each node trains data of its own, and none is named"):
        _refuse_or_tell(tmp_path, NodeSettings(name="n"), spec, hardware)
    _refuse_or_tell(tmp_path, NodeSettings(name="n", loop=True), spec, hardware)


@pytest.mark.parametrize("paths", ["*.txt", "../elsewhere/*.txt"])
def test_a_loop_with_data_of_its_own_needs_none_of_the_runs_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, paths: str
) -> None:
    monkeypatch.chdir(tmp_path)
    spec = RunSpec(data=DataSection(source="text", paths=(paths,)))
    hardware = Hardware(memory_bytes=1 << 36, gpus=())
    with pytest.raises((NoInputError, NotPermittedError)):
        _refuse_or_tell(tmp_path, NodeSettings(name="n"), spec, hardware)
    _refuse_or_tell(tmp_path, NodeSettings(name="n", loop=True), spec, hardware)
    leased = LeasedSamples(spec, DataPlaces(folder=tmp_path))
    with capture_logs() as told:
        leased.look()
    (warned,) = told
    assert warned["event"] == "the run's data is not here: loops need data of their own"
