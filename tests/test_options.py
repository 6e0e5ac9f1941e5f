"""Options: one keyword, one field and one line of each constructor's docstring for every one of them."""

import inspect
import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any, get_type_hints

import pytest

from compiled_ddp import EagerDDP, compile_ddp
from compiled_ddp.options import CompilerKeywords, OptionKeywords, Options, part_options

OF_ADAPTERS = {"bucket_rule", "scaling", "follows_model"}
CONSTRUCTORS = {"compile_ddp": (compile_ddp, CompilerKeywords), "EagerDDP": (EagerDDP, OptionKeywords)}

both = pytest.mark.parametrize(("constructor", "keywords"), CONSTRUCTORS.values(), ids=CONSTRUCTORS)


def test_every_keyword_is_a_field_of_the_same_type() -> None:
    of_keywords, of_fields = get_type_hints(CompilerKeywords), get_type_hints(Options)
    assert of_fields.keys() - OF_ADAPTERS == of_keywords.keys()
    differing = {name for name, kind in of_keywords.items() if kind != of_fields[name]}
    assert differing == {"broadcast_buffers"}, "None is the default there"


@both
def test_signature_shows_every_option_with_its_default(
    constructor: Callable[..., Any], keywords: type[OptionKeywords]
) -> None:
    parameters = inspect.signature(constructor).parameters
    defaults = {field.name: field.default for field in fields(Options)}
    for name in get_type_hints(keywords):
        assert (parameters[name].kind, parameters[name].default) == (inspect.Parameter.KEYWORD_ONLY, defaults[name])
    others = set(defaults) - set(get_type_hints(keywords))
    assert not others & parameters.keys()


@both
def test_docstring_says_what_every_argument_does(
    constructor: Callable[..., Any], keywords: type[OptionKeywords]
) -> None:
    _, _, described_in = (inspect.getdoc(constructor) or "").partition("Args:\n")
    described = re.findall(r"^ {4}(\**\w+): ", described_in.partition("\nRaises:")[0], flags=re.MULTILINE)
    *arguments, rest = inspect.signature(constructor).parameters
    assert sorted(described) == sorted([*arguments, f"**{rest}"])


def test_what_is_no_option_of_a_constructor_is_left_for_who_knows_it() -> None:
    given = {"verify": "off", "backend": "aot_eager", "bucket_rule": None, "mixed_precision": None}
    left = {"bucket_rule": None, "mixed_precision": None}
    assert part_options(given, CompilerKeywords) == (Options(verify="off", backend="aot_eager"), left)
    assert part_options(given, OptionKeywords) == (Options(verify="off"), {**left, "backend": "aot_eager"})


def test_broadcast_buffers_none_is_the_default() -> None:
    assert part_options({"broadcast_buffers": None}, OptionKeywords) == (Options(), {})
    assert part_options({"broadcast_buffers": False}, OptionKeywords) == (Options(broadcast_buffers=False), {})
