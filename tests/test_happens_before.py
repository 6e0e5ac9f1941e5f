"""The check for races of streams, on orders written by hand."""

from happens_before import HOST, Race, Range, Step, races

MAIN, SIDE, LINK = (0, 0), (0, 1), (0, 25)
BUCKET, OTHER = 0x1000, 0x2000
WHOLE, FIRST, SECOND = (BUCKET, 0, 256), (BUCKET, 0, 128), (BUCKET, 128, 256)


def reads(stream: tuple[int, int], name: str, *ranges: Range) -> Step:
    return Step("use", *stream, name=name, reads=ranges)


def writes(stream: tuple[int, int], name: str, *ranges: Range) -> Step:
    return Step("use", *stream, name=name, writes=ranges)


def after(waiting: tuple[int, int], other: tuple[int, int], point: int) -> list[Step]:
    """`waiting` waits for all that `other` has been given so far."""
    return [Step("reach", *other, point=point), Step("wait", *waiting, point=point)]


def named(found: list[Race]) -> list[tuple[str, str]]:
    return [race.operators for race in found]


def test_a_view_of_a_bucket_and_the_all_reduce_of_the_whole_race() -> None:
    (race,) = races([writes(SIDE, "mul", SECOND), writes(LINK, "allreduce", WHOLE)])
    assert race.operators == ("mul", "allreduce") and (race.begin, race.end) == (128, 256)
    assert {race.first.actor, race.second.actor} == {SIDE, LINK}
    assert str(race) == (
        "mul writes on stream 1 of device 0, allreduce writes on stream 25 of device 0: bytes 128 to 256 of 0x1000"
    )


def test_an_event_orders_them() -> None:
    assert not races([writes(SIDE, "mul", SECOND), *after(LINK, SIDE, 1), writes(LINK, "allreduce", WHOLE)])


def test_an_event_before_the_write_does_not_order_them() -> None:
    steps = [*after(LINK, SIDE, 1), writes(SIDE, "mul", SECOND), writes(LINK, "allreduce", WHOLE)]
    assert named(races(steps)) == [("mul", "allreduce")]


def test_disjoint_views_that_two_streams_write_do_not_race() -> None:
    assert not races([writes(MAIN, "mul", FIRST), writes(SIDE, "mul", SECOND)])
    assert races([writes(MAIN, "mul", FIRST), writes(SIDE, "mul", (BUCKET, 127, 256))])


def test_other_memory_and_two_reads_do_not_race() -> None:
    assert not races([writes(MAIN, "mul", WHOLE), writes(SIDE, "mul", (OTHER, 0, 256))])
    assert not races([reads(MAIN, "add", WHOLE), reads(SIDE, "add", WHOLE)])


def test_order_goes_on_through_other_streams_and_the_host() -> None:
    start, end = writes(SIDE, "mul", WHOLE), writes(LINK, "allreduce", WHOLE)
    assert not races([start, *after(MAIN, SIDE, 1), *after(LINK, MAIN, 2), end])
    assert not races([start, *after(HOST, SIDE, 1), end])
    assert races([start, *after(MAIN, SIDE, 1), end])


def test_what_the_host_reads_must_have_been_waited_for() -> None:
    copied, read = writes(MAIN, "copy_", WHOLE), reads(HOST, "tolist", WHOLE)
    assert named(races([copied, read])) == [("copy_", "tolist")]
    assert not races([copied, *after(HOST, MAIN, 1), read])


def test_every_reader_is_remembered_until_a_write_is_behind_it() -> None:
    steps = [reads(MAIN, "add", WHOLE), reads(SIDE, "sub", FIRST), *after(LINK, MAIN, 1)]
    assert named(races([*steps, writes(LINK, "allreduce", WHOLE)])) == [("sub", "allreduce")]
    assert not races([*steps, writes(LINK, "allreduce", SECOND)])
    assert not races([*steps, *after(LINK, SIDE, 2), writes(LINK, "allreduce", WHOLE)])


def test_a_read_hides_no_earlier_write() -> None:
    steps = [writes(MAIN, "mul", WHOLE), reads(MAIN, "add", WHOLE), reads(LINK, "allgather", WHOLE)]
    assert named(races(steps)) == [("mul", "allgather")]


def test_a_stream_that_was_recorded_orders_its_block_alone() -> None:
    used = [writes(SIDE, "mul", WHOLE, (OTHER, 0, 8)), Step("reach", *SIDE, point=1)]
    recorded = Step("recorded", *MAIN, point=1, writes=[WHOLE])
    assert named(races([*used, writes(MAIN, "free", WHOLE)])) == [("mul", "free")]
    assert not races([*used, recorded, writes(MAIN, "free", WHOLE)])
    assert races([*used, recorded, writes(MAIN, "free", (OTHER, 0, 8))])
    assert races([*used, recorded, writes(MAIN, "free", WHOLE), writes(LINK, "allreduce", WHOLE)])


def test_one_stream_is_in_order_by_itself() -> None:
    assert not races([writes(MAIN, "mul", WHOLE), writes(MAIN, "add", FIRST), reads(MAIN, "sub", WHOLE)])
