"""Generates the blocking client from the asynchronous one.

``python .ci/twins.py`` writes the modules of ``glasshouse/client/blocking`` from those of
``glasshouse/client/aio``; ``--check`` only reports files that differ. Two files are written by hand
in both places: ``running.py``, which defines how to wait, and ``__init__.py``.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CLIENT = ROOT / "glasshouse" / "client"
SYNC = CLIENT / "blocking"
ASYNC = CLIENT / "aio"
BY_HAND = {"__init__.py", "running.py"}
WORDS = (
    (r"\basync (def|with|for)\b", r"\1"),
    (r"\bawait ", ""),
    (r"\bAwaitable\[(\w+)\]", r"\1"),
    (r"\bAsync(?=[A-Z])", ""),
    (r"\b__a(enter|exit|iter|next)__\b", r"__\1__"),
    (r"\ba(closing|close|read|iter_bytes)\b", r"\1"),
    (r"\basynccontextmanager\b", "contextmanager"),
    (r"\bglasshouse\.client\.aio\b", "glasshouse.client.blocking"),
)
RULES = "I,F401,UP,C4,PERF"
"""Rules that ruff fixes after the replacements: import order, needless comprehensions."""


def sources() -> list[Path]:
    """Return the asynchronous modules to translate."""
    return sorted(path for path in ASYNC.glob("*.py") if path.name not in BY_HAND)


def twin(source: Path) -> str:
    """Return the text of a module for the blocking client."""
    text = source.read_text()
    for pattern, replacement in WORDS:
        text = re.sub(pattern, replacement, text)
    name = source.relative_to(ROOT).as_posix()
    text = f"# Made from {name} by .ci/twins.py: change that file.\n{text}"
    target = str(SYNC / source.name)
    fix = ["check", "--quiet", "--fix", "--unsafe-fixes", "--select", RULES]
    for command in (
        [*fix, "--stdin-filename", target, "-"],
        ["format", "--stdin-filename", target],
    ):
        text = ruff(command, text)
    return text


def ruff(command: list[str], text: str) -> str:
    """Run ruff on a text and return the result."""
    whole = [sys.executable, "-m", "ruff", *command]
    done = subprocess.run(whole, input=text, text=True, capture_output=True, cwd=ROOT, check=False)
    if not done.stdout:
        raise SystemExit(done.stderr)
    return done.stdout


def main() -> None:
    """Write the blocking modules, or with ``--check`` report those that differ."""
    stale: list[str] = []
    for source in sources():
        target = SYNC / source.name
        text = twin(source)
        if not target.exists() or target.read_text() != text:
            stale.append(target.relative_to(ROOT).as_posix())
            if "--check" not in sys.argv:
                target.write_text(text)
    if stale and "--check" in sys.argv:
        raise SystemExit(f"not what .ci/twins.py makes: {', '.join(stale)}")
    print(f"{len(sources())} twins, {len(stale)} written" if stale else "the twins are the same")


if __name__ == "__main__":
    main()
