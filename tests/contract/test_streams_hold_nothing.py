"""An open stream holds no database session and no thread."""

import ast
import inspect
from collections.abc import Generator
from pathlib import Path

import pytest
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

import api
from api.app import create_app
from models.settings import Settings

SOURCES = sorted(Path(str(api.__file__)).parent.rglob("*.py"))


def below(dependant: Dependant) -> Generator[Dependant]:
    yield dependant
    for inner in dependant.dependencies:
        yield from below(inner)


def test_no_route_depends_on_something_that_is_closed_only_after_the_answer(
    tmp_path: Path,
) -> None:
    app = create_app(Settings(home=tmp_path))
    routes = [route for router in app.state.routers for route in router.routes]
    assert len(routes) > 30
    for route in routes:
        assert isinstance(route, APIRoute)
        for dependant in below(route.dependant):
            call = dependant.call
            assert not inspect.isgeneratorfunction(call), f"{route.path}: {call}"
            assert not inspect.isasyncgenfunction(call), f"{route.path}: {call}"
    app.state.resources.database.close()


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_no_answer_is_streamed_from_a_thread(source: Path) -> None:
    tree = ast.parse(source.read_text())
    asynchronous = {
        node.name for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef)
    } | {"stream"}  # api.rendering.tensors.Body.stream
    for call in ast.walk(tree):
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
            continue
        if call.func.id == "StreamingResponse":
            made = call.args[0]
            assert isinstance(made, ast.Call), ast.unparse(call)
            name = (
                made.func.attr if isinstance(made.func, ast.Attribute) else ast.unparse(made.func)
            )
            assert name in asynchronous, ast.unparse(call)


def test_only_pure_asgi_middleware_is_used() -> None:
    for source in SOURCES:
        assert "BaseHTTPMiddleware" not in source.read_text().replace("no BaseHTTPMiddleware", "")


def test_the_bytes_of_a_tensor_are_an_asynchronous_generator() -> None:
    from api.rendering.tensors import TensorBody

    assert inspect.isasyncgenfunction(TensorBody.stream)


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_no_transaction_is_held_while_something_is_awaited_or_yielded(source: Path) -> None:
    for block in ast.walk(ast.parse(source.read_text())):
        if isinstance(block, ast.With) and any(_opens(item) for item in block.items):
            for inner in ast.walk(block):
                assert not isinstance(inner, ast.Await | ast.Yield | ast.YieldFrom), source.name


def _opens(item: ast.withitem) -> bool:
    text = ast.unparse(item.context_expr)
    return text.endswith(("database.read()", "database.write()"))
