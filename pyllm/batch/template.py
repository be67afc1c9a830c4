"""--template: a text with {field} where a field of an entry goes in; {{ and }} are braces."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pyllm.batch.errors import LineError
from pyllm.errors import UsageError

_PART = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


class PromptTemplate:
    """A template that was found well-formed.

    Attributes:
        fields: the names that it asks for.

    Raises:
        UsageError: a brace without its partner, or a field without a name.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.fields: set[str] = set()
        for match in _PART.finditer(text):
            if match[0] in "{}" or (match[1] is not None and not match[1].strip()):
                raise UsageError(
                    f"--template has a {match[0]} at position {match.start()} that names no field; "
                    "{text} stands for a field, {{ and }} for braces"
                )
            if match[1] is not None:
                self.fields.add(match[1])

    def fill(self, values: Mapping[str, Any]) -> str:
        """The prompt. Values go in as they are: braces in them mean nothing.

        Raises:
            LineError: a field is missing, or is neither text nor number.
        """

        def part(match: re.Match[str]) -> str:
            if match[1] is None:
                return match[0][0]
            value = values.get(match[1])
            if isinstance(value, bool) or not isinstance(value, str | int | float):
                known = ", ".join(name for name in values if isinstance(name, str)) or "none"
                raise LineError("missing_field", f"--template asks for {match[1]}; the fields here are {known}")
            return str(value)

        return _PART.sub(part, self.text)
