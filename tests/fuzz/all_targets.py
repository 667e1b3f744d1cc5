"""Every target by its name."""

from collections.abc import Mapping

from tests.fuzz.target import Target
from tests.fuzz.targets import bus, model_files

TARGETS: Mapping[str, Target] = {target.name: target for module in (bus, model_files) for target in module.TARGETS}
