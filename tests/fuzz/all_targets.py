"""Every target by its name."""

from collections.abc import Mapping

from tests.fuzz.target import Target
from tests.fuzz.targets import answers, arena, bodies, bus, grammars, model_files, pages, ports, rpc, settings

_PARTS = (answers, arena, bodies, bus, grammars, model_files, pages, ports, rpc, settings)
TARGETS: Mapping[str, Target] = {target.name: target for part in _PARTS for target in part.TARGETS}
