"""Page allocation of the KV cache: reference counts, prefix sharing and reuse.

A page holds the keys and values of PAGE consecutive tokens. A full page is found by its tokens and
the page before it, so that requests with the same prefix share it. Pages without users stay cached
until no free page is left; the least recently used are evicted first. Pages are never shared
between adapters or versions of the weights (`forget_prefixes`).
"""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import count

# Number of the chain so far, and the tokens of the next page.
Key = tuple[int, tuple[int, ...]]


class PagePool:
    """Pool of pages with reference counts.

    Requests use pages 1 to `pages` - 1. Page 0 is for writes that are never read. `size` is the
    number of tokens per page.
    """

    def __init__(self, pages: int, size: int) -> None:
        self.size = size
        self.pages = pages
        self._chains = count(1)
        self.clear_pages()

    def clear_pages(self) -> None:
        """Free all pages and forget all prefixes."""
        self.free = list(range(self.pages - 1, 0, -1))
        self.users = [0] * self.pages
        # Its page, and the number of the chain that ends in it.
        self._known: dict[Key, tuple[int, int]] = {}
        self._key_of: dict[int, Key] = {}
        # Cached pages without users, least recently used first.
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def available_count(self) -> int:
        """Return the number of pages that can be taken."""
        return len(self.free) + len(self._idle)

    def pages_needed(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def match_prefix(self, ids: Sequence[int], adapter: int = 0) -> list[int]:
        """Return the cached pages that hold a prefix of `ids`.

        They never include the last token of `ids`, since its logits have to be computed.
        """
        pages: list[int] = []
        chain = -adapter
        for start in range(0, len(ids) - self.size, self.size):
            found = self._known.get((chain, tuple(ids[start : start + self.size])))
            if found is None:
                break
            page, chain = found
            pages.append(page)
        return pages

    def find_chain(self, ids: Sequence[int], adapter: int = 0) -> int | None:
        """Return the number of the chain of cached pages with these tokens, whole pages; None: none.

        The pages may be another sequence's.
        """
        chain = -adapter
        for start in range(0, len(ids), self.size):
            found = self._known.get((chain, tuple(ids[start : start + self.size])))
            if found is None:
                return None
            chain = found[1]
        return chain

    def chain_of(self, page: int) -> int | None:
        """Return the number of the chain that ends in a cached page; None if it is not cached.

        Another chain never has this number.
        """
        key = self._key_of.get(page)
        return None if key is None else self._known[key][1]

    def idle_among(self, pages: list[int]) -> int:
        """Return how many of these pages have no users; sharing them lowers `available_count`."""
        return sum(page in self._idle for page in pages)

    def take_pages(self, number: int) -> list[int]:
        """Take `number` available pages, with one user each."""
        pages = []
        for _ in range(number):
            if not self.free:
                oldest, _ = self._idle.popitem(last=False)
                del self._known[self._key_of.pop(oldest)]
                self.free.append(oldest)
            page = self.free.pop()
            self.users[page] = 1
            pages.append(page)
        return pages

    def share_pages(self, pages: list[int]) -> None:
        for page in pages:
            self.users[page] += 1
            self._idle.pop(page, None)

    def release_pages(self, pages: list[int]) -> None:
        for page in reversed(pages):  # the end of a chain is evicted before its start
            self.users[page] -= 1
            if self.users[page] == 0:
                if page in self._key_of:
                    self._idle[page] = None
                else:
                    self.free.append(page)

    def remember_pages(self, ids: Sequence[int], pages: list[int], adapter: int = 0) -> None:
        """Register the full pages of these tokens for prefix sharing."""
        chain = -adapter
        for page, start in zip(pages, range(0, len(ids) - self.size + 1, self.size), strict=False):
            key = (chain, tuple(ids[start : start + self.size]))
            if key not in self._known:
                # reused for other tokens: a chain that was evicted meanwhile
                if page in self._key_of:
                    return
                self._known[key] = (page, next(self._chains))
                self._key_of[page] = key
            chain = self._known[key][1]

    def forget_prefixes(self) -> None:
        """Forget all prefixes; pages in use stay with their users."""
        self.free += reversed(self._idle)
        self._known.clear()
        self._key_of.clear()
        self._idle.clear()
