"""Every command that README, docs and --help show is typed against one real swarm, and ends as it should."""

import ast
import contextlib
import json
import re
import shlex
import shutil
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from lab.processes.family import SOURCES
from protocol.errors import ExitCode
from tests.integration.typed_commands import Running, Typed, rests, typed_here, until
from tests.otlp_receiver import Receiver
from tests.ports import free_port
from tests.shown_lines import shown
from tests.tiny_runs import tiny_text
from tests.unit.tokens_scene import write_jsonl, write_llama

LM_EVAL = "lm-eval is not installed where tests run: test_evaluate"
STORAGE = "it needs an object storage: test_remote_backup"
FUNCTIONS = "a node of a run of functions: test_any_model_swarm"
NOT_TYPED_HERE = {
    "atoll": "the bare name, for what one types",
    "atoll demo": "a swarm of its own, which takes minutes: test_demo",
    "atoll demo --nodes 4": "likewise",
    "atoll coordinator backup my-run s3://backups/my-run --every 10m --keep 24": STORAGE,
    "atoll coordinator backup my-run s3://backups/my-run-monday": STORAGE,
    "atoll coordinator restore s3://backups/my-run my-run": STORAGE,
    "atoll coordinator restore s3://backups/my-run-monday my-run": STORAGE,
    "atoll coordinator start my-run --backup s3://backups/my-run": STORAGE,
    "atoll evaluate --dir my-node --tasks arc_easy": LM_EVAL,
    "atoll evaluate --tasks arc_easy,hellaswag": LM_EVAL,
    "atoll evaluate --tasks mine -- --include_path ./tasks --limit 100": LM_EVAL,
    "atoll evaluate --tasks mine --round 120 -- --include_path ./tasks --limit 100": LM_EVAL,
    "atoll join --proxy http://proxy.example:3128": "it needs a proxy: test_only_443",
    "atoll node follow island.token": "it needs a second host: test_hosts_apart",
    "atoll node follow island.token --device cuda": "likewise",
    "atoll node start --allow-function digits@668be79b9b50e4da --code ./code": FUNCTIONS,
    "atoll node start --base ./SmolLM2-135M": "a node of a run of adapters: test_swarm_on_gpu",
    "atoll node start --data ./our-tokens": "a holder of private data: test_private_data",
    "atoll node start --device cuda": "it needs a GPU: test_swarm_on_gpu",
    "atoll node start --hosts 2 --shard 16 --island-listen 10.0.0.1:7720": (
        "it needs 16 devices of two hosts: test_hosts_apart"
    ),
    "atoll node start --loop": "a node of a program of one's own: test_own_loops",
    "atoll node start --loop --weights my-run/first.safetensors": "likewise",
    "atoll node start --pp 2 --schedule interleaved-1f1b": "a mesh: tests/islands",
    "atoll node start --shard 4": "likewise",
    "atoll node start --tp 2 --shard 2": "likewise",
    "atoll node start --weights ./SmolLM2-135M": "a run of given weights: test_transformers_folder",
    'atoll sample --chat "What is a swarm?"': "it needs a chat template: test_text_out",
    "atoll track --to trackio --out trackio": "trackio is no dependency: test_track_tools",
    "atoll track --to wandb --once": "wandb is no dependency: test_track_tools",
}
"""Lines of the docs that are not typed here, each with the reason, and the tests of what it does."""

RUN = tiny_text(
    run={"name": "shown", "rounds": 2000, "min_nodes": 2},
    inner={"steps": 3},
    outer={"audit": 0.05},
    evaluation={"every_rounds": 20, "prompts": ["The sea "]},
)
OWNER, NODE, OTHER, HELPER = "my-run", "my-node", "basement", "my-helper"
"""Folders in which people type."""

FUNCTIONS_OF_A_RUN = """
import torch
from torch.utils.data import TensorDataset

def model():
    return torch.nn.Linear(4, 1), lambda model, batch: (model(batch[0]) - batch[1]).square().mean()

def data():
    rows = torch.arange(1600.0).reshape(400, 4).sin()
    targets = rows.sum(dim=1, keepdim=True)
    return TensorDataset(rows[:300], targets[:300]), TensorDataset(rows[300:], targets[300:])
"""

FILLED_IN = {
    "120": "2",
    "41": "2",
    "ROUND": "2",
    "N": "2",
    "NAME": "node-7",
    "HOST": "127.0.0.1",
    "DIR": "made-of-defaults",
    "NEW": "another-run",
    "FILE": "tiny.toml",
    "/mnt/backups": "backups",
    "/media/stick/ca.key": "stick/ca.key",
    "TARGET": "backups/kept",
    "train.example.org": "127.0.0.1",
    "train2.example.org": "127.0.0.3",
    "relay.example.org": "127.0.0.2",
}
"""What a person writes in place of what stands in the docs."""


class Reader:
    """Who types what the docs show, in a folder with all that the lines name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shown = shown()
        self.typed: set[str] = set()
        self._serving: list[Running] = []

    def _words(self, line: str, filled_in: Mapping[str, str]) -> list[str]:
        assert line in self.shown, f"no page shows {line!r}"
        self.typed.add(line)
        said = re.split(r" [|>]", line)[0]
        words = shlex.split(said)[1:]
        names = FILLED_IN | dict(filled_in)
        either = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
        pattern = re.compile(rf"(?<![\w./-])({either})(?![\w.])")
        words = [pattern.sub(lambda found: names[found[1]], word) for word in words]
        if '"' not in said:  # the shell's part
            words = [
                str(each)
                for word in words
                for each in (sorted(self.folder.glob(word)) if "*" in word else [word])
            ]
        return words

    def _environment(self, at: str) -> dict[str, str]:
        home = str(self.folder)
        return {"HOME": home, "XDG_CONFIG_HOME": f"{home}/settings"} | (
            {"ATOLL_DIR": str(self.folder / at)} if at else {}
        )

    def types(
        self,
        line: str,
        *more: str,
        at: str = "",
        code: int = 0,
        filled_in: Mapping[str, str] | None = None,
        **environment: str,
    ) -> Typed:
        words = self._words(line, filled_in or {})
        came = typed_here(*words, *more, **self._environment(at) | environment)
        assert came.code == code, (words, came)
        return came

    def serves(
        self, line: str, *more: str, at: str = "", filled_in: Mapping[str, str] | None = None
    ) -> Running:
        """Starts what stays."""
        environment = [f"{name}={value}" for name, value in self._environment(at).items()]
        running = Running(*self._words(line, filled_in or {}), *more, through=("env", *environment))
        self._serving.append(running)
        return running

    def end(self) -> None:
        for running in self._serving:
            running.clean_up()


@pytest.fixture
def reader(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Reader]:
    folder = tmp_path_factory.mktemp("s")  # short: the name of a socket
    monkeypatch.chdir(folder)
    reader = Reader(folder)
    yield reader
    reader.end()


def _lay_out(folder: Path) -> None:
    """What a reader has before the first line: text, a model, code, a run file."""
    import pyarrow
    import pyarrow.parquet

    corpus = folder / "corpus"
    corpus.mkdir()
    texts = write_jsonl(corpus / "one.jsonl", 400, count=400)
    (corpus / "one.txt").write_text("\n".join(texts))
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), corpus / "one.parquet")
    shutil.copy(corpus / "one.jsonl", folder / "records.jsonl")
    (folder / "new").mkdir()
    write_jsonl(folder / "new" / "two.jsonl", 400, count=200)
    model = folder / "SmolLM2-135M"
    write_llama(model)
    shutil.copy(model / "tokenizer.json", folder)
    code = folder / "code"
    code.mkdir()
    for name in ("vision.py", "net.py", "gan.py"):
        (code / name).write_text(FUNCTIONS_OF_A_RUN)
    (folder / "tiny.toml").write_text(RUN)


def _prepare_data(reader: Reader) -> None:
    types = reader.types
    types('atoll data prepare "corpus/*.parquet" --tokenizer ./SmolLM2-135M --out ./tokens')
    for place, line in enumerate(
        (
            "atoll data prepare corpus/*.txt --out ./tokens",
            "atoll data prepare corpus/*.jsonl --tokenizer tokenizer.json --out tokens",
            "atoll data prepare corpus/*.parquet --tokenizer ./tokenizer.json --out ./tokens",
            "atoll data prepare records.jsonl --tokenizer ./tokenizer.json --out ./our-tokens",
        )
    ):
        out = f"out-{place}"
        types(line, filled_in={"./tokens": out, "tokens": out, "./our-tokens": out})
    types('atoll data prepare "new/*.jsonl" --add-to ./tokens --out ./more-tokens')
    types("atoll data show ./tokens")
    types("atoll data show ./tokens --document 17")
    types("atoll data check ./tokens")


def _make_runs(reader: Reader) -> None:
    lines = (
        "atoll init my-run",
        "atoll init my-run --advertise train.example.org",
        "atoll init my-run --from ./SmolLM2-135M --data ./tokens",
        "atoll init my-run --from ./SmolLM2-135M --data ./tokens --lora 16",
        "atoll init my-run --from ./SmolLM2-135M --private",
        "atoll init my-run --function net:model --from ./code --loop",
        "atoll init my-run --function gan:model --loop --from ./code",
        "atoll init my-run --function vision:model --data-function vision:data --from ./code",
        "atoll init digits --function vision:model --data-function vision:data --from ./code",
        "atoll init my-run --model 125m --data ./tokens --link 100mbit --nodes 4 --step 1.2s",
        "atoll init my-run --model 125m --data ./tokens --link 100mbit/20mbit --rtt 80ms"
        " --nodes 4 --step 1.2s",
        "atoll init my-run --model 125m --link 100mbit",
        "atoll init my-run --model 3m --data ./tokens --advertise train.example.org",
        "atoll init other --model 125m --private --tokenizer ./tokenizer.json",
        "atoll init what-if --link 20mbit --steps 24",
        "atoll init DIR",
        "atoll init DIR --run FILE",
    )
    for place, line in enumerate(lines):
        reader.types(line, filled_in=dict.fromkeys(("my-run", "DIR"), f"made-{place}"))
    of_functions = {"./fork/run.toml": "digits/run.toml"}
    reader.types("atoll init NEW --run ./fork/run.toml --from ./code", filled_in=of_functions)
    made = Path(f"made-{lines.index('atoll init my-run --from ./SmolLM2-135M --private')}")
    (made / "description.json").unlink()  # as where a machine without torch has made the run
    described = {"my-run": str(made)}
    reader.types("atoll node describe my-run --from ./SmolLM2-135M", filled_in=described)


def _start_the_coordinator(reader: Reader) -> Running:
    """The run is a smaller one than the template's, and the ports are free ones."""
    ports = ("--port", str(free_port()), "--enrolment-port", str(free_port()))
    reader.types("atoll init my-run", "--host", "127.0.0.1", *ports)
    (reader.folder / OWNER / "run.toml").write_text(RUN)
    coordinator = reader.serves("atoll coordinator start my-run")
    coordinator.says("coordinator ready")
    return coordinator


def _invite(reader: Reader) -> dict[str, str]:
    """Types all lines about invites; returns those that nodes join by."""

    def made(line: str) -> str:
        at = "" if "--dir" in line else OWNER
        return reader.types(line, at=at, filled_in={"HOST": "127.0.0.1"}).out.split()[-1]

    for line in (
        "atoll invite create",
        "atoll invite create --host HOST",
        "atoll invite create --own",
        "atoll invite create --own --uses 8",
        "atoll invite create --uses 3 --expires 7d --dir my-run",
        "atoll invite create --uses 20 --max-nodes 4",
    ):
        made(line)
    invites = {
        "mine": made("atoll invite create --own --uses 2 --dir my-run"),
        "others": made("atoll invite create --uses 3 --expires 7d"),
        "lab-b": made('atoll invite create --label "lab B" --needs-approval'),
        "lab-b-too": made('atoll invite create --label "lab B" --needs-approval'),
        "helper": made("atoll invite create --role helper --dir my-run"),
    }
    reader.types("atoll invite list", at=OWNER)
    return invites


def _join(reader: Reader, invites: Mapping[str, str]) -> None:
    def joins(line: str, invite: str, name: str, *, at: str = "") -> None:
        named = () if "--name" in line else ("--name", name)
        filled_in = {"basement-4090": name}
        reader.types(line, *named, at=at, filled_in=filled_in, ATOLL_INVITE=invites[invite])

    joins("atoll join --dir my-node", "mine", "node-7")
    joins("atoll join", "mine", "basement-4090", at=OTHER)
    joins("atoll join", "helper", "a-helper", at=HELPER)
    for name in ("lab-b", "lab-b-too"):
        joins("atoll join", name, name, at=name)
    joins(
        "atoll join --max-upload 10mbit --hours 22:00-07:00 --only-idle --no-battery --load 0.5",
        *("others", "leaves"),
        at="leaves",
    )
    joins(
        "atoll join --name basement-4090 --max-upload 10mbit --hours 22:00-07:00",
        *("others", "goes"),
        at="goes",
    )
    for home in (NODE, OTHER, HELPER):
        settings = rests(reader.folder / home) / "node.toml"
        kept = re.sub(r"(?m)^keep_(snapshots|every) = .*\n", "", settings.read_text())
        settings.write_text(f"keep_snapshots = 100\nkeep_every = 1\n{kept}")


def _committed(reader: Reader, round: int) -> None:
    def is_so() -> bool:
        told = typed_here("rounds", "--json", "--dir", reader.folder / OWNER)
        return any(one["round"] >= round for one in json.loads(told.out))

    until(is_so, f"round {round}")


def _ask(reader: Reader) -> None:
    """Lines that only look, typed while two nodes train."""
    for line in (
        "atoll --version",
        "atoll audit",
        "atoll audit --json",
        "atoll completion --help",
        "atoll completion bash >> ~/.bashrc",
        "atoll completion fish > ~/.config/fish/completions/atoll.fish",
        "atoll completion zsh >> ~/.zshrc",
        "atoll data",
        "atoll demo --help",
        "atoll nodes",
        "atoll nodes --json",
        "atoll nodes show NAME",
        "atoll nodes show basement-4090",
        "atoll nodes show node-7",
        "atoll rounds",
        "atoll rounds --csv",
        "atoll rounds --csv --dir my-run",
        "atoll rounds --csv > my-run.csv",
        "atoll rounds --limit 4000",
        "atoll rounds --limit 5",
        "atoll rounds show 41",
        "atoll rounds show N",
        "atoll rounds | head -1",
        "atoll run amend --help",
        "atoll status",
        "atoll logs --since 10m --level warning",
    ):
        reader.types(line, at="" if "--dir" in line else OWNER)
    for line in (
        "atoll me",
        "atoll me --dir basement",
        "atoll node doctor",
        "atoll node doctor --json",
        "atoll node snapshots",
        "atoll evaluate --held-out",
        "atoll evaluate --held-out --samples 512",
        "atoll export ./before --round 120",
        "atoll export ./model",
        "atoll export ./model --round 120",
        "atoll export ./model --dir my-node",
        "atoll export ./out",
        'atoll sample --dir my-node --prompt "The sea "',
        'atoll sample --prompt "The sea"',
        'atoll sample --prompt "class " --tokens 500',
        "atoll node fork 120 --to ./fork",
    ):
        place = {"./model": f"./model-{len(reader.typed)}"}
        reader.types(line, at="" if "--dir" in line else NODE, filled_in=place)
    reader.types("atoll evaluate", at=NODE, code=ExitCode.USAGE)
    reader.types("atoll node fork ROUND --to ./fork", at=NODE, filled_in={"./fork": "./fork-too"})
    reader.types("atoll init my-second-run --run ./fork/run.toml")
    reader.types("atoll init NEW --run ./fork/run.toml", filled_in={"NEW": "my-third-run"})
    reader.types("atoll status --dir nowhere", code=ExitCode.NO_INPUT)
    reader.types("atoll stauts", code=ExitCode.USAGE)


def _follow(reader: Reader) -> None:
    """Lines that stay and show what happens."""
    receiver = Receiver()
    with contextlib.closing(receiver):
        followers = [
            reader.serves(line, at=at, filled_in={"http://localhost:4318": receiver.endpoint})
            for line, at in (
                ("atoll logs -f", NODE),
                ("atoll logs -f my-run", ""),
                ("atoll rounds --watch --json", OWNER),
                ("atoll status --watch", OWNER),
                ("atoll status --watch --dir my-node", ""),
                ("atoll track --to opentelemetry --endpoint http://localhost:4318", OWNER),
                ("atoll track --to tensorboard --out curves", OWNER),
                ("atoll track --to tensorboard --out curves/my-run", OWNER),
            )
        ]
        for follower in followers:
            follower.says("\n")
        for follower in followers:
            follower.stop(signal.SIGINT)


def _decide(reader: Reader) -> None:
    """What a run owner decides of members and rules."""

    listed = reader.types("atoll invite list", at=OWNER).out
    others = next(line for line in listed.splitlines() if " leaves (" in line)[:8]
    unused = [
        line[:8] for line in listed.splitlines() if "  node   " in line and " 0 of 1 " in line
    ]
    types = reader.types
    types("atoll invite limit ID --max-nodes N", at=OWNER, filled_in={"ID": unused[0]})
    types("atoll invite limit 1f0c9a2b --max-nodes 4", at=OWNER, filled_in={"1f0c9a2b": unused[1]})
    types("atoll invite own ID", at=OWNER, filled_in={"ID": unused[0]})
    types("atoll invite own 1f0c9a2b", at=OWNER, filled_in={"1f0c9a2b": unused[1]})
    types("atoll invite revoke ID", at=OWNER, filled_in={"ID": unused[0]})
    types("atoll invite revoke 1f0c9a2b", at=OWNER, filled_in={"1f0c9a2b": unused[1]})
    types("atoll nodes approve NAME", at=OWNER, filled_in={"NAME": "lab-b"})
    types("atoll nodes approve basement-4090", at=OWNER, filled_in={"basement-4090": "lab-b-too"})
    types("atoll nodes expel NAME", at=OWNER, filled_in={"NAME": "lab-b"})
    types(
        'atoll nodes expel node-7 --reason "sends what it did not train"',
        at=OWNER,
        filled_in={"node-7": "leaves"},
    )
    types("atoll nodes expel --invite 1f0c9a2b", at=OWNER, filled_in={"1f0c9a2b": others})
    types("atoll nodes quarantine NAME", at=OWNER)
    types("atoll nodes readmit node-7", at=OWNER)
    types("atoll nodes quarantine node-7", at=OWNER)
    types("atoll nodes readmit node-7", at=OWNER)
    types('atoll nodes quarantine node-7 --reason "its loss is odd"', at=OWNER)
    types("atoll nodes readmit node-7", at=OWNER)
    types("atoll run advise", at=OWNER, code=75)  # so few bytes say nothing of a link
    types('atoll run pause --reason "the cluster moves"', at=OWNER)
    types("atoll run resume", at=OWNER)
    types("atoll run amend evaluation.go_back=false", at=OWNER)
    types("atoll run amend outer.audit=0.2", at=OWNER)
    types("atoll run amend outer.learning_rate=0.5 deadlines.train=300", at=OWNER)
    types("atoll run amend outer.merge=agreeing", at=OWNER)
    types("atoll run amend run.min_nodes=1", at=OWNER)
    types("atoll run amend run.rounds=900 inner.final_fraction=0.3", at=OWNER)
    types("atoll data skip 36000-36800", at=OWNER)
    types("atoll data skip --round 120", at=OWNER)
    types("atoll run rollback ROUND", at=OWNER, filled_in={"ROUND": "3"})
    types('atoll run rollback 120 --reason "the loss has jumped"', at=OWNER)
    types("atoll run rollback 120 --believe basement-4090", at=OWNER, filled_in={"120": "1"})


def _leave_and_return(reader: Reader, node: Running, other: Running, helper: Running) -> None:
    """What contributors do with a node that runs, and how it is started again."""
    types, serves = reader.types, reader.serves
    types("atoll node pause", at=NODE)
    types("atoll node resume", at=NODE)
    types("atoll node drain --within 20s", at=NODE)
    types("atoll node drain", at=OTHER)
    node.ends(set())
    other.ends(set())
    types('atoll run pause --reason "the cluster moves"', at=OWNER)  # so that they end at once
    port = f"127.0.0.1:{free_port()}"
    for here, there in (
        ("atoll node start --max-upload 8mbit", "atoll node start --mesh auto"),
        ("atoll node start --no-wait", "atoll node start --metrics 127.0.0.1:9101"),
    ):
        started = serves(here, at=NODE), serves(there, at=OTHER, filled_in={"127.0.0.1:9101": port})
        for one in started:
            one.says("attached")
        for one in started:
            one.stop(signal.SIGINT)
    helper.stop(signal.SIGINT)
    for line in (
        "atoll helper start",
        "atoll helper start --dir my-helper --port 7710",
        "atoll helper start --port 443",
    ):
        port = str(free_port())
        helper = serves(line, at=HELPER, filled_in={"7710": port, "443": port})
        helper.says("attached")
        helper.stop(signal.SIGINT)
    types("atoll run resume", at=OWNER)


def _install_services(reader: Reader) -> None:
    for line, at in (
        ("atoll coordinator install-service my-run", ""),
        ("atoll coordinator install-service my-run --print", ""),
        ("atoll helper install-service", HELPER),
        ("atoll helper install-service --print", HELPER),
        ("atoll node install-service", NODE),
        ("atoll node install-service --print", NODE),
    ):
        reader.types(line, at=at)


def _end_the_run(reader: Reader) -> None:
    reader.types("atoll run stop", at=OWNER)
    reader.types("atoll run extend 50", at=OWNER)
    reader.types('atoll run stop --reason "the loss is where it should be"', at=OWNER)


def _look_after(reader: Reader, coordinator: Running) -> None:
    """Copies of a coordinator, its keys, and the other ways to start it."""
    types, serves = reader.types, reader.serves

    def starts(
        line: str, *, at: str = "", says: str = "coordinator ready", **filled_in: str
    ) -> None:
        running = serves(line, at=at, filled_in=filled_in)
        running.says(says)
        running.stop(signal.SIGINT)

    types("atoll coordinator backup my-run /mnt/backups/my-run")
    types("atoll coordinator backup my-run /mnt/backups/my-run-monday")
    copies = serves("atoll coordinator backup my-run TARGET --every 10m")
    copies.says("copied run")
    copies.stop(signal.SIGINT)
    types(
        "atoll coordinator restore /mnt/backups my-run",
        filled_in={"my-run": "restored", "/mnt/backups": "backups/kept"},
    )
    types("atoll run move train2.example.org", at=OWNER)
    types("atoll run move relay.example.org", at=OWNER)
    coordinator.stop(signal.SIGINT)
    starts("atoll coordinator start", at=OWNER)
    starts("atoll coordinator start my-run --no-dashboard")
    starts(
        "atoll coordinator start my-run --dashboard 0.0.0.0:8080",
        **{"0.0.0.0:8080": f"127.0.0.1:{free_port()}"},
    )
    starts("atoll coordinator start my-run --one-port 443", **{"443": str(free_port())})
    starts("atoll coordinator start /mnt/backups/my-run-monday")
    starts("atoll coordinator forward my-run", says="forward")
    types("atoll coordinator protect my-run", ATOLL_PASSPHRASE="five words of a reader")
    types("atoll coordinator rotate my-run", ATOLL_PASSPHRASE="five words of a reader")
    (reader.folder / "stick").mkdir()
    shutil.move(reader.folder / OWNER / "ca.key", reader.folder / "stick")
    types(
        "atoll coordinator rotate my-run --authority --authority-key /media/stick/ca.key",
        ATOLL_PASSPHRASE="five words of a reader",
    )


def _relay(reader: Reader) -> None:
    address = "127.0.0.2"  # another machine's, which listens at the coordinator's ports
    for line in (
        "atoll relay start my-relay --advertise relay.example.org --max-rate 20mbit",
        "atoll relay start my-relay --advertise relay.example.org --helper my-helper",
        "atoll relay start my-relay",
        "atoll relay start my-relay --advertise relay.example.org",
    ):
        port = str(free_port(address))
        relay = reader.serves(line, "--host", address, "--port", port, "--ports", "1024-65535")
        relay.says("relay ready")
        if line.endswith("--advertise relay.example.org"):
            carried = {"LINE": "my-relay/relay.line"}
            coordinator = reader.serves(
                "atoll coordinator start my-run --through LINE", filled_in=carried
            )
            coordinator.says("coordinator ready")
            coordinator.stop(signal.SIGINT)
        relay.stop(signal.SIGINT)
    reader.types("atoll relay install-service my-relay -- --advertise relay.example.org")
    reader.types("atoll relay install-service my-relay --print -- --advertise relay.example.org")


def test_every_line_that_the_docs_show_is_typed_or_listed_with_its_reason() -> None:
    strings = (
        node.value
        for node in ast.walk(ast.parse(Path(__file__).read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    assert {text for text in strings if re.match(r"atoll( |$)", text)} == shown()
    named = re.findall(r"test_\w+", " ".join(NOT_TYPED_HERE.values()))
    assert named and all(list(SOURCES.glob(f"tests/*/{name}.py")) for name in named)


@pytest.mark.nightly
def test_every_command_that_the_docs_show_ends_as_it_should(reader: Reader) -> None:
    _lay_out(reader.folder)
    _prepare_data(reader)
    _make_runs(reader)
    coordinator = _start_the_coordinator(reader)
    _join(reader, _invite(reader))
    node = reader.serves("atoll node start --dir my-node")
    other = reader.serves("atoll node start", at=OTHER)
    port = {"7710": str(free_port())}
    helper = reader.serves("atoll helper start --port 7710", at=HELPER, filled_in=port)
    _committed(reader, 4)
    helper.says("attached")
    _follow(reader)
    _ask(reader)
    _decide(reader)
    _leave_and_return(reader, node, other, helper)
    _install_services(reader)
    _end_the_run(reader)
    _look_after(reader, coordinator)
    _relay(reader)
    assert reader.shown - reader.typed == set(NOT_TYPED_HERE), "type a new line, or say why not"
