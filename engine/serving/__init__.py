"""Serving: keep trained networks in memory and answer requests of clients within milliseconds.

A thread talks to the API over a socket and parses requests (`listener`, `requests`); they wait in a
bounded queue (`queue`); the main thread computes them in batches (`served_models`, `serve`).
"""
