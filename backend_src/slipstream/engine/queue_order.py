"""Who is next: the waiting requests of the continuous scheduler, in one of three orders.

`fcfs` serves first come first; `priority` lets the more urgent ahead, also into seats and blocks that less urgent ones
hold; `fair` gives each tenant its weight's share of the computed tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from operator import attrgetter

from slipstream.engine.request import Request

_BY_RANK = attrgetter("rank")
# Tenants that are remembered; beyond it those are forgotten to whom it makes no difference.
_MOST_TENANTS = 4096


class QueueOrder(ABC):
    """The waiting requests. A preempted one comes back to the place that it had, ahead of all that came after it."""

    def __init__(self) -> None:
        self._numbers = count()

    @abstractmethod
    def __iter__(self) -> Iterator[Request]:
        """In the order in which they would be served."""

    @abstractmethod
    def __len__(self) -> int: ...

    def __contains__(self, request: object) -> bool:
        return any(request is waiting for waiting in self)

    @abstractmethod
    def push(self, request: Request) -> None:
        """Take in a request that has just come, or one that was preempted."""

    @abstractmethod
    def remove(self, request: Request) -> None: ...

    def charge(self, request: Request, num_tokens: int) -> None:  # noqa: B027  most orders do not ask
        """Note that tokens of a request are computed; fewer than none where that is taken back."""

    def gives_way(self, running: Request, waiting: Request) -> bool:
        """Whether a running request is to lose its place to a waiting one."""
        return False

    def victim(self, running: Sequence[Request]) -> Request:
        """Whom to preempt; `running` is in order of admission. The oldest of the most urgent comes last."""
        return running[-1]

    def _place(self, request: Request) -> tuple[float, ...]:
        """A new request's rank, by which those that wait in one line are sorted."""
        return (0.0, next(self._numbers))

    def _line_up(self, line: list[Request], request: Request) -> None:
        if request.rank is None:
            first = request.first  # further choices of a prompt stand right behind it
            request.rank = self._place(request) if first is None else (*(first.rank or ()), request.choice)
        insort(line, request, key=_BY_RANK)

    def _take_out(self, line: list[Request], request: Request) -> None:
        place = bisect_left(line, request.rank, key=_BY_RANK)
        assert line[place] is request
        del line[place]


class Fcfs(QueueOrder):
    """First come, first served."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: list[Request] = []  # by rank

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting)

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, request: Request) -> None:
        self._line_up(self._waiting, request)

    def remove(self, request: Request) -> None:
        self._take_out(self._waiting, request)


class Priority(Fcfs):
    """The lowest number first, as in vLLM. A request gains one level for every `aging_seconds` that it is old.

    All grow older at the same pace, so the order of two requests never changes: it is that of
    `arrival time + priority * aging_seconds`.
    """

    def __init__(self, aging_seconds: float) -> None:
        super().__init__()
        self._aging_seconds = aging_seconds

    def gives_way(self, running: Request, waiting: Request) -> bool:
        """To a strictly more urgent one that it has not outgrown by its age."""
        assert running.rank is not None
        assert waiting.rank is not None
        return waiting.priority < running.priority and waiting.rank < running.rank

    def victim(self, running: Sequence[Request]) -> Request:
        """The least urgent; of several the newest."""
        return max(reversed(running), key=lambda request: request.priority)

    def _place(self, request: Request) -> tuple[float, ...]:
        return (request.arrival_time + request.priority * self._aging_seconds, next(self._numbers))


class Fair(QueueOrder):
    """The tenant that has got the fewest tokens for its weight first, and first come first served within a tenant.

    This is the virtual token counter of Sheng et al. (OSDI 2024): a tenant that comes to the queue starts no lower than
    the lowest there, so nobody saves up for later, and a new one is not behind a heavy one.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        super().__init__()
        self._weights = weights
        self._waiting: dict[str, list[Request]] = {}  # by tenant, each by rank
        self._counters: dict[str, float] = {}
        self._level = 0.0  # of the tenant that left the queue last

    def __iter__(self) -> Iterator[Request]:
        for tenant in sorted(self._waiting, key=self._counter_of):
            yield from self._waiting[tenant]

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def push(self, request: Request) -> None:
        tenant = request.tenant
        if tenant not in self._waiting:
            least = min(map(self._counter_of, self._waiting), default=self._level)
            self._counters[tenant] = max(self._counter_of(tenant), least)
            self._waiting[tenant] = []
            self._forget(least)
        self._line_up(self._waiting[tenant], request)

    def remove(self, request: Request) -> None:
        line = self._waiting[request.tenant]
        self._take_out(line, request)
        if not line:
            del self._waiting[request.tenant]
            self._level = self._counter_of(request.tenant)

    def charge(self, request: Request, num_tokens: int) -> None:
        tenant = request.tenant
        self._counters[tenant] = self._counter_of(tenant) + num_tokens / self._weights.get(tenant, 1.0)

    def _counter_of(self, tenant: str) -> float:
        return self._counters.get(tenant, 0.0)

    def _forget(self, least: float) -> None:
        if len(self._counters) > _MOST_TENANTS:
            self._counters = {
                tenant: counter
                for tenant, counter in self._counters.items()
                if counter > least or tenant in self._waiting
            }
