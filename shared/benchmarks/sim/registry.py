"""Finds experiments by the names of their modules."""

import importlib
import pkgutil

from benchmarks.sim import experiments
from benchmarks.sim.experiment import Experiment


def experiment_names() -> list[str]:
    """In alphabetical order. Modules whose name begins with an underscore are helpers of others."""
    modules = (module.name for module in pkgutil.iter_modules(experiments.__path__))
    return sorted(name.replace("_", "-") for name in modules if not name.startswith("_"))


def load_experiment(name: str) -> Experiment:
    """Imports only its module. Raises ValueError, with the names that there are."""
    names = experiment_names()
    if name not in names:
        raise ValueError(f"experiment {name!r}: is none of {', '.join(names)}")
    module = importlib.import_module(f"{experiments.__name__}.{name.replace('-', '_')}")
    experiment = module.EXPERIMENT
    if not isinstance(experiment, Experiment) or experiment.name != name:
        raise ValueError(f"{module.__name__}: EXPERIMENT must be an Experiment named {name!r}")
    return experiment
