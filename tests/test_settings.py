"""What a wrapper was asked for, and what its users switch, without a wrapper."""

import torch
from calibrations import calibration

from compiled_ddp.options import Options
from compiled_ddp.wrapping.parts import Settings, Switches


def test_what_was_measured_is_not_among_what_was_given() -> None:
    settings = Settings(Options(), {}, on_default_group=True)
    settings.plan_for(calibration())
    settings.change(static_graph=True)
    assert settings.options == Options(calibration=calibration(), static_graph=True)
    assert settings.given == Options(static_graph=True)


def test_a_copys_settings_change_by_themselves_and_name_no_ranks() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    settings = Settings(Options(), {"dim": 1, "param_to_hook_all_reduce": parameter}, on_default_group=False)
    settings.plan_for(calibration())
    settings.move_inputs_to(torch.device("meta"))
    copied = settings.of_a_copy()
    assert (copied.options, copied.given, copied.input_device) == (settings.options, Options(), torch.device("meta"))
    assert copied.ddp_arguments == {"dim": 1} and copied.on_default_group
    copied.change(forward_sync_buffers=False)
    copied.change_ddp_arguments({"find_unused_parameters": True})
    assert settings.given == Options() and "find_unused_parameters" not in settings.ddp_arguments


def test_inputs_stay_where_they_are_unless_a_device_is_named() -> None:
    settings, x = Settings(Options(), {}, on_default_group=True), torch.zeros(2)
    (same,), kept = settings.placed((x,), {"y": x})
    assert same is x and kept["y"] is x
    settings.move_inputs_to(torch.device("meta"))
    (moved,), named = settings.placed((x,), {"y": [x]})
    assert moved.is_meta and named["y"][0].is_meta


def test_a_local_stretch_gives_back_what_it_found() -> None:
    switches = Switches(buffers_are_stale=True)
    with switches.local():
        with switches.local():
            assert not switches.synchronises
        assert not switches.synchronises
    assert switches.synchronises and switches.buffers_are_stale
