"""X6, X7, X8, X10, X17: calls that this repository does not make, also by another name.

A gate that finds nothing may be blind, so the second half shows it what it must find.
"""

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from engine.process.hardening import OLDEST_TORCH, check_torch

ROOT = Path(__file__).parents[2]
SERVER = ("engine", "models", "api", "worker", "migrations")

UNPICKLING = {
    "pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib",
    "torch.load", "torch.jit.load", "torch.hub", "torch.package", "torch.serialization",
    "pandas.read_pickle", "numpy.lib.format.read_array", "multiprocessing.connection",
}  # fmt: skip
CODE_FROM_TEXT = {
    "eval", "exec", "compile", "__import__", "runpy", "code.interact",
    "yaml.load", "yaml.full_load", "yaml.unsafe_load", "yaml.load_all", "jsonpickle",
}  # fmt: skip
SHELLS = {
    "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput",
    "asyncio.create_subprocess_shell", "pty.spawn", "tempfile.mktemp",
}  # fmt: skip
ANYWHERE = UNPICKLING | CODE_FROM_TEXT | SHELLS
ARCHIVES = {"zipfile", "tarfile", "shutil.unpack_archive", "lzma", "bz2"}
CONNECTIONS = {
    "http.client", "urllib.request", "urllib3", "httpx", "httpx2", "aiohttp", "ftplib",
    "smtplib", "telnetlib", "socket.create_connection", "asyncio.open_connection", "xmlrpc",
    "websockets", "paramiko",
}  # fmt: skip
REQUESTS = re.compile(r"^\s*(?:import|from) requests\b", re.MULTILINE)
"""The library of this name; the service also calls requests by it."""
WRITES_ARCHIVES = "engine/inference/files.py"
MAY_CONNECT = {"worker/delivery/outbound.py", "api/healthcheck.py"}
"""The one door to places that users name, and the image's own question to itself on loopback."""
SHOWS = {
    "glasshouse/unpickling.py",
    "tests/contract/test_forbidden.py",
    "tests/acceptance/test_bad_input.py",
}
SHOWS |= {"tests/security/test_unpickling.py", "tests/unit/engine/test_checkpoints.py"}
SHOWS |= {"tests/unit/engine/test_serving_requests.py"}
"""The one that takes pickle away, and tests that do what is forbidden, to see it noticed."""


def files() -> list[str]:
    """Every Python file of the repository, and those that are about to be added."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    found = sorted(set(listed.stdout.split()))
    if not found:  # not a checkout
        found = sorted(str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py"))
        found = [name for name in found if not name.startswith((".venv/", "build/"))]
    return [name for name in found if (ROOT / name).exists()]


class Names:
    """What the names of a file stand for."""

    def __init__(self, nodes: Iterable[ast.AST]) -> None:
        self._known: dict[str, str] = {}
        for node in nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    first = alias.name.partition(".")[0]
                    self._known[alias.asname or first] = alias.name if alias.asname else first
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    self._known[alias.asname or alias.name] = f"{node.module}.{alias.name}"

    def dotted(self, node: ast.AST) -> str:
        """``np.load`` → ``numpy.load``; empty for what has no name."""
        if isinstance(node, ast.Name):
            return self._known.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            before = self.dotted(node.value)
            return f"{before}.{node.attr}" if before else ""
        return ""


def hits(name: str, forbidden: set[str]) -> bool:
    while name not in forbidden:
        name = name.rpartition(".")[0]
        if not name:
            return False
    return True


class Findings(NamedTuple):
    """What one reading of a file finds; to parse it and walk through it is what takes time."""

    mentions: frozenset[tuple[int, str]]
    """Every name that it imports or reads, in full, by line."""
    bad_calls: list[str]
    """The calls that it may not make because of their arguments, by line."""
    objects: list[int]
    """The lines that read arrays and do not say whether these may hold objects."""
    imports: list[int]
    """The lines that import what no constant names."""


def findings(source: str) -> Findings:
    nodes = list(ast.walk(ast.parse(source)))
    names = Names(nodes)
    calls = [(node, names.dotted(node.func)) for node in nodes if isinstance(node, ast.Call)]
    return Findings(
        mentions=frozenset(mentions(nodes, names)),
        bad_calls=[
            f"{node.lineno}: {what}" for node, name in calls for what in bad_call(node, name)
        ],
        objects=[
            node.lineno
            for node, name in calls
            if name == "numpy.load" and "allow_pickle" not in {word.arg for word in node.keywords}
        ],
        imports=[
            node.lineno
            for node, name in calls
            if name.startswith("importlib.") and "import_module" in name
            if not (node.args and isinstance(node.args[0], ast.Constant))
        ],
    )


def mentions(nodes: Iterable[ast.AST], names: Names) -> Iterator[tuple[int, str]]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Name | ast.Attribute) and not isinstance(node.ctx, ast.Store):
            yield node.lineno, names.dotted(node)  # a field called compile runs nothing


def wrong(source: str, forbidden: set[str]) -> list[str]:
    """What a file mentions that it may not, by line."""
    found = findings(source).mentions
    return [f"{line}: {name}" for line, name in found if hits(name, forbidden)]


def bad_call(node: ast.Call, name: str) -> Iterator[str]:
    given = {keyword.arg: keyword.value for keyword in node.keywords}
    if "allow_pickle" in given and not is_false(given["allow_pickle"]):
        yield "allow_pickle"
    if "shell" in given and name.startswith("subprocess") and not is_false(given["shell"]):
        yield "a shell"
    if "weights_only" in given:
        yield "torch.load by another name"
    if name.startswith(("subprocess.", "asyncio.create_subprocess")) and node.args:
        command = node.args[0]
        if isinstance(command, ast.JoinedStr | ast.BinOp) and not is_list(command):
            yield "a command made of text"
        if isinstance(command, ast.Constant) and name.startswith("subprocess."):
            yield "a command that is one text"


def is_list(node: ast.AST) -> bool:
    return isinstance(node, ast.BinOp) and any(
        isinstance(side, ast.List | ast.Tuple) or is_list(side) for side in (node.left, node.right)
    )


def is_false(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


FILES = files()
SERVICE = [name for name in FILES if name.startswith(SERVER)]


@cache
def read(name: str) -> Findings:
    return findings((ROOT / name).read_text())


def found_in(names: Iterable[str], forbidden: set[str]) -> list[str]:
    """What these files mention that they may not, each with its place."""
    return [
        f"{name}:{line}: {what}"
        for name in names
        for line, what in sorted(read(name).mentions)
        if hits(what, forbidden)
    ]


@pytest.mark.long
def test_no_code_unpickles_evaluates_or_starts_a_shell():
    assert len(FILES) > 500
    others = [name for name in FILES if name not in SHOWS]
    assert found_in(others, ANYWHERE) == []
    assert {name: found for name in others if (found := read(name).bad_calls)} == {}


def test_the_service_says_that_it_wants_no_objects_wherever_it_reads_arrays():
    assert len(SERVICE) > 300
    assert [f"{name}:{line}" for name in SERVICE for line in read(name).objects] == []


def test_the_service_reads_no_archives_but_by_its_own_reader():
    assert found_in([name for name in SERVICE if name != WRITES_ARCHIVES], ARCHIVES) == []
    opened = re.findall(r"zipfile\.ZipFile\(.*", (ROOT / WRITES_ARCHIVES).read_text())
    assert opened == ['zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:']


def test_the_service_connects_to_what_users_name_through_one_module_only():
    others = [name for name in SERVICE if name not in MAY_CONNECT]
    assert found_in(others, CONNECTIONS) == []
    assert [name for name in others if REQUESTS.search((ROOT / name).read_text())] == []


def test_no_field_of_a_request_is_a_url_that_the_service_would_fetch():
    """The fields whose names suggest a path. A person reviews each new one and adds it here."""
    import json

    document = json.loads((ROOT / "docs/reference/openapi.json").read_text())
    found: set[str] = set()
    for path, methods in document["paths"].items():
        for operation in methods.values():
            for given in operation.get("parameters", []):
                found |= speaking([given["name"]], f"{path} ?")
    reachable = [
        name for name in document["components"]["schemas"] if name.endswith(("Request", "Job"))
    ]
    for name in [*reachable, "Source", "Data", "Dataset"]:
        fields = document["components"]["schemas"].get(name, {}).get("properties", {})
        if name != "Job":
            found |= speaking(fields, name)
    assert found <= {"WebhookRequest.url", "WebhookPatch.url"}, (
        "webhooks go out through worker/delivery/outbound.py; nothing else may fetch"
    )


def speaking(names: object, where: str) -> set[str]:
    words = ("url", "uri", "href", "endpoint", "callback", "webhook", "remote", "host")
    listed = list(names)  # type: ignore[call-overload]
    return {f"{where}.{name}" for name in listed if any(word in name.lower() for word in words)}


def test_every_job_that_the_api_stores_is_counted_against_its_owners_quota():
    """X15: there is one place that stores a job, and it asks first."""
    texts = {path: path.read_text() for path in (ROOT / "api").rglob("*.py")}
    (place,) = [path for path, text in texts.items() if "jobs.add(" in text]
    lines = [line.strip() for line in texts[place].splitlines()]
    (stores,) = [n for n, line in enumerate(lines) if " _add(tx, " in line and "def" not in line]
    assert lines[stores - 1].startswith("quotas.admit_job(tx, ")


@pytest.mark.parametrize("room", ["engine", "models", "api", "worker"])
def test_no_user_text_becomes_an_import(room: str):
    """X17: a spec is data. What is imported by name is written in the code as a constant."""
    files = [name for name in FILES if name.startswith(f"{room}/")]
    assert len(files) > 20
    assert [f"{name}:{line}" for name in files for line in read(name).imports] == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import pickle as p",
        "import torch\ntorch.load('x')",
        "import torch as t\nt.load('x', weights_only=True)",
        "from torch import load\nload('x')",
        "from torch import load as read",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "import numpy as np\nnp.load('x', allow_pickle=flag)",
        "import numpy\nnumpy.savez('x', allow_pickle=1)",
        "import yaml\nyaml.load(x)",
        "import yaml as y\ny.load(x, Loader=y.Loader)",
        "eval('1')",
        "exec(code)",
        "run = eval",
        "import os\nos.system('ls')",
        "from os import popen",
        "import subprocess\nsubprocess.run('ls', shell=True)",
        "import subprocess\nsubprocess.run(['ls'], shell=flag)",
        "import subprocess\nsubprocess.run('ls -l')",
        "import subprocess\nsubprocess.run(f'ls {x}')",
        "import subprocess\nsubprocess.run('ls ' + x)",
        "from subprocess import check_output\ncheck_output('ls')",
        "import asyncio\nasyncio.create_subprocess_shell(x)",
        "import joblib",
        "import marshal",
        "import shelve",
    ],
)
def test_the_check_finds_forbidden_code(source: str):
    assert wrong(source, ANYWHERE) or findings(source).bad_calls


@pytest.mark.parametrize(
    "source",
    [
        "import numpy as np\nnp.load('x', allow_pickle=False)",
        "import re\nre.compile('x')",
        "import subprocess\nsubprocess.run(['ls', x])",
        "import subprocess\nsubprocess.run([*command, '-x'] + more)",
        "import yaml\nyaml.safe_load(x)",
        "import torch\ntorch.compile(network)",
        "from safetensors.torch import load_file\nload_file('x')",
        "network.eval()",
        "import json\njson.load(file)",
    ],
)
def test_the_check_accepts_allowed_code(source: str):
    assert wrong(source, ANYWHERE) == []
    assert findings(source).bad_calls == []


def test_arrays_that_may_hold_objects_and_imports_by_name_are_seen_too():
    assert findings("import numpy as np\nnp.load('x')").objects == [2]
    assert findings("import numpy as np\nnp.load('x', allow_pickle=False)").objects == []
    assert findings("import importlib\nimportlib.import_module(spec)").imports == [2]
    assert findings("from importlib import import_module\nimport_module(spec)").imports == [2]
    assert findings("import importlib\nimportlib.import_module('torch')").imports == []


def test_archives_and_connections_are_seen_too():
    assert wrong("from zipfile import ZipFile", ARCHIVES)
    assert wrong("import urllib.request", CONNECTIONS)
    assert wrong("import socket\nsocket.create_connection(x)", CONNECTIONS)
    assert not wrong("from urllib.parse import urlsplit", CONNECTIONS)


@pytest.mark.parametrize("version", ["2.9.1", "2.6.0+cu126", "1.13.1", "2.9"])
def test_a_torch_with_known_holes_is_not_used(version: str):
    with pytest.raises(SystemExit, match=r"2\.10"):
        check_torch(version)


@pytest.mark.parametrize("version", ["2.10.0", "2.13.0+cpu", "2.14.0a0+git1", "3.0"])
def test_a_torch_without_them_is(version: str):
    check_torch(version)


def test_the_package_asks_for_such_a_torch_and_every_process_with_torch_looks():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch,) = [
        line for line in project["optional-dependencies"]["server"] if line.startswith("torch>")
    ]
    oldest = tuple(int(part) for part in torch.split(">=")[1].split(",")[0].split("."))
    assert oldest >= OLDEST_TORCH
    for name in (
        "engine/process/fork_server.py",
        "engine/process/planner.py",
        "engine/__main__.py",
    ):
        assert "check_torch()" in (ROOT / name).read_text(), name
