"""Checkpoints of the small family models, made once and shared by the test files."""

import pytest

from models.checkpoints import load_hf
from tests.models.families import build


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Returns a function from a case to (torch model, directory, config, params), made once."""
    made = {}

    def get(case):
        if case not in made:
            path = tmp_path_factory.mktemp(case)
            model = build(case)
            model.save_pretrained(path)
            made[case] = (model, path, *load_hf(path))
        return made[case]

    return get
