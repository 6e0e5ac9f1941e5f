"""The commands that make a shaped link; the link itself is made by `python -m benchmarks.compare --link 1gbit`."""

import pytest

from benchmarks import link
from benchmarks.link import LinkUnavailable, ShapedLink, link_or_loopback, parse_rate, setup_commands


@pytest.mark.parametrize("rate", ["1gbit", "600mbit", "2.5gbit", "56kbit"])
def test_rates_of_tc_are_accepted(rate: str) -> None:
    assert parse_rate(rate) == rate


@pytest.mark.parametrize("rate", ["fast", "1 gbit", "1gbit; true", "10", "1gbps"])
def test_anything_else_is_refused_with_an_example(rate: str) -> None:
    with pytest.raises(ValueError, match="1gbit"):
        parse_rate(rate)


def test_both_ends_are_shaped_inside_their_namespace() -> None:
    shapers = [command for command in setup_commands(["n0", "n1"], ["va", "vb"], "1gbit") if command[0] == "tc"]
    assert [(command[2], command[6]) for command in shapers] == [("n0", "va"), ("n1", "vb")]
    assert all(" ".join(command).endswith("tbf rate 1gbit burst 256kb limit 64mb") for command in shapers)


def test_no_command_touches_the_host_s_own_interfaces() -> None:
    for command in setup_commands(["n0", "n1"], ["va", "vb"], "1gbit"):
        assert command[:3] == ["ip", "netns", "add"] or (command[1] == "-n" and command[2] in ("n0", "n1"))


def test_interface_names_fit_the_kernel_s_fifteen_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link.os, "getpid", lambda: 4194304)  # the largest process id
    assert all(len(name) <= 15 for name in ShapedLink("1gbit").interfaces)


def test_half_of_the_ranks_sit_at_each_end_and_meet_at_rank_0() -> None:
    shaped = ShapedLink("1gbit")
    assert [shaped.end_of(rank, 4) for rank in range(4)] == [0, 0, 1, 1]
    assert shaped.command(1, 2, ["python", "x"]) == ["ip", "netns", "exec", shaped.namespaces[1], "python", "x"]
    near, far = shaped.environment(0, 2), shaped.environment(1, 2)
    assert near["MASTER_ADDR"] == far["MASTER_ADDR"] == ShapedLink.STORE_ADDRESS
    assert near["GLOO_SOCKET_IFNAME"] != far["GLOO_SOCKET_IFNAME"]


def test_without_root_the_link_falls_back_to_loopback_and_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(link, "unavailable_reason", lambda: "not root; run the same command under sudo")
    with pytest.raises(LinkUnavailable, match="sudo"):
        ShapedLink("1gbit").create()
    with link_or_loopback("1gbit") as found:
        assert found is None
    assert "sudo" in capsys.readouterr().out
