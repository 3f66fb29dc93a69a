"""What answers look like: for the OpenAPI document, and checked in the tests."""
