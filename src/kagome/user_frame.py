"""User frame: the line of a user's code that made a torch call.

Where it sits: errors name it, so that a refusal points into the user's forward and not only at a module.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Final

_LIBRARIES: Final = ("kagome", "torch", "torch_geometric", "threading", "contextlib")


def user_line() -> str:
    """Return the innermost line outside Kagome, torch and PyG, as ``file.py, line 12``; empty if none.

    For a call that is a step of a pipeline it is the line of the forward that recorded the step.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _library(frame) in _LIBRARIES:
        line = _line_of_step(frame)
        if line:
            file, _, number = line.rpartition(":")
            return f"{Path(file).name}, line {number}"
        frame = frame.f_back
    if frame is None:
        return ""
    return f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}, in {frame.f_code.co_name}"


def raised_at(error: BaseException) -> str:
    """Return the innermost line of an error outside Kagome, torch and PyG, as ``file.py, line 12``."""
    found, trace = "", error.__traceback__
    while trace is not None:
        if _library(trace.tb_frame) not in _LIBRARIES:
            found = f"{Path(trace.tb_frame.f_code.co_filename).name}, line {trace.tb_lineno}"
        trace = trace.tb_next
    return found


def from_library() -> bool:
    """Return whether PyG's code, and not the user's, made the call being handled."""
    frame = _frame(("kagome", "torch", "threading", "contextlib"))
    return frame is not None and _library(frame) == "torch_geometric"


def by_user_itself() -> bool:
    """Return whether the user's own code, and no library on its behalf, made the call being handled."""
    frame = _frame(("kagome", "threading", "contextlib"))
    return frame is not None and _library(frame) not in ("torch", "torch_geometric")


def by_kagome() -> bool:
    """Return whether Kagome's own code, and neither PyG's nor the user's, made the call being handled."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "__torch_function__":
        frame = frame.f_back
    while frame is not None and (  # one torch function mode may pass the call on to another
        frame.f_code.co_name == "__torch_function__" or _library(frame) in ("torch", "contextlib")
    ):
        frame = frame.f_back
    if frame is None or _library(frame) != "kagome":
        return False
    # A step calls what the user called, or the replacement of a builtin.
    return not _line_of_step(frame) and not (frame.f_back is not None and _line_of_step(frame.f_back))


def by_user() -> bool:
    """Return whether the user's code, or torch on its behalf, computes with one of Kagome's number objects.

    Calls by PyG and by Kagome itself do not count. Modules whose functions are methods of such objects are
    marked by ``__answers__ = True``.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (
        frame.f_globals.get("__answers__", False) or _library(frame) in ("torch", "contextlib")
    ):
        frame = frame.f_back
    return frame is not None and _library(frame) not in ("kagome", "torch_geometric")


def _frame(skip: tuple[str, ...]) -> FrameType | None:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and _library(frame) in skip:
        frame = frame.f_back
    return frame


def _line_of_step(frame: FrameType) -> str:
    """Return the line of the forward that a step was recorded from, if the frame runs a step, else ``""``.

    Modules that run steps are marked by ``__steps__``.
    """
    if frame.f_code.co_name != "call" or not frame.f_globals.get("__steps__", False):
        return ""
    return str(frame.f_locals["self"].line)


def _library(frame: FrameType) -> str:
    return _package(frame.f_globals.get("__name__", ""))


@cache  # every torch call of a forward asks this for several frames
def _package(module: str) -> str:
    return str(module).partition(".")[0]
