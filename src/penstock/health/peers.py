"""The processes to which a monitor has links: dialled, welcomed, and dialled again once before they count as gone."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from errno import EHOSTUNREACH, ENETUNREACH, ETIMEDOUT
from typing import Protocol

from penstock.health.failure import FailureKind
from penstock.health.links import Endpoint, FrameKind, HealthLink, Listener, dial
from penstock.health.processes import has_ended

_ENDED = "its process has ended"
_NO_ANSWER = (ETIMEDOUT, EHOSTUNREACH, ENETUNREACH)


class Peer:
    """Another process, with the groups that it shares with this one."""

    def __init__(self, token: str) -> None:
        self.token = token
        self.endpoint: Endpoint | None = None
        self.links: list[HealthLink] = []  # two if both have dialled
        self.ranks: dict[str, int] = {}  # by group
        self.states: dict[str, tuple[int, int, str]] = {}  # by group: steps done, number and name of the collective
        self.stopped: float | None = None  # since when its process has been stopped

    def send(self, kind: FrameKind, payload: bytes) -> None:
        for link in self.links[:1]:
            link.send(kind, payload)


class Owner(Protocol):
    """What the links ask of their monitor."""

    def joined(self, group: str) -> bytes:
        """The payload of a JOIN."""

    def send_known(self, link: HealthLink, group: str) -> None:
        """Send the failures of a group that were flooded before there was this link."""

    def shared(self, peer: Peer) -> list[str]:
        """The groups that are shared with a process now."""

    def lost_peer(self, peer: Peer, kind: FailureKind, cause: str) -> None: ...

    def wake(self) -> None: ...


class Peers:
    """All of one monitor, by token. ``lock`` is that of the monitor: it is held while anything here changes."""

    def __init__(self, owner: Owner, listener: Listener, lock: threading.RLock) -> None:
        self._owner, self._listener = owner, listener
        self._lock: threading.RLock = lock
        self._by_token: dict[str, Peer] = {}
        self._strangers: list[HealthLink] = []
        self.selector = selectors.DefaultSelector()
        self.selector.register(listener.socket, selectors.EVENT_READ)

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._by_token.values()))

    def get(self, token: str) -> Peer:
        return self._by_token.setdefault(token, Peer(token))

    def flood(self, kind: FrameKind, payload: bytes, origin: HealthLink | None = None) -> None:
        """Send to all but the one that it came from."""
        for peer in self:
            if origin not in peer.links:
                peer.send(kind, payload)

    def flush(self) -> bool:
        """Send what links have kept; True when nothing is left."""
        done = True
        for peer in self:
            for link in peer.links:
                done &= link.flush()
        return done

    # -- making links

    def reach(self, endpoint: Endpoint, group: str, rank: int) -> None:
        """Have a link to a process, and tell it of the group."""
        with self._lock:
            peer = self.get(endpoint.token)
            peer.endpoint = endpoint
            peer.ranks[group] = rank
            if peer.links:
                peer.send(FrameKind.JOIN, self._owner.joined(group))
                return
        try:
            self._connect(peer)
        except OSError:
            if has_ended(endpoint.host, endpoint.process, endpoint.started):
                self._owner.lost_peer(peer, FailureKind.ENDED, _ENDED)

    def _connect(self, peer: Peer) -> None:
        if peer.endpoint is None:
            raise ConnectionRefusedError("it has never said where it listens")
        link = dial(peer.endpoint, self._listener.endpoint, heartbeat=self._listener.heartbeat)
        with self._lock:
            for group in self._owner.shared(peer):
                link.send(FrameKind.JOIN, self._owner.joined(group))
                self._owner.send_known(link, group)
            peer.links.append(link)
            self._by_token[peer.token] = peer
            self._watch(link)
        self._owner.wake()

    def accept(self) -> None:
        for link in self._listener.accept():
            self._strangers.append(link)
            self._watch(link)

    def welcome(self, link: HealthLink, hello: bytes) -> None:
        if link.token or not self._listener.welcome(link, hello):
            raise ValueError("a HELLO that is not signed")
        self._strangers.remove(link)
        self.get(link.token).links.append(link)

    # -- ending links

    def ended(self, link: HealthLink, error: Exception) -> None:
        """A link has ended: unless its process has left all groups, it is dialled once before it counts as gone."""
        with self._lock:
            self._close(link)
            peer = self._by_token.get(link.token)
            if link in self._strangers:
                self._strangers.remove(link)
            if peer is None or link not in peer.links:
                return
            peer.links.remove(link)
            if peer.links:
                return
            if not self._owner.shared(peer):
                del self._by_token[peer.token]
                return
        if isinstance(error, OSError) and error.errno in _NO_ANSWER:
            self._owner.lost_peer(peer, FailureKind.UNREACHABLE, f"its host is out of reach: {error}")
        else:
            threading.Thread(target=self._redial, args=(peer,), name="penstock redial", daemon=True).start()

    def _redial(self, peer: Peer) -> None:
        try:
            self._connect(peer)
        except OSError:
            if not peer.links:  # else it has dialled meanwhile
                self._owner.lost_peer(peer, FailureKind.ENDED, _ENDED)

    def part(self) -> None:
        """End the links to processes with which no group is shared any more."""
        for peer in self:
            if not self._owner.shared(peer):
                for link in peer.links:
                    link.flush()
                    with suppress(OSError):
                        link.socket.shutdown(socket.SHUT_WR)  # it is closed when the other end has read everything
                del self._by_token[peer.token]  # whoever shares a group with it later makes another link

    def end_strangers(self) -> None:
        for link in self._listener.tired_of(self._strangers):
            self._strangers.remove(link)
            self._close(link)

    def _watch(self, link: HealthLink) -> None:
        self.selector.register(link.socket, selectors.EVENT_READ, link)

    def _close(self, link: HealthLink) -> None:
        with suppress(ValueError, KeyError):
            self.selector.unregister(link.socket)
        link.close()

    def abandon(self) -> None:
        """Close this process's copies of all descriptors; another process that has one keeps the links open."""
        for link in self._strangers:
            link.socket.close()
        for peer in self:
            for link in peer.links:
                link.socket.close()
        self._listener.socket.close()
        self.selector.close()
        self._by_token, self._strangers = {}, []
