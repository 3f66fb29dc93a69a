"""The HTTP server: routes, streaming, submission. Imports neither torch nor the worker."""
