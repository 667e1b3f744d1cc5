"""Every target by its name."""

from collections.abc import Mapping

from tests.fuzz.target import Target
from tests.fuzz.targets import bus

TARGETS: Mapping[str, Target] = {target.name: target for module in (bus,) for target in module.TARGETS}
