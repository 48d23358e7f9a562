"""Words of a kernel command line."""

from pyshim.model.errors import InvalidArgument


def split_params(text: str) -> tuple[str, ...]:
    """The parameters; double quotes protect spaces, as in the kernel's own parser."""
    words: list[str] = []
    word = ""
    quoted = False
    for char in text:
        if char == '"':
            quoted = not quoted
            word += char
        elif char.isspace() and not quoted:
            if word:
                words.append(word)
            word = ""
        else:
            word += char
    if quoted:
        raise InvalidArgument(f"read kernel_params {text[:200]!r}: a double quote is not closed")
    return (*words, word) if word else tuple(words)
