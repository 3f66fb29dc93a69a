"""Checks the dependencies for known vulnerabilities and their licenses: ``make audit``.

Vulnerabilities come from a service on the network. If it cannot be reached, this says so and does
not fail. A vulnerability that was found always fails. Licenses come from the metadata of installed
packages; those of the dashboard's packages come from its lock file.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ALLOWED = re.compile(
    r"\b(mit|mit-cmu|mit-0|bsd|0bsd|apache|isc|psf|python|hpnd|zlib|unlicense|mpl|blueoak|"
    r"cc0|public domain|boost|bsl-1\.0|zpl|cnri|ofl|x11|curl|libpng|nist)",
    re.IGNORECASE,
)
REFUSED = re.compile(r"\b(a?gpl|gnu (affero )?general|sspl|busl|business source)", re.IGNORECASE)
EXCEPTIONS = {
    "hypothesis": "MPL; development only",
    "psycopg": "LGPL, used unchanged as a library",
    "psycopg-binary": "LGPL, used unchanged as a library",
    "psycopg-pool": "LGPL, used unchanged as a library",
}
"""Packages whose licenses a person has reviewed, with the result."""
_UNREACHABLE = re.compile(
    r"ConnectionError|MaxRetryError|NameResolution|timed out|Temporary failure|ProxyError|"
    r"SSLError|HTTPError|ConnectTimeout|ServiceError|RemoteDisconnected",
    re.IGNORECASE,
)


def main() -> int:
    """Run both checks; return 1 if one has found something."""
    wrong = list(_wrong_licences())
    for line in wrong:
        print(f"licence: {line}")
    looked_at = [*_installed(), *_of_page()]
    print(f"licences: {len(looked_at)} checked, {len(wrong)} not allowed")
    found = [_holes(), _holes_of_page()]
    return 1 if any(found) or wrong else 0


def _holes() -> bool:
    command = [sys.executable, "-m", "pip_audit", "--requirement", str(ROOT / "constraints.txt")]
    command += ["--no-deps", "--disable-pip", "--progress-spinner", "off", "--timeout", "20"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    except subprocess.TimeoutExpired:
        print("pip-audit: the list of holes does not answer; nothing was checked")
        return False
    found = re.search(r"Found \d+ known vulnerabilit", done.stdout + done.stderr)
    if done.returncode == 0:
        print("pip-audit: no known vulnerabilities")
    elif found or not _UNREACHABLE.search(done.stderr):
        print(done.stdout + done.stderr)
        return True
    else:
        print("pip-audit: the list of holes cannot be reached; nothing was checked")
    return False


def _holes_of_page() -> bool:
    command = [sys.executable, str(ROOT / "dashboard" / "build.py"), "audit"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        told: dict[str, Any] = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError):
        print("npm audit: there is no Node, or no answer; nothing was checked")
        return False
    if "vulnerabilities" not in told:
        print("npm audit: the list of holes cannot be reached; nothing was checked")
        return False
    for name, hole in told["vulnerabilities"].items():
        print(f"npm audit: {name} {hole.get('range')}: {hole.get('severity')}")
    print(f"npm audit: {len(told['vulnerabilities'])} known vulnerabilities")
    return bool(told["vulnerabilities"])


def _of_page() -> Iterator[tuple[str, str]]:
    """Yield the packages that the dashboard is built with, and their declared licenses."""
    lock = json.loads((ROOT / "dashboard" / "package-lock.json").read_text())
    for path, package in lock["packages"].items():
        if path:
            yield path.rpartition("node_modules/")[2], package.get("license", "")


def _installed() -> Iterator[tuple[str, str]]:
    """Yield the installed packages of constraints.txt, and their declared licenses."""
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    for line in pinned:
        name = line.partition("==")[0].strip()
        if not name or name.startswith("#"):
            continue
        try:
            about = metadata.metadata(name)
        except metadata.PackageNotFoundError:
            continue
        classified = [value for value in about.get_all("Classifier") or [] if "License" in value]
        said = [about.get("License-Expression"), *classified, about.get("License")]
        yield name, "; ".join(text[:200] for text in said if text)


def _wrong_licences() -> Iterator[str]:
    for name, licence in [*_installed(), *_of_page()]:
        if name.lower().replace("_", "-") in EXCEPTIONS:
            continue
        if REFUSED.search(licence) or not ALLOWED.search(licence):
            yield f"{name}: {licence or 'says nothing'}"


if __name__ == "__main__":
    sys.exit(main())
