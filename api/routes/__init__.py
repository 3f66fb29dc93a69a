"""One file per resource. A route checks the request, calls ``models`` and renders the response.

The folders are named as in ``models``; ``service`` has what is about the service itself.
"""
