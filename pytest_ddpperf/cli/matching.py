"""`-k` as pytest has it: words that a name contains, in any case, joined by `and`, `or`, `not` and parentheses."""

from __future__ import annotations

import re
from collections.abc import Callable

Matches = Callable[[str], bool]

_TOKEN = re.compile(r"\s*([()]|[^\s()]+)")


def expression(text: str) -> Matches:
    """What tells whether a name fits; raises ValueError for what is no expression."""
    tokens = _TOKEN.findall(text)
    matches = _either(tokens)
    if tokens:
        raise ValueError(f"{tokens[0]!r} stands where and, or or the end was expected")
    return matches


def _either(tokens: list[str]) -> Matches:
    """Takes from the front of `tokens` what belongs to it, as those below do."""
    first = _both(tokens)
    if tokens and tokens[0] == "or":
        del tokens[0]
        other = _either(tokens)
        return lambda name: first(name) or other(name)
    return first


def _both(tokens: list[str]) -> Matches:
    first = _one(tokens)
    if tokens and tokens[0] == "and":
        del tokens[0]
        other = _both(tokens)
        return lambda name: first(name) and other(name)
    return first


def _one(tokens: list[str]) -> Matches:
    if not tokens:
        raise ValueError("it ends where a word was expected")
    token = tokens.pop(0)
    if token == "not":
        inner = _one(tokens)
        return lambda name: not inner(name)
    if token == "(":
        inner = _either(tokens)
        if not tokens or tokens.pop(0) != ")":
            raise ValueError("a parenthesis is not closed")
        return inner
    if token in (")", "and", "or"):
        raise ValueError(f"{token!r} stands where a word was expected")
    word = token.lower()
    return lambda name: word in name.lower()
