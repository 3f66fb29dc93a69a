"""One file per resource. A route checks the request, calls ``models`` and renders the response."""
