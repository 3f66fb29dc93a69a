from tests.little_service import connect, serve, server

__all__ = ["connect", "serve", "server"]
