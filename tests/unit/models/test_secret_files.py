"""Settings with a password in them, read from files."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from models.settings import Settings


@pytest.mark.parametrize(("name", "read"), [("database_url", "database"), ("redis_url", "redis")])
def test_a_secret_is_read_from_the_file_that_its_variable_names(
    name: str, read: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "secret"
    file.write_text("postgresql+psycopg://me:pass@db/x\n")
    monkeypatch.setenv(f"GLASSHOUSE_{name.upper()}_FILE", str(file))
    settings = Settings()
    assert getattr(settings, read) == "postgresql+psycopg://me:pass@db/x"
    assert "pass@" not in repr(settings)
    explicit = Settings.model_validate({name: "redis://127.0.0.1:1/0"})
    assert getattr(explicit, read) == "redis://127.0.0.1:1/0"


@pytest.mark.parametrize("content", [None, "", "\n", "\xff"])
def test_a_file_without_a_secret_is_refused_by_the_name_of_its_setting(
    content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "secret"
    if content is not None:
        file.write_bytes(content.encode("latin-1"))
    monkeypatch.setenv("GLASSHOUSE_DATABASE_URL_FILE", str(file))
    with pytest.raises(ValidationError, match="database_url_file") as caught:
        Settings()
    assert str(file) in str(caught.value)
