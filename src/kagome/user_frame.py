"""Caller: the line of a user's code that made a torch call.

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
    """The innermost line outside of Kagome, torch and PyG, as ``file.py, line 12``; empty if none.

    Of a call that is a step of a pipeline it is the line of the forward that made it.
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
    """The innermost line outside of Kagome, torch and PyG that an error passed, as ``file.py, line 12``."""
    found, trace = "", error.__traceback__
    while trace is not None:
        if _library(trace.tb_frame) not in _LIBRARIES:
            found = f"{Path(trace.tb_frame.f_code.co_filename).name}, line {trace.tb_lineno}"
        trace = trace.tb_next
    return found


def from_library() -> bool:
    """Whether PyG's code, and not the user's, made the call that is being answered."""
    frame = _frame(("kagome", "torch", "threading", "contextlib"))
    return frame is not None and _library(frame) == "torch_geometric"


def by_user_itself() -> bool:
    """Whether the user's own code, and no library's for it, made the call that is being answered."""
    frame = _frame(("kagome", "threading", "contextlib"))
    return frame is not None and _library(frame) not in ("torch", "torch_geometric")


def by_kagome() -> bool:
    """Whether Kagome's own code, and neither PyG's nor the user's, made the call that is being answered."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "__torch_function__":
        frame = frame.f_back
    while frame is not None and (  # one mode may have been given the call by another
        frame.f_code.co_name == "__torch_function__" or _library(frame) in ("torch", "contextlib")
    ):
        frame = frame.f_back
    if frame is None or _library(frame) != "kagome":
        return False
    # A step calls what the user called, or what stands in for a builtin.
    return not _line_of_step(frame) and not (frame.f_back is not None and _line_of_step(frame.f_back))


def by_user() -> bool:
    """Whether the user's code, or torch's for it, computes with a number of ours: not PyG's nor Kagome's own.

    Modules whose functions are such numbers' methods say so: ``__answers__ = True``.
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
    """Where a step stands in a forward, if the frame calls one: its module has ``__steps__``."""
    if frame.f_code.co_name != "call" or not frame.f_globals.get("__steps__", False):
        return ""
    return str(frame.f_locals["self"].line)


def _library(frame: FrameType) -> str:
    return _package(frame.f_globals.get("__name__", ""))


@cache  # each torch call of a forward asks it of several frames
def _package(module: str) -> str:
    return str(module).partition(".")[0]
