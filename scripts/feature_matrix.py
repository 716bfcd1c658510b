"""The README's table of what goes with what: `python -m pelton.scripts.feature_matrix` prints it."""

from __future__ import annotations

from ..features import FEATURES, refused_pairs, unsupported_reason


def matrix() -> str:
    """A row for each feature against those before it: a dot where they go together, else the number of the reason."""
    numbers: dict[str, int] = {}
    for _, _, reason in refused_pairs():
        numbers.setdefault(reason, len(numbers) + 1)
    columns = [f"{letter}" for letter in map(_letter, range(len(FEATURES) - 1))]
    lines = ["| | | " + " | ".join(columns) + " |", "|---|---|" + ":-:|" * len(columns)]
    for row, feature in enumerate(FEATURES):
        cells = [_cell(feature, other, numbers) for other in FEATURES[:row]]
        padding = [""] * (len(columns) - len(cells))
        lines.append(f"| {_letter(row)} | {feature} | " + " | ".join([*cells, *padding]) + " |")
    lines.append("")
    lines += [f"{number}. {reason}" for reason, number in numbers.items()]
    return "\n".join(lines)


def _cell(feature: str, other: str, numbers: dict[str, int]) -> str:
    reason = unsupported_reason(feature, other)
    return "·" if reason is None else str(numbers[reason])


def _letter(index: int) -> str:
    return chr(ord("a") + index)


if __name__ == "__main__":
    print(matrix())
