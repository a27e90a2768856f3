"""Health of a job: which ranks are alive, which have failed and why. No tensor passes here, and torch is not imported.

monitor  the thread of a process that hears of failures and tells of them; detector (its protocols), membership, wake_pipe
links    kept-alive connections to peers; rendezvous (endpoints in the store), processes (of this host)
records  failure (the record of a failure), position (where a rank is in its step), decoding (JSON of known form)
"""

from __future__ import annotations

from penstock.health.failure import FailureRecord

__all__ = ["FailureRecord"]
