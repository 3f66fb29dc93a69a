"""A PostgreSQL server that says nothing: it is noticed, and soon."""

import socket
import time

import pytest

from glasshouse.errors import DatabaseUnavailable
from models.database import Database


def test_a_server_that_never_answers_is_unavailable_and_not_waited_for_without_end():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        database = Database(f"postgresql+psycopg://u:p@127.0.0.1:{port}/g?connect_timeout=2")
        began = time.monotonic()
        with pytest.raises(DatabaseUnavailable):
            database.ping()
        assert time.monotonic() - began < 30
        database.close()


def test_connections_ask_whether_the_server_is_still_there(postgres: str):
    for query, timeout in {"": "10", "&connect_timeout=7": "7"}.items():
        url = postgres + query if "?" in postgres else postgres + query.replace("&", "?")
        database = Database(url)
        with database.engine.connect() as connection:
            driver = connection.connection.dbapi_connection
            assert driver is not None
            known = driver.info.get_parameters()
        database.close()
        assert known["connect_timeout"] == timeout
        assert known["keepalives_idle"] == "30"
        assert known["tcp_user_timeout"] == "60000"
