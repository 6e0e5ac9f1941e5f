"""Reading the code that Inductor generates for a backward."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Statement:
    """A line of generated code that does something: a kernel or a collective, and the buffers it names."""

    kind: str  # "launch", "wait", "mm" or "kernel"
    buffers: tuple[str, ...]
    text: str


def body_of(source: str) -> str:
    """What a generated module runs; of several partitions, between which it may leave a CUDA graph, an error."""
    if "def partition_0(" not in source:
        return source[source.rindex("def call(") : source.rindex("runner = ")]
    assert "def partition_1(" not in source, "the graph was cut into several partitions"
    return source[source.index("def partition_0(") : source.rindex("class Runner")]


def read_statements(source: str) -> tuple[list[Statement], dict[str, str]]:
    """The statements of a generated backward in order, and which buffer each alias lies in."""
    body = body_of(source)
    aliases = dict(re.findall(r"(buf\d+) = (?:reinterpret_tensor\()?(buf\d+)\b.*# alias", body))
    statements = []
    for line in body.splitlines():
        text = line.strip()
        if "_c10d_functional.all_reduce_" in text:
            kind = "launch"
        elif "_c10d_functional.wait_tensor" in text:
            kind = "wait"
        elif text.startswith("extern_kernels.mm("):
            kind = "mm"
        elif re.match(r"(cpp_fused|triton_|extern_kernels|aoti|torch\.ops)", text):
            kind = "kernel"
        else:
            continue
        statements.append(Statement(kind, tuple(re.findall(r"\bbuf\d+\b", text)), text))
    return statements, aliases


def reads_in_flight(statements: Sequence[Statement], aliases: Mapping[str, str]) -> list[str]:
    """What names memory of a bucket between its launch and the waits."""
    launched: set[str] = set()
    found = []
    for statement in statements:
        if statement.kind == "wait":
            break
        named = {aliases.get(buffer, buffer) for buffer in statement.buffers}
        if statement.kind == "launch":
            launched |= named
        elif not launched.isdisjoint(named):
            found.append(statement.text)
    return found


def launches_and_waits(statements: Sequence[Statement]) -> tuple[list[int], list[int]]:
    """The places of both, when it has been seen that launches are in place and awaited at the very end."""
    launches = [n for n, statement in enumerate(statements) if statement.kind == "launch"]
    waits = [n for n, statement in enumerate(statements) if statement.kind == "wait"]
    assert min(waits) > max(launches), "a wait stands before the last launch"
    assert max(waits) == len(statements) - 1, "something runs after the first wait"
    buckets, awaited = (sorted(statements[n].buffers[0] for n in places) for places in (launches, waits))
    assert buckets == awaited, "an all-reduce is not in place"
    return launches, waits


def placed(statements: Sequence[Statement], aliases: Mapping[str, str], kernel: str) -> list[bool]:
    """Of each call of a kernel with this prefix, whether it writes the last buffer that it names into a bucket."""
    buckets = {statement.buffers[0] for statement in statements if statement.kind == "launch"}
    return [aliases.get(s.buffers[-1]) in buckets for s in statements if s.text.startswith(kernel)]
