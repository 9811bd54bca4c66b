"""The engines of one process: opened on first use, found by the handle in a token, closed together.

A compiled graph may come from a cache, in a process where the backend has never run. It contains only the
configuration, as a string argument, and in backward the token.

Guarantees:

* Equal configurations share one engine. Handles are never reused in a process.
* An engine that has failed (see :mod:`ssdtrain_fx.runtime.book.changes`) serves no new tensor: the next offload opens
  another one, and the failed one is closed in the background. Its tokens raise ActivationLostError.
* No interrupt leaves an engine that is open and not listed here. An engine is listed until it was closed completely,
  so :meth:`Engines.close` may be called again after an interrupt or an error.
* A signal handler may call :meth:`Engines.statistics`, :meth:`Engines.release_idle` and :meth:`Engines.close` at any
  moment. The last one does not wait if it has interrupted an op, because the op may hold what closing needs: the engine
  is closed in the background, and the op raises.
* A forked child uses none of its parent's engines: it does not close them, does not hold their files, and opens its own
  engines on first use. A token or a ticket of the parent raises ActivationLostError there.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import sys
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch import Tensor

from ssdtrain_fx.errors import ActivationLostError, ConfigError, InternalError
from ssdtrain_fx.runtime.config import EngineConfig
from ssdtrain_fx.runtime.engine import Engine
from ssdtrain_fx.runtime.handles.tokens import Owner, handle_of
from ssdtrain_fx.runtime.lanes.call_sites import CallSite
from ssdtrain_fx.runtime.shield import in_background, shielded
from ssdtrain_fx.runtime.sites import Site
from ssdtrain_fx.runtime.statistics import Statistics
from ssdtrain_fx.runtime.trace import Trace

log = logging.getLogger(__name__)

_OP_MODULES = tuple(f"ssdtrain_fx.runtime.{name}" for name in ("ops", "engine", "handles", "lanes", "policy", "shield"))
"""One of these has a frame on the stack whenever an op is executing."""


def _open_engine(config: EngineConfig, handles: Iterator[int]) -> Engine:
    return Engine(config, handles=handles)


class Offloading(NamedTuple):
    """A call site, and the engine that serves it."""

    engine: Engine
    call_site: CallSite


class Engines:
    """A registry of open engines, keyed by configuration."""

    def __init__(self, open_engine: Callable[[EngineConfig, Iterator[int]], Engine] = _open_engine) -> None:
        self._open_engine = open_engine
        self._lock = threading.RLock()
        self._by_argument: dict[str, Engine] = {}
        self.offloadings: dict[str, Offloading] = {}
        """By site: what :meth:`at` has returned. Read it first; another call costs more with cold caches."""
        self._by_config: dict[EngineConfig, Engine] = {}
        self._retired: list[Engine] = []
        """Engines that serve no op any more and were not closed completely."""
        self._handles = itertools.count(1)
        self._forked_at = 0
        self._closed_at = 0
        self._failed_at = 0
        self._failure = ""
        self._inherited: list[Engine] = []
        self._trace: Trace | None = None

    def open(self, argument: str) -> Engine:
        """The engine for ``EngineConfig.from_argument(argument)``."""
        engine = self._by_argument.get(argument)
        if engine is not None and not engine.has_failed:
            return engine
        return shielded(functools.partial(self._open, argument))

    def _open(self, argument: str) -> Engine:
        config = EngineConfig.from_argument(argument)
        with self._lock:
            engine = self._by_config.get(config)
            if engine is not None and engine.has_failed:
                self._retired.append(engine)
                del self._by_config[config]
                self._by_argument = {}
                self.offloadings = {}
                self._failed_at, self._failure = next(self._handles), engine.failure
                in_background(functools.partial(self._close_retired, math.inf))
                engine = None
            if engine is None:
                engine = self._by_config[config] = self._open_engine(config, self._handles)
                engine.trace = self._trace
            self._by_argument[argument] = engine
        return engine

    def at(self, argument: str) -> Offloading:
        """The engine for ``Site.from_argument(argument)``, and what the call site has learned with it."""
        site = Site.from_argument(argument)
        engine = self.open(site.engine)
        with self._lock:
            found = self.offloadings.get(argument)
            if found is None or found.engine is not engine:
                found = Offloading(engine, CallSite(site))
                if self._by_argument.get(site.engine) is engine:  # it has not been closed meanwhile
                    self.offloadings[argument] = found
        return found

    def owner_of(self, token: Tensor) -> Owner:
        """The owner that ``token`` holds a share of."""
        handle = handle_of(token)
        for engine in tuple(self._by_config.values()):
            owner = engine.find_owner(handle)
            if owner is not None:
                return owner
        if 0 < handle < self._forked_at:
            raise ActivationLostError(
                f"the token with handle {handle} was made before this process was forked. Its saved tensor is in the "
                "parent process: run backward in the process that ran forward."
            )
        if 0 < handle < self._failed_at:
            raise ActivationLostError(
                f"the token with handle {handle} belongs to an engine that was given up after {self._failure}. Run the "
                "step again from its forward."
            )
        if 0 < handle < self._closed_at:
            raise ActivationLostError(
                f"the token with handle {handle} belongs to an engine that was closed. "
                "Close engines only after the last backward."
            )
        if 0 < handle < next(self._handles):
            raise ActivationLostError(
                f"the token with handle {handle} is a copy, and its original has been dropped, together with the saved "
                "tensor that it stood for. A saved-tensor hook made it, such as "
                "torch.autograd.graph.save_on_cpu(pin_memory=True), or other code that copies what autograd saves. Run "
                "compiled steps without it, or let it keep the tensor that it gets."
            )
        raise InternalError(f"a token holds handle {handle}, which no engine issued: its memory was overwritten")

    def statistics(self) -> Statistics:
        """All engines taken together."""
        return sum((engine.statistics() for engine in tuple(self._by_config.values())), start=Statistics())

    def release_idle(self) -> None:
        """Return the memory to the system that engines keep for reloads and that is unused."""
        for engine in tuple(self._by_config.values()):
            engine.release_idle()

    def start_trace(self, trace: Trace) -> None:
        """Record what all engines do, including engines opened later. Raises ConfigError during another trace."""
        with self._lock:
            if self._trace is not None:
                raise ConfigError("trace: another trace is being recorded already. Leave its `with` block first.")
            self._set_trace(trace)

    def stop_trace(self) -> None:
        with self._lock:
            self._set_trace(None)

    def _set_trace(self, trace: Trace | None) -> None:
        self._trace = trace
        for engine in self._by_config.values():
            engine.trace = trace

    def close(self, *, timeout_s: float = math.inf) -> None:
        """Close every engine as :meth:`Engine.close` does. The next offload opens a new one.

        If closing one raises, the others are closed, and the first error is raised. Whatever was not closed is closed
        by the next call. In a signal handler that has interrupted an op, it returns at once.
        """
        close = functools.partial(self._close, timeout_s)
        if _has_interrupted_an_op():
            in_background(close)
        else:
            shielded(close)

    def _close(self, timeout_s: float) -> None:
        with self._lock:
            self._retired += self._by_config.values()
            self._by_argument = {}
            self.offloadings = {}
            self._by_config = {}
            self._closed_at = next(self._handles)
        self._close_retired(timeout_s)

    def _close_retired(self, timeout_s: float) -> None:
        first_error: BaseException | None = None
        for engine in tuple(self._retired):
            try:
                engine.close(timeout_s=timeout_s)
            except BaseException as error:  # nobody else will close the others
                if first_error is None:
                    first_error = error
                else:
                    log.error("another engine could not be closed either", exc_info=error)
        with self._lock:
            self._retired = [engine for engine in self._retired if not engine.is_gone]
        if first_error is not None:
            raise first_error

    def forget_after_fork(self) -> None:
        """In a forked child: leave the parent's engines alone, in whatever state they were at the fork."""
        self._lock = threading.RLock()
        for engine in (*self._by_config.values(), *self._retired):
            engine.forget_after_fork()  # a reloading that has not been waited for leads to it
            self._inherited.append(engine)  # never destroyed, so none of their code runs here
        self._by_argument = {}
        self.offloadings = {}
        self._by_config = {}
        self._retired = []
        self._trace = None
        self._forked_at = next(self._handles)


def _has_interrupted_an_op() -> bool:
    """Whether the caller of :meth:`Engines.close` runs on top of an op of its own thread: as a signal handler or as a
    finaliser. The op may hold any lock of an engine, so closing must not be waited for."""
    frame = sys._getframe(1).f_back
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(_OP_MODULES) and frame.f_code.co_name != "close":
            return True
        frame = frame.f_back
    return False
