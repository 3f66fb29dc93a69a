"""Uploads that are coming in, and what is refused of them."""
