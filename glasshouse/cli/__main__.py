"""``python -m glasshouse.cli`` is ``glasshouse``."""

import sys

from glasshouse.cli import main

sys.exit(main())
