"""compose/metrics/dashboards.py as a module: it is a program of that folder, and no package's."""

import importlib.util
import sys
from functools import cache
from types import ModuleType

from tests.metrics.prometheus_server import METRICS


@cache
def description() -> ModuleType:
    spec = importlib.util.spec_from_file_location("weir_compose_dashboards", METRICS / "dashboards.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for it there
    spec.loader.exec_module(module)
    return module
