"""A block in a file that is not ours: in and out again, byte by byte."""

import pytest

from pyshim.node.install.blocks import block_in, with_block, without_block


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("text", ["", "version = 2\n", "version = 2", "a\n\n\n", "\n", "a\r\n"])
def test_a_block_comes_out_as_it_went_in(text: str, first: bool) -> None:
    marked = with_block(text, "b = 1\n", first=first)

    assert block_in(marked) == "b = 1\n"
    assert without_block(marked) == text
    assert block_in(text) is None
    assert without_block(text) == text


def test_what_others_write_around_it_stays() -> None:
    marked = "x = 0\n" + with_block("a = 1", "b = 1\n", first=False) + "c = 1\n"

    assert without_block(marked) == "x = 0\na = 1\nc = 1\n"
    assert block_in(marked) == "b = 1\n"


def test_a_block_without_its_end_is_refused() -> None:
    marked = with_block("", "b = 1\n", first=True).replace("# end pyshim", "")

    with pytest.raises(ValueError, match="has no line '# end pyshim'"):
        without_block(marked)
