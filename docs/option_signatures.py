"""For the API page: the constructors' signatures with every option and its default, as help() shows them."""

from typing import Any

import griffe

KEYWORDS = {"compiled.compile_ddp": "CompilerKeywords", "eager.EagerDDP.__init__": "OptionKeywords"}


class OptionSignatures(griffe.Extension):
    """Does to the sources, which griffe reads, what `compiled_ddp.options.takes_options` does at run time."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Called when the package has been read."""
        options = pkg["options"]
        defaults = {name: field.value for name, field in options["Options"].attributes.items()}
        for path, keywords in KEYWORDS.items():
            *others, rest = pkg[path].parameters
            written_out = [
                griffe.Parameter(
                    name,
                    annotation=keyword.annotation,
                    kind=griffe.ParameterKind.keyword_only,
                    default=defaults[name],
                )
                for name, keyword in options[keywords].attributes.items()
            ]
            pkg[path].parameters = griffe.Parameters(*others, *written_out, rest)
