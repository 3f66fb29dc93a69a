"""A container's health check: ``python -m api.healthcheck URL`` exits with 0 if it answers 200."""

import sys
from urllib.error import URLError
from urllib.request import urlopen

TIMEOUT_S = 3.0


def main(url: str) -> int:
    """Send one request."""
    if not url.startswith(("http://127.0.0.1:", "http://localhost:", "http://[::1]:")):
        return 2
    try:
        with urlopen(url, timeout=TIMEOUT_S) as answer:  # noqa: S310 (loopback http, checked above)
            return 0 if answer.status == 200 else 1
    except (URLError, OSError):
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]) if len(sys.argv) == 2 else 2)
