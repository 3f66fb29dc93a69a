"""Serving: keep trained networks in memory and answer requests of clients within milliseconds.

A thread talks to the API over a socket and parses requests (`listener`, `requests`); they wait in a
bounded queue (`queue`); the main thread computes them in batches (`served_models`, `serve`).
`model_inputs` is what a network reads and returns, `raw_rows`, `tensor_formats` and
`inference_protocol` are the forms of requests, and `responses` writes the answers. `drift`
compares the rows of requests with training rows.
"""
