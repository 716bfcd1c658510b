"""Where in a JSON document something stands."""

from __future__ import annotations

from dataclasses import dataclass

_MAX_LENGTH = 300


@dataclass(frozen=True, slots=True)
class Place:
    """A JSON pointer (RFC 6901) that is spelled only when it is shown, and then cut to 300 characters: a key may be as
    long as the document, and each place below it would carry a copy.
    """

    parent: Place | None = None
    key: str = ""
    depth: int = 0

    def __truediv__(self, key: str | int) -> Place:
        return Place(self, str(key), self.depth + 1)

    def __str__(self) -> str:
        parts: list[str] = []
        place = self
        while place.parent is not None:
            parts.append("/" + place.key[:_MAX_LENGTH].replace("~", "~0").replace("/", "~1"))
            place = place.parent
        text = "".join(reversed(parts))
        return text if len(text) <= _MAX_LENGTH else text[: _MAX_LENGTH - 3] + "..."


def read_pointer(pointer: str) -> Place:
    """`pointer` begins with `/`, or is empty: the whole document."""
    place = Place()
    for part in pointer.split("/")[1:]:
        place /= part.replace("~1", "/").replace("~0", "~")
    return place
