"""How many tokens each response of an answer carried, from what servers say of it; never from how long a text is.

Servers differ in three ways. They count the tokens of each response, of all so far, only of the whole, or not at all;
and the text of a response is what is new (a delta) or repeats all that came before it, throughout or in the last one.
Which of these it was can be told only when the answer is complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def from_counts(texts: Sequence[str], counts: Sequence[int | None]) -> list[int]:
    """From the server's count with each response; without any, one token for each response that brought new text.

    Where a response repeats the text before it and its count is no smaller than theirs, the count repeats them as well;
    and so does one that came after text without a count.
    """
    if any(text and count is None for text, count in zip(texts, counts, strict=True)):
        return from_totals(texts, counts)
    repeats, tokens, total = _repeating(texts), [], 0
    for at, count in enumerate(counts):
        grown = at in repeats and texts[at] != repeats[at]
        repeated = at in repeats and (count or 0) >= total + grown
        tokens.append((count or 0) - total * repeated)
        total += tokens[-1]
    return tokens


def from_totals(texts: Sequence[str], totals: Sequence[int | None]) -> list[int]:
    """From the server's count of all tokens so far, with each response or with the last alone; else from the texts.

    A total is of all responses since the one before it: those of them that carried text get equal shares, rounded so
    that the first has one. With a total in each response that is exact.
    """
    if all(total is None for total in totals):
        return _from_texts(texts)
    tokens, counted, carrying = [0] * len(texts), 0, []
    for at, total in enumerate(totals):
        if texts[at]:
            carrying.append(at)
        if total is None:
            continue
        sharing = carrying or [at]
        # Upwards: [0, 3, 6, 8, 10] shares of four among three are [0, 2, 3, 4].
        bounds = [-(-max(total - counted, 0) * share // len(sharing)) for share in range(len(sharing) + 1)]
        for place, (low, high) in zip(sharing, pairwise(bounds), strict=True):
            tokens[place] += high - low
        counted, carrying = total, []
    return tokens


def _from_texts(texts: Sequence[str]) -> list[int]:
    repeats = _repeating(texts)
    return [int(bool(text) and repeats.get(at) != text) for at, text in enumerate(texts)]


def _repeating(texts: Sequence[str]) -> dict[int, str]:
    """Those responses that repeat the text before them, each with that text.

    All but the first, where each is the one before it and more (the last perhaps no more); or the last, where it begins
    with all the others together. Two equal ones alone are two equal tokens, not a repetition.
    """
    carrying = [(at, text) for at, text in enumerate(texts) if text]
    if len(carrying) < 2:
        return {}
    pairs = list(pairwise(carrying))
    grows = [later.startswith(earlier) and later != earlier for (_, earlier), (_, later) in pairs]
    if all(grows[:-1]) and (grows[-1] or (len(grows) > 1 and pairs[-1][0][1] == pairs[-1][1][1])):
        return {at: earlier for (_, earlier), (at, _) in pairs}
    whole = "".join(text for _, text in carrying[:-1])
    last, text = carrying[-1]
    return {last: whole} if len(carrying) > 2 and text.startswith(whole) else {}
