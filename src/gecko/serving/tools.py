"""Fields of a request by which an answer may call functions."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

from gecko.data.turns import Function, FunctionTool, Tool, read_functions
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
Functions = Annotated[list[Function], Json(read_functions, list[Tool | FunctionTool])]
