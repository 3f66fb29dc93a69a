"""What the commands print, compared with reviewed output: in terminals, in a pipe, as JSON.

``make golden`` writes the files of ``golden`` anew; read the difference before it is committed. The
job computes with powers of two only, so that every machine prints the same figures.
"""

import fcntl
import json
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import glasshouse as gh
from tests.acceptance.services import ROOT, Endpoint, LocalService, plain_environment

GOLDEN = Path(__file__).parent / "golden"
HEIGHT = 40
DRIVER = """
import json, sys
from glasshouse.cli import main
commands = json.loads(sys.argv[1])
sys.argv[0] = "glasshouse"
for arguments in commands:
    code = main(arguments)
    for stream in (sys.stdout, sys.stderr):
        print(f"[exit {code}]", file=stream, flush=True)
"""
SPEC: dict[str, Any] = {
    "kind": "train",
    "name": "a job whose name is longer than what eighty columns leave to names",
    "seed": 1,
    "network": {
        "type": "graph",
        "layers": [
            {
                "name": "scale",
                "type": "Linear",
                "args": {"out_features": 1, "bias": False},
                "inputs": ["x"],
                "init": {"weight": {"type": "zeros_"}},
            }
        ],
    },
    "loss": {"type": "MSELoss", "inputs": ["scale", "y"]},
    "optimizer": {"type": "SGD", "args": {"lr": 0.25}},
    "data": {
        "fields": {"x": {"type": "dense", "shape": [1]}, "y": {"type": "dense", "shape": [1]}},
        "batch_size": 8,
    },
    "stop": {"epochs": 8},
    "devices": {"type": "cpu", "threads": 1},
    "evaluate": {"every_epochs": 4},
    "checkpoint": {"every_epochs": 8},
    "probes": [
        {
            "layers": ["scale*"],
            "kinds": ["output", "param_grad"],
            "every": 1,
            "want": ["stats", "full"],
            "max_overhead": None,
        }
    ],
}
EXPLODING = {
    "name": "explodes",
    "optimizer": {"type": "SGD", "args": {"lr": 1e30}},
    "guards": {"nonfinite": {"check": ["loss", "gradients"], "action": "fail"}},
}


def driver(commands: list[list[str]]) -> list[str]:
    """A process that runs these commands, one after the other."""
    return [sys.executable, "-c", DRIVER, json.dumps(commands)]


@dataclass(frozen=True)
class Session:
    """The jobs and data of one user, and the commands to run."""

    endpoint: Endpoint
    home: Path
    commands: list[list[str]]

    @property
    def environment(self) -> dict[str, str]:
        """The environment of its commands."""
        service = {"URL": self.endpoint.url, "API_KEY": self.endpoint.key}
        found = plain_environment(**service, HOME=str(self.home))
        for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):  # of the test run
            found.pop(name, None)
        return found | {"TERM": "xterm-256color", "PYTHONPATH": str(ROOT)}

    def driving(self, *more: str) -> list[str]:
        """The command of a process that runs all of them, one after the other."""
        return driver([[*command, *more] for command in self.commands])


@pytest.fixture(scope="module")
def session(local_service: LocalService, tmp_path_factory: pytest.TempPathFactory) -> Session:
    """A key of its own, so that nothing of other tests is listed; two jobs that have ended."""
    folder = tmp_path_factory.mktemp("session")
    endpoint = local_service.another_key("golden", "read", "submit")
    rows = folder / "rows.csv"
    rows.write_text("x,y\n" + "".join(f"{sign},{2 * sign}\n" for sign in (1, -1) * 4))
    with endpoint.client() as client:
        dataset = client.datasets.upload(rows)
        split = {"dataset": dataset.id, "split": next(iter(dataset.splits))}
        spec = SPEC | {"data": SPEC["data"] | {"train": split, "validation": split}}
        good = client.jobs.create(spec).wait(120)
        for aliases in (["production"], ["candidate", "previous"]):
            client.models.publish("line", good.id, aliases=aliases)
        bad = client.jobs.create(spec | EXPLODING)
        with pytest.raises(gh.JobFailed):
            bad.wait(120)
    (folder / "job.json").write_text(json.dumps(spec | {"name": "made here"}))
    return Session(
        endpoint,
        folder,
        [
            ["jobs"],
            ["jobs", "--state", "failed"],
            ["watch", good.id],
            ["watch", bad.id],
            ["metrics", good.id],
            ["metrics", good.id, "loss"],
            ["show", good.id],
            ["compare", good.id, bad.id],
            ["layers", good.id],
            ["layers", good.id, "scale"],
            ["layers", good.id, "scale", "--step", "0"],
            ["probe", good.id, "--list"],
            ["checkpoints", "list"],
            ["models", "list"],
            ["models", "show", "line"],
            ["datasets", "list"],
            ["datasets", "show", dataset.id],
            ["quota"],
            ["set", good.id, "lr=0.5"],
            ["--version"],
            ["watch", "job_none"],
            ["jobs", "--nope"],
        ],
    )


@dataclass
class Normal:
    """Makes what differs from run to run the same, and as wide as it was."""

    known: dict[str, str] = field(default_factory=dict[str, str])

    def __call__(self, text: str) -> str:
        text = re.sub(r"\b(job|ds|ckpt|prb|cmd|mdl)_[0-9a-z]{26}\b", self._id, text)
        text = re.sub(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", "2026-01-01T00:00:00.000Z", text)
        text = re.sub(r" +\d+/s$", "  N/s", text, flags=re.MULTILINE)
        text = re.sub(r"^watching [\d.]+%\n|  watching [\d.]+%", "", text, flags=re.MULTILINE)
        text = re.sub(r"^(?:system|time|throughput)/.*\n", "", text, flags=re.MULTILINE)
        text = re.sub(r"(storage_bytes +)\S+ \S+", r"\1N", text)
        text = re.sub(r"\b\d+ (s|min)(?=  |$)", "N s", text, flags=re.MULTILINE)
        text = re.sub(r"http://127\.0\.0\.1:\d+", "http://127.0.0.1:8420", text)
        text = re.sub(r"(devices +cpu:)\d+ of \S+", r"\g<1>N of host", text)
        steps = re.findall(r"^(?:stderr: )?step \d+ \(.*\n", text, flags=re.MULTILINE)
        for line in steps[1:-1]:  # a pipe gets a line a second, and always the first and the last
            text = text.replace(line, "", 1)
        return text

    def _id(self, found: re.Match[str]) -> str:
        number = f"{1 + len(self.known):026d}"
        return self.known.setdefault(found[0], f"{found[1]}_{number}")


@pytest.fixture(scope="module")
def normal(session: Session) -> Normal:
    """With the ids of the commands known first, so that all outputs number alike."""
    made = Normal()
    made(shlex.join(word for command in session.commands for word in command))
    return made


def transcript(session: Session, outputs: list[str], normal: Normal) -> str:
    """The whole session as a user sees it, without the values that differ between runs."""
    shown: list[str] = []
    for command, text in zip(session.commands, outputs, strict=True):
        words = [Path(word).name if word.startswith("/") else word for word in command]
        # depends on the width of the removed text, or varies
        is_loose = command[0] in ("quota", "jobs", "show", "compare")
        is_loose = is_loose or (command[0] == "metrics" and len(command) == 2)
        calm = normal(re.sub(r" {2,}", "  ", text) if is_loose else text)
        shown.append(f"$ glasshouse {normal(shlex.join(words))}\n{calm.strip(chr(10))}\n")
    return "\n".join(shown)


def check(name: str, text: str) -> None:
    """Compare with the reviewed output, or write it if requested."""
    file = GOLDEN / name
    if os.environ.get("RENEW_GOLDEN"):
        file.write_text(text)
    assert text == file.read_text()


def in_terminal(command: list[str], width: int, environment: dict[str, str]) -> str:
    """All that a terminal of this width is sent."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, width, 0, 0))
    process = subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
        start_new_session=True,
    )
    os.close(theirs)
    sent = b""
    while True:
        try:
            more = os.read(ours, 65536)
        except OSError:  # Linux's word for the end
            break
        if not more:
            break
        sent += more
    os.close(ours)
    assert process.wait(60) == 0
    return sent.decode()


PIECE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+")


def drawn(sent: str) -> str:
    """What stands in a terminal after that: carriage returns, lines up and lines erased."""
    lines, row, column = [""], 0, 0
    for piece in PIECE.findall(sent):
        if piece == "\r":
            column = 0
        elif piece == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif piece.startswith("\x1b["):
            count = int(re.sub(r"\D", "", piece) or 1)
            row = max(0, row - count) if piece[-1] == "A" else row
            lines[row] = "" if piece == "\x1b[2K" else lines[row]
        else:
            line = lines[row].ljust(column)
            lines[row] = line[:column] + piece + line[column + len(piece) :]
            column += len(piece)
    return "\n".join(line.rstrip() for line in lines)


def by_command(text: str) -> list[str]:
    """An output cut where each command ended; the mark stays."""
    return [part for part in re.split(r"(?<=\])\n(?<=\d\]\n)", text) if part]


@pytest.mark.parametrize("width", [80, 200])
def test_a_terminal_shows_what_it_did(session: Session, normal: Normal, width: int):
    sent = in_terminal(session.driving(), width, session.environment)
    text = re.sub(r"(\[exit \d+\]\r?\n)\[exit \d+\]\r?\n", r"\1", sent)  # both streams end there
    outputs = [drawn(part) + "\n" for part in by_command(text.replace("\r\n", "\n"))]
    for line in "".join(outputs).splitlines():
        # what is wider is one long value or message: the terminal wraps it
        assert len(line) <= width or not re.search(r"\S  +\S", line), line
    check(f"terminal-{width}.txt", transcript(session, outputs, normal))


def piped(session: Session, *more: str) -> list[tuple[str, str, str]]:
    """Of each command what comes out of it, how it ended, and what it said to people."""
    done = subprocess.run(
        session.driving(*more),
        env=session.environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    parted = (part.rpartition("[exit") for part in by_command(done.stdout))
    said = (part.rpartition("[exit")[0] for part in by_command(done.stderr))
    return [
        (out, f"[exit{code.rstrip()}\n", "".join(f"stderr: {line}\n" for line in err.splitlines()))
        for (out, _, code), err in zip(parted, said, strict=True)
    ]


def test_a_pipe_gets_lines_and_nothing_is_cut(session: Session, normal: Normal):
    outputs = ["".join(parts) for parts in piped(session)]
    assert "\x1b" not in "".join(outputs)
    assert SPEC["name"] in outputs[0]
    check("pipe.txt", transcript(session, outputs, normal))


def test_json_is_one_document_for_each_command(session: Session, normal: Normal):
    outputs = [
        _readable(json.loads(out)) + code + err for out, code, err in piped(session, "--json")
    ]
    check("json.txt", transcript(session, outputs, normal))


OF_THIS_RUN = {
    "probe_overhead", "log_tail", "request_id", "worker", "created_by",
    "storage_bytes", "cost", "sha256", "size_bytes", "overhead", "last_seq", "warnings", "links",
}  # fmt: skip


def _readable(document: Any) -> str:
    """A line for each field, or for each entry of a list."""
    kept = _without(document, lambda name: name in OF_THIS_RUN or name.endswith("_s"))
    if isinstance(kept, dict):
        return "".join(f"{name}: {json.dumps(value)}\n" for name, value in kept.items())
    entries = [one for one in kept if not _is_of_machine(one)]
    return "".join(f"- {json.dumps(one)}\n" for one in entries)


def _is_of_machine(entry: dict[str, Any]) -> bool:
    return str(entry.get("name")).startswith(("system/", "time/", "throughput/"))


def _without(value: Any, drop: Callable[[str], bool]) -> Any:
    if isinstance(value, dict):
        return {name: _without(one, drop) for name, one in value.items() if not drop(name)}
    return [_without(one, drop) for one in value] if isinstance(value, list) else value


def test_watching_in_a_terminal_continues_to_the_end_of_the_job(session: Session):
    command = driver([["submit", str(session.home / "job.json"), "--watch"]])
    sent = in_terminal(command, 80, session.environment | {"NO_COLOR": "1"})
    assert not re.search(r"\x1b\[[0-9;]*3\dm", sent)
    text = drawn(sent)
    assert re.search(r"^job_\w+  succeeded  made here$", text, re.MULTILINE)
    assert re.search(r"step 7 \(8 in all\)  epoch 7", text)
    assert text.count("made here") == 1  # each picture is drawn over the one before
    assert text.endswith("[exit 0]\n[exit 0]\n")
