"""Every parser on its corpus, and on some mutations of it."""

from pathlib import Path
from random import Random

import pytest

from tests.fuzz.mutation import mutated
from tests.fuzz.targets import TARGETS, corpus

MUTATIONS = 100
INPUTS = [pytest.param(name, path, id=f"{name}/{path.name}") for name in TARGETS for path in corpus(name)]


@pytest.mark.parametrize(("name", "path"), INPUTS)
def test_an_input_of_the_corpus_is_read_or_refused(name: str, path: Path) -> None:
    TARGETS[name](path.read_bytes())


@pytest.mark.parametrize("name", TARGETS)
def test_mutated_inputs_are_read_or_refused(name: str) -> None:
    """The same ones each time: a failure is one of the code, not of the day. `make fuzz` looks for new ones."""
    inputs = [path.read_bytes() for path in corpus(name)]
    random = Random(name)

    for _ in range(MUTATIONS):
        TARGETS[name](mutated(inputs, random))
