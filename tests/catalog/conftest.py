"""Places of a new catalogue: a file, memory, and a PostgreSQL server."""

import pytest
from postgres import fresh_schema

from ragblend.files.store_folder import CATALOG_FILE


@pytest.fixture
def shared_catalog(postgres):
    """URL of an empty catalogue in PostgreSQL."""
    with fresh_schema(postgres) as url:
        yield url


@pytest.fixture(params=["file", "memory", "postgres"])
def any_place(request, tmp_path):
    if request.param == "postgres":
        return str(request.getfixturevalue("shared_catalog"))
    return tmp_path / CATALOG_FILE if request.param == "file" else None


@pytest.fixture(params=["file", "postgres"])
def kept_place(request, tmp_path):
    return str(request.getfixturevalue("shared_catalog")) if request.param == "postgres" else tmp_path / CATALOG_FILE
