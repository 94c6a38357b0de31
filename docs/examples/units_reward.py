"""A reward of one's own with part marks, a column of the data, options, and majority voting: a number with its unit.

    python docs/examples/units_reward.py

docs/adding-a-reward.md explains it.
"""

from __future__ import annotations

import re

QUANTITY = re.compile(r"(-?\d+(?:\.\d+)?)\s*([a-zA-Z]+)")


def quantity(response, answer, prompt, wrong_unit=0.5):
    """1 for the right number with the right unit, `wrong_unit` for the right number alone, else 0. The last quantity counts.

    answer is the number; the unit is the data's column "unit".
    """
    found = QUANTITY.findall(response)
    if not found:
        return 0.0
    number, unit = found[-1]
    if float(number) != float(answer):
        return 0.0
    return 1.0 if unit == prompt.meta["unit"] else wrong_unit


def find_answer(response, answer, prompt):
    """What majority voting counts: equal answers are spelt the same; None is no vote."""
    found = QUANTITY.findall(response)
    return f"{float(found[-1][0]):g} {found[-1][1]}" if found else None


quantity.find_answer = find_answer


if __name__ == "__main__":
    from megaflow.types import Prompt

    asked = Prompt("units:0", [], "How far is it?", answer=5, meta={"unit": "km"})
    print([quantity(text, 5, asked) for text in ("3 km + 2 km = 5 km", "5.0 m", "4 km", "five")])
