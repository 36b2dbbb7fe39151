"""Shared by the engine tests: one tiny trained model for the whole session."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """Folder with the tiny target, both drafters and their files (see ``tiny.build``)."""
    import tiny

    path = tmp_path_factory.mktemp("tiny")
    tiny.build(path)
    return path
