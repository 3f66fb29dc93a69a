"""What stands in a cell of a Markdown table."""

import html
import re

CODE_WITH_PIPE = re.compile(r"`([^`]*\|[^`]*)`")


def cell(text: str | None) -> str:
    """A docstring as one line of a table.

    A pipe in code has no form in Markdown that code hosts and the site both show: it goes as HTML.
    """
    line = " ".join((text or "").replace("``", "`").split())
    return CODE_WITH_PIPE.sub(_as_html, line).replace("|", "\\|")


def _as_html(found: re.Match[str]) -> str:
    return f"<code>{html.escape(found[1], quote=False).replace('|', '&#124;')}</code>"
