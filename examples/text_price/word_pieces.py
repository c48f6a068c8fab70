"""Sub-word tokens: a vocabulary learned by byte-pair merges, and greedy longest-match-first reading of a text.

    "Stainless-steel mug"  ->  stainless - steel mu ##g  ->  412 5 377 61 23

Sources: Sennrich et al. 2016 (merges, by which the vocabulary is learned), Wu et al. 2016 and BERT's basic tokenizer
(greedy reading; `##` marks a piece inside a word).
"""

from __future__ import annotations

import heapq
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

PADDING_ID, UNKNOWN_ID = 0, 1
SPECIAL_PIECES = ("[PAD]", "[UNK]")

_WORD = re.compile(r"[^\W_]+|[^\s]")
_LONGEST_WORD = 100
_MOST_LEARNED_WORDS = 20_000


class WordPieces:
    """Reads texts as sequences of piece numbers.

    Attributes:
        pieces: the vocabulary; a piece's number is its position, padding first.
    """

    def __init__(self, pieces: Sequence[str]) -> None:
        """Prepare to read with a vocabulary that begins with `SPECIAL_PIECES`."""
        self.pieces = tuple(pieces)
        self._ids = {piece: number for number, piece in enumerate(self.pieces)}

    def __len__(self) -> int:
        """Return the size of the vocabulary."""
        return len(self.pieces)

    def encode(self, text: str, *, limit: int) -> list[int]:
        """Return the piece numbers of a text, 1 to `limit` of them; a text without a readable word is one unknown."""
        ids: list[int] = []
        for word in split_words(text):
            ids.extend(self._match(word))
            if len(ids) >= limit:
                break
        return ids[:limit] or [UNKNOWN_ID]

    def _match(self, word: str) -> list[int]:
        """Return the longest known piece at each position; one unknown where no piece fits."""
        if len(word) > _LONGEST_WORD:
            return [UNKNOWN_ID]
        found: list[int] = []
        start = 0
        while start < len(word):
            end = len(word)
            while end > start:
                number = self._ids.get(word[start:end] if start == 0 else "##" + word[start:end])
                if number is not None:
                    break
                end -= 1
            else:
                return [UNKNOWN_ID]
            found.append(number)
            start = end
        return found


def split_words(text: str) -> Iterator[str]:
    """Yield the runs of letters and digits in lower case without accents, and every other mark by itself."""
    plain = "".join(mark for mark in unicodedata.normalize("NFKD", text.lower()) if not unicodedata.combining(mark))
    for found in _WORD.finditer(plain):
        yield found.group()


def learn_vocabulary(texts: Iterable[str], *, size: int) -> tuple[str, ...]:
    """Return at most `size` pieces: the special ones, single marks, and what the most frequent merges give.

    The same texts give the same pieces: ties are broken by the alphabet.
    """
    counts = Counter(word for text in texts for word in split_words(text) if len(word) <= _LONGEST_WORD)
    common = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:_MOST_LEARNED_WORDS]
    words = [[word[0], *("##" + mark for mark in word[1:])] for word, _ in common]
    marks = Counter(piece for word in words for piece in word)
    pieces = dict.fromkeys((*SPECIAL_PIECES, *sorted(marks, key=lambda piece: (-marks[piece], piece))))
    for piece in _merge_pairs(words, [count for _, count in common]):
        if len(pieces) >= size:
            break
        pieces[piece] = None
    return tuple(pieces)[:size]


def _merge_pairs(words: list[list[str]], counts: list[int]) -> Iterator[str]:
    """Yield the piece that each merge of the most frequent neighbours makes; `words` are merged in place."""
    frequency: Counter[tuple[str, str]] = Counter()
    places: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    for number, word in enumerate(words):
        for pair in pairwise(word):
            frequency[pair] += counts[number]
            places[pair].add(number)
    queue = [(-count, pair) for pair, count in frequency.items()]
    heapq.heapify(queue)
    while queue:
        count, pair = heapq.heappop(queue)
        if -count != frequency[pair]:
            continue  # an outdated entry: the pair's new frequency has one of its own
        merged = pair[0] + pair[1].removeprefix("##")
        changed: Counter[tuple[str, str]] = Counter()
        for number in places.pop(pair):
            before, words[number] = words[number], _merge(words[number], pair, merged)
            changed.subtract({one: times * counts[number] for one, times in Counter(pairwise(before)).items()})
            for one in pairwise(words[number]):
                changed[one] += counts[number]
                places[one].add(number)
        for one, difference in changed.items():
            frequency[one] += difference
            if difference and frequency[one] > 0:
                heapq.heappush(queue, (-frequency[one], one))
        frequency[pair] = 0
        yield merged


def _merge(word: list[str], pair: tuple[str, str], merged: str) -> list[str]:
    result: list[str] = []
    for piece in word:
        if result and (result[-1], piece) == pair:
            result[-1] = merged
        else:
            result.append(piece)
    return result
