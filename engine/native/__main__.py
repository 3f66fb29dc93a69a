"""``python -m engine.native``: build the native kernels in place, for a checkout; print where."""

import subprocess
import sys

from engine.native.compiling import SOURCE, NotCompiled, compile_into


def main() -> int:
    """Build them; the exit code says whether they can be used."""
    try:
        compile_into(SOURCE.parent)
    except (NotCompiled, OSError) as error:
        sys.stderr.write(f"The kernel was not built: {error}\n")
        return 1
    # in a new process, because this one may have loaded an older library from the same path
    command = [sys.executable, "-m", "engine.native.compiling"]
    return subprocess.run(command, check=False).returncode  # noqa: S603 - our own module


if __name__ == "__main__":
    sys.exit(main())
