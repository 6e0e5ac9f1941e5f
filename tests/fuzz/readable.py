"""Dataclasses whose repr is the code that makes them, without what is as by default."""

from dataclasses import MISSING, Field, fields
from typing import Any


class Readable:
    """Base of frozen dataclasses with `repr=False`."""

    def __repr__(self) -> str:
        given = []
        for number, field in enumerate(fields(self)):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            required = field.default is MISSING and field.default_factory is MISSING
            if required and number == len(given):
                given.append(repr(value))
            elif required or value != default_of(field):
                given.append(f"{field.name}={value!r}")
        return f"{type(self).__name__}({', '.join(given)})"


def default_of(field: "Field[Any]") -> Any:
    """MISSING where the field is required."""
    return field.default if field.default_factory is MISSING else field.default_factory()
