"""Schemas of responses, for the OpenAPI document. The tests check responses against them."""
