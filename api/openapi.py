"""Print the OpenAPI document: ``python -m api.openapi > docs/reference/openapi.json``."""

import json
import sys
import tempfile
from pathlib import Path

from api.app import create_app
from models.settings import Settings


def main() -> int:
    """Print the document."""
    with tempfile.TemporaryDirectory() as directory:
        app = create_app(Settings(home=Path(directory)))
        json.dump(app.openapi(), sys.stdout, indent=1, ensure_ascii=False)
    sys.stdout.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
