"""Compares an engine's tokens with what hal_tokens.py prints."""

from __future__ import annotations


def compare(label: str, found: list[list[int]], allowed: list[list[list[int]]], seconds: float) -> None:
    """Print how many tokens are hal's; a text may continue otherwise after a tie.

    Raises:
        SystemExit: a token is neither hal's nor tied with it.
    """
    equal, ties, wrong = 0, 0, []
    for row, (text, right) in enumerate(zip(found, allowed, strict=True)):
        if len(text) != len(right):
            wrong.append(f"text {row} has {len(text)} tokens instead of {len(right)}")
        for at, (token, choices) in enumerate(zip(text, right, strict=False)):
            if token == choices[0]:
                equal += 1
                continue
            if token in choices:
                ties += 1
            else:
                wrong.append(f"text {row}, token {at}: {token} instead of {choices}")
            break
    total = sum(map(len, allowed))
    print(f"{label}: {equal} of {total} tokens are hal's, {ties} texts leave it at a tie; {seconds:.0f} s", flush=True)  # noqa: T201
    if wrong:
        raise SystemExit(f"{label}: " + "; ".join(wrong))
