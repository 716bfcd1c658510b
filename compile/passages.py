"""Text of several kinds, for what depends on the tokens: calibration and, on other text, measuring what is lost."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import BuildError

CALIBRATION = (
    "The harbour was quiet when the last ferry came in. A woman with two suitcases asked the pilot whether the train "
    "to the north still ran on Sundays; he shrugged, looked at his watch and pointed to the yellow house.",
    "def merge(left: list[int], right: list[int]) -> list[int]:\n    out = []\n    while left and right:\n"
    "        out.append(left.pop(0) if left[0] <= right[0] else right.pop(0))\n    return out + left + right\n",
    "Let f(x) = 3x^2 - 12x + 7. Then f'(x) = 6x - 12 = 0 gives x = 2 and f(2) = -5, so the minimum is -5. In 1987, "
    "41.6% of 2,350 households answered; by 2003 it was 58.9%.",
    '{"id": 10482, "user": {"name": "Ana Müller", "tags": ["admin", "beta"]}, "total": -3.75, "paid": false, "url": '
    '"https://example.org/a?b=1&c=%20"}\n| key | value |\n|-----|-------|\n| a   | 0.001 |\n',
    "Question: Why does ice float on water?\nAnswer: Because water expands when it freezes, ice is less dense than the "
    "liquid around it.\n\n1. Boil the rice.\n2. Add salt, pepper and THREE eggs!!!\n",
    "El tren sale a las ocho y media. Der Zug fährt um halb neun ab. Le train part à huit heures et demie. "
    "Поезд отправляется в половине девятого. 列车八点半出发。電車は八時半に出ます。 القطار يغادر في الثامنة.",
)

EVALUATION = (
    "Bread is one of the oldest prepared foods. Flour and water are mixed into a dough, which rises when yeast turns "
    "its sugars into gas, and is then baked. In the sixth century bakers of one city had to stamp every loaf, so that "
    "short weight could be traced; a fine of 12 coins was usual, and the third offence cost the oven.\n\n"
    "## Install\n\n```sh\ncurl -LO https://example.com/tool-2.4.1.tar.gz\ntar xf tool-2.4.1.tar.gz && cd tool-2.4.1\n"
    "./configure --prefix=$HOME/.local && make -j8 install\n```\n\n"
    "A shop sells pens at $1.20 each and notebooks at $3.50 each. Nadia buys 5 pens and 2 notebooks and pays with a "
    "$20 bill. The pens cost 5 * 1.20 = 6.00, the notebooks 2 * 3.50 = 7.00, together 13.00. Her change is 7.00.\n\n"
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"
    "        self.items.append(item)\n\n    def pop(self):\n        if not self.items:\n"
    "            raise IndexError('pop from an empty stack')\n        return self.items.pop()\n\n"
    "- What is the tallest mountain in Africa?\n- Kilimanjaro, with 5,895 metres above the sea.\n"
    "- And in South America? - Aconcagua: 6,961 m.\n\n"
    "Am nächsten Morgen lag Schnee auf den Dächern. Il n'y avait personne dans la rue. 明日は雨が降るでしょう。"
)


def token_ids(tokenizer: Any, text: str, vocab_size: int) -> np.ndarray:
    """Ids of `text`, int64, by a transformers `tokenizer` with what it puts before a text.

    Tokens that the model does not have are left out. Raises `BuildError` if it has none of them.
    """
    ids = np.array(tokenizer(text, verbose=False)["input_ids"], np.int64)
    known: np.ndarray = ids[ids < vocab_size]
    if not len(known):
        raise BuildError(f"the tokenizer gives plain text no token below the model's vocab_size {vocab_size}")
    return known
