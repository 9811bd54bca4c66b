"""Raises an exception at a chosen point of the runtime, as Ctrl-C and an exhausted memory do.

The interpreter looks for signals after a call, at the start of a function and when a loop jumps back. Such a place in a
frame of ``ssdtrain_fx.runtime`` on this thread is a *point*. Points are counted from 0 in the order of execution, so
that a test can interrupt the same instruction again.
"""

from __future__ import annotations

import opcode
import sys
import types
from collections.abc import Callable
from typing import Any

_BEFORE_A_POINT = frozenset(
    number
    for name, number in opcode.opmap.items()
    if (name.startswith("CALL") or name == "RESUME" or "JUMP_BACKWARD" in name) and not name.endswith("NO_INTERRUPT")
)


class Interrupter:
    """``with Interrupter(17, KeyboardInterrupt): ...`` or, to count, ``with Interrupter() as points: ...``"""

    def __init__(self, at: int | None = None, act: Callable[[], object] = KeyboardInterrupt) -> None:
        """``act`` returns what is raised at the point ``at``, or does something else and returns None."""
        self.count = 0
        self.place = ""
        """Where the point was."""
        self._at = at
        self._act = act

    def __enter__(self) -> Interrupter:
        sys._getframe().f_trace_opcodes = True  # else `settrace` of Python 3.12 leaves out opcodes
        sys.settrace(self._enter_frame)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _enter_frame(self, frame: types.FrameType, event: str, argument: Any) -> Any:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith("ssdtrain_fx.runtime"):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        code = frame.f_code.co_code
        last = -1

        def trace(frame: types.FrameType, event: str, argument: Any) -> Any:
            nonlocal last
            if event == "opcode":
                is_point = last >= 0 and code[last] in _BEFORE_A_POINT
                last = frame.f_lasti
                if is_point:
                    self._reach(frame)
            return frame.f_trace  # this function; a reference to itself would be a cycle for each call

        return trace

    def _reach(self, frame: types.FrameType) -> None:
        self.count += 1
        if self.count - 1 != self._at:
            return
        self.place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        sys.settrace(None)
        raised = self._act()
        if isinstance(raised, BaseException):
            try:
                raise raised
            finally:
                del raised  # its traceback holds this frame
