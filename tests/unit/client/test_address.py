"""Where the client looks for the service."""

import json
from pathlib import Path

import pytest

import glasshouse as gh
from glasshouse.client.connection.address import find_service, home_dir

URL, KEY = "http://127.0.0.1:8420", "gh_local"


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    text = json.dumps({"url": URL, "api_key": KEY, "pid": 1, "version": "0.1.0"})
    (tmp_path / "runtime.json").write_text(text)
    return {"GLASSHOUSE_HOME": str(tmp_path)}


def test_arguments_win(home: dict[str, str]):
    found = find_service("https://far/", "gh_far", {**home, "GLASSHOUSE_URL": "http://env"})
    assert (found.url, found.api_key) == ("https://far", "gh_far")


def test_the_environment_comes_next(home: dict[str, str]):
    environ = {**home, "GLASSHOUSE_URL": "http://env:1", "GLASSHOUSE_API_KEY": "gh_env"}
    found = find_service(environ=environ)
    assert (found.url, found.api_key) == ("http://env:1", "gh_env")


def test_the_runtime_file_comes_last(home: dict[str, str]):
    found = find_service(environ=home)
    assert (found.url, found.api_key) == (URL, KEY)
    assert found.is_local


def test_the_key_of_the_runtime_file_is_for_its_own_address_only(home: dict[str, str]):
    assert find_service("http://other:8420", environ=home).api_key is None
    assert find_service(URL + "/", environ=home).api_key == KEY


def test_without_any_hint_the_error_says_what_to_do(tmp_path: Path):
    with pytest.raises(gh.APIConnectionError, match="glasshouse up"):
        find_service(environ={"GLASSHOUSE_HOME": str(tmp_path)})


@pytest.mark.parametrize("text", ["", "[]", "{", "null"])
def test_a_damaged_runtime_file_counts_as_none(tmp_path: Path, text: str):
    (tmp_path / "runtime.json").write_text(text)
    with pytest.raises(gh.APIConnectionError):
        find_service(environ={"GLASSHOUSE_HOME": str(tmp_path)})


@pytest.mark.parametrize("url", ["127.0.0.1:8420", "ftp://x", "http://"])
def test_an_invalid_address_is_refused(url: str):
    with pytest.raises(gh.APIConnectionError, match=r"http://127\.0\.0\.1:8420"):
        find_service(url, environ={})


def test_the_home_is_in_the_users_directory():
    assert home_dir({}) == Path.home() / ".glasshouse"
