"""Who may come in, and who next, when there are more requests than room: each tenant gets its share. No I/O."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

Ticket = int


@dataclass
class Gate:
    """At most `room` requests are in at once and `waiting` before it. A tenant that floods waits behind itself: the next one
    in is of the tenant with the fewest in, and when the waiting room is full, the tenant with the most there loses its last
    one. Not thread-safe."""

    waiting: int
    room: int = 0
    _inside: dict[str, int] = field(default_factory=dict)
    _total: int = 0
    _queues: OrderedDict[str, deque[Ticket]] = field(default_factory=OrderedDict)
    """In the order in which tenants were served last."""
    _queued: dict[Ticket, str] = field(default_factory=dict)
    _next: int = 0

    @property
    def inside(self) -> int:
        return self._total

    @property
    def queued(self) -> int:
        return len(self._queued)

    def refuses(self, tenant: str) -> bool:
        """Would `ask` turn it away at once?"""
        if len(self._queued) < self.waiting or (self._total < self.room and not self._queued):
            return False
        return len(self._queues.get(tenant, ())) + 1 >= max(map(len, self._queues.values()), default=0)

    def ask(self, tenant: str) -> tuple[Ticket | None, Ticket | None]:
        """The ticket that it waits with, None when it is in at once; and a ticket that is turned away for it, which may be its
        own."""
        if self._total < self.room and not self._queued:
            self._enter(tenant)
            return None, None
        self._next += 1
        ticket = self._next
        self._queues.setdefault(tenant, deque()).append(ticket)
        self._queued[ticket] = tenant
        if len(self._queued) <= self.waiting:
            return ticket, None
        most = max(reversed(self._queues), key=lambda each: len(self._queues[each]))
        if len(self._queues[most]) == len(self._queues[tenant]):
            most = tenant
        victim = self._queues[most][-1]
        self.forget(victim)
        return ticket, victim

    def forget(self, ticket: Ticket) -> None:
        """It waits no longer. One that is in by now, or was turned away, is ignored."""
        tenant = self._queued.pop(ticket, None)
        if tenant is not None:
            self._queues[tenant].remove(ticket)
            if not self._queues[tenant]:
                del self._queues[tenant]

    def leave(self, tenant: str) -> None:
        self._total -= 1
        self._inside[tenant] -= 1
        if not self._inside[tenant]:
            del self._inside[tenant]

    def admit(self) -> list[Ticket]:
        """Those who are in now, as far as there is room."""
        admitted = []
        while self._queued and self._total < self.room:
            tenant = min(self._queues, key=lambda each: self._inside.get(each, 0))
            ticket = self._queues[tenant].popleft()
            del self._queued[ticket]
            if self._queues[tenant]:
                self._queues.move_to_end(tenant)
            else:
                del self._queues[tenant]
            self._enter(tenant)
            admitted.append(ticket)
        return admitted

    def validate(self) -> None:
        """For tests."""
        assert self._total == sum(self._inside.values())
        assert all(self._inside.values())
        assert len(self._queued) <= self.waiting
        assert all(self._queues.values())
        assert sorted(self._queued) == sorted(ticket for queue in self._queues.values() for ticket in queue)

    def _enter(self, tenant: str) -> None:
        self._total += 1
        self._inside[tenant] = self._inside.get(tenant, 0) + 1
