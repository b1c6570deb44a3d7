"""Fields of a request by which an answer may call functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

from gecko.data.turns import Function, check_functions
from gecko.records import FieldError
from gecko.serving.fields import Json

_MODES = ("none", "auto", "required")


class ToolChoice(NamedTuple):
    """``tool_choice`` of a request."""

    mode: Literal["none", "auto", "required"] = "auto"
    name: str | None = None
    """The function that must be called; None: any of them."""

    @property
    def shown(self) -> str | dict[str, str]:
        """The choice in the form of ``/v1/responses``."""
        return self.mode if self.name is None else {"type": "function", "name": self.name}


def _tool_choice(value: Any, name: str, texts: bool) -> ToolChoice:
    if value in _MODES:
        return ToolChoice(value)
    named = value.get("function", value) if isinstance(value, dict) and value.get("type") == "function" else None
    if not isinstance(named, dict) or not isinstance(named.get("name"), str):
        rule = 'none, auto, required, or {"type": "function", "function": {"name": …}}'
        raise FieldError(f"{name} must be {rule}; other choices are not supported", name)
    return ToolChoice("required", named["name"])


Choice = Annotated[ToolChoice, Json(_tool_choice, str | dict[str, Any])]


def check_choice(functions: Sequence[Function], choice: ToolChoice | None, constraint: str | None) -> None:
    """Check what a request says about functions.

    Args:
        constraint: field that constrains the text of the answer.

    Raises:
        FieldError: a function has a wrong name or size, is missing, or cannot be called beside the constraint.
    """
    check_functions(functions, "tools")
    if choice is not None and choice.mode == "required" and not functions:
        raise FieldError("tool_choice must be none or auto without tools", "tool_choice")
    names = [function.name for function in functions]
    if choice is not None and choice.name is not None and choice.name not in names:
        listed = ", ".join(names[:20])
        raise FieldError(f"tool_choice must name one of the tools {listed}; got {choice.name[:100]!r}", "tool_choice")
    if constraint is not None and functions and (choice is None or choice.mode == "auto"):
        rule = "must be left out beside tools unless tool_choice is none or required: a call does not match it"
        raise FieldError(f"{constraint} {rule}", constraint)
