"""A reward of one's own: full marks for the right number, part marks for a near one. `python docs/examples/doubles_reward.py` tries it."""


def near(response, answer, prompt, within=10):
    """1 for the answer, less the farther off, 0 from `within` on and for anything that is not a whole number."""
    text = response.strip()
    if not (text.isascii() and text.isdigit()):
        return 0.0
    return max(0.0, 1 - abs(int(text) - int(answer)) / within)


if __name__ == "__main__":
    print(near("84", "84", None), near("82", "84", None), near("many", "84", None))
