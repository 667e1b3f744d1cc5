"""Places that do not take a page when it has come."""

from dataclasses import dataclass, replace
from pathlib import Path

from tests.contract.test_page_streams import ORDER, tcp

from weir.kv.memory.page_access import InPlace, PageMemoryAway
from weir.kv.movers.stream_pull import PullLimits


@dataclass(frozen=True)
class RefusingOnce(InPlace):
    """As where a device does not take a page at first."""

    refused: list[bool]

    def end(self, memory: memoryview) -> None:
        if not self.refused:
            self.refused.append(True)
            raise PageMemoryAway("not now")


def test_a_page_that_its_place_does_not_take_at_first_is_asked_for_anew(tmp_path: Path) -> None:
    with tcp(tmp_path) as world:
        offered = world.offer(ORDER)
        wanted = world.wanted(offered)
        assert isinstance(wanted[2].place, InPlace)
        wanted[2] = replace(wanted[2], place=RefusingOnce(wanted[2].place.memory, []))
        pull = world.pull(limits=PullLimits(num_streams=1))
        pull.want(wanted)
        figures = pull.finish()
        assert (world.received[: len(ORDER)] == world.pages[ORDER]).all()
        assert (figures.num_pages, figures.num_breaks) == (len(ORDER), 1)
