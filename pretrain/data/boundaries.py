"""Places to cut a text: between paragraphs before lines, lines before sentences, sentences before words."""

from __future__ import annotations

_SEPARATORS = ("\n\n", "\n", ". ", " ")
# Share of the text's length, on either side of the place that was asked for.
_SEARCHED = 0.1


def boundary_near(text: str, position: int) -> int:
    """Start of the second part if a text is cut in two near a position; neither part is empty.

    Raises:
        ValueError: the text is too short.
    """
    if len(text) < 2:
        raise ValueError("a text of less than two characters cannot be cut")
    position = min(max(position, 1), len(text) - 1)
    reach = max(1, int(_SEARCHED * len(text)))
    first, last = max(1, position - reach), min(len(text) - 1, position + reach)
    for separator in _SEPARATORS:
        before = text.rfind(separator, max(0, first - len(separator)), position)
        after = text.find(separator, max(0, position - len(separator)), last)
        ends = [found + len(separator) for found in (before, after) if found >= 0]
        ends = [end for end in ends if first <= end <= last]
        if ends:
            return min(ends, key=lambda end: abs(end - position))
    return position


def cut(text: str, most_characters: int) -> list[str]:
    """The text in parts of at most so many characters, of which all but the last have at least half as many."""
    parts, start = [], 0
    while len(text) - start > most_characters:
        stop = start + most_characters
        earliest = start + max(1, most_characters // 2)
        for separator in _SEPARATORS:
            found = text.rfind(separator, earliest - len(separator), stop)
            if found >= 0 and found + len(separator) >= earliest:
                stop = found + len(separator)
                break
        parts.append(text[start:stop])
        start = stop
    return [*parts, text[start:]]
