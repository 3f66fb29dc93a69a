"""One file a resource. A route checks the request, asks ``models`` and renders the answer."""
